"""What a run gives away: numbers, a picture of what an update shows, and a page about both."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure as Drawing

from fedcir.engine.files import write
from fedcir.insight.charts import Bars, Series
from fedcir.insight.evaluation import check_place
from fedcir.insight.report.page import Figure, Section, Table, Words, page, sentence
from fedcir.insight.report.plots import plain, save
from fedcir.insight.report.tables import Rows
from fedcir.runs.batch import OnWork, unheard
from fedcir.runs.run import Source
from fedcir.use.audit import IMAGES, SAMPLES, STEPS, Audit, Inverted, audit_run

LIMITS = (
    "These attacks are simple. Where they find nothing, stronger attacks may succeed: with shadow models (Carlini et "
    "al., 2022), with updates of many rounds, or by a server that changes the model to learn more.",
    "Membership is measured on the final model. A server sees the model of every client in every round, which gives "
    "away more.",
    "Training and test images may differ for other reasons, for example because they show different patients. Then an "
    "AUC away from 0.5 is not only memory.",
    "The reconstruction is made easy: one step, a batch of few images, known labels, BatchNorm in evaluation mode. A "
    "round of many steps on larger batches is harder to invert, but not proven safe.",
    "Only differential privacy bounds what any attack can learn. An audit cannot.",
)
"""What an audit does not prove."""


@dataclass(frozen=True)
class Audited:
    """What was found, and where it was written."""

    audit: Audit
    page: Path | None
    picture: Path | None
    numbers: Path | None


def audit(
    run: Source,
    *,
    data_root: str | Path | None = None,
    samples: int = SAMPLES,
    images: int = IMAGES,
    steps: int = STEPS,
    out: str | Path | None = None,
    trust_code: bool = False,
    on_work: OnWork = unheard,
) -> Audited:
    """Attack a finished run with its own data, as `fedcir audit` does, to see what it gives away.

    `samples` are the training images of each domain to test for membership, `images` the size of the batch to
    reconstruct, in so many `steps`; with 0 none is. With `out`, that folder gets audit.html, audit.json and audit.png.
    `trust_code` lets code of the run's own run.
    """
    folder = None if out is None else Path(out)
    if folder is not None:
        check_place(folder)
    found = audit_run(
        run,
        data_root=data_root,
        samples=samples,
        images=images,
        steps=steps,
        trust_code=trust_code,
        on_work=on_work,
    )
    if folder is None:
        return Audited(found, None, None, None)
    folder.mkdir(parents=True, exist_ok=True)
    text, numbers, picture = (folder / f"audit.{kind}" for kind in ("html", "json", "png"))
    if found.inverted:
        draw_inversions(found.inverted, picture)
    write(text, audit_page(found, picture.name if found.inverted else None))
    write(numbers, json.dumps(found.to_json(), indent=1, ensure_ascii=False) + "\n")
    return Audited(found, text, picture if found.inverted else None, numbers)


def membership_rows(found: Audit) -> Rows:
    """A header, and a row for each domain."""
    rows = [["domain", "trained on", "others", "AUC (95 %)", "advantage (95 %)"]]
    for each in found.membership:
        rows.append([each.domain, f"{each.trained:,}", f"{each.others:,}", f"{each.auc:.2f}", f"{each.advantage:.2f}"])
    return rows


def sent_rows(found: Audit) -> Rows:
    """A header, and a row for each client."""
    rows = [["client", "uploads", "tensors each", "groups, bytes each", "bytes in all"]]
    for each in found.sent:
        groups = ", ".join(f"{name} {size:,}" for name, size in each.groups.items())
        rows.append([each.client, f"{each.uploads:,}", f"{each.tensors:,}", groups, f"{each.bytes:,}"])
    return rows


def inverted_rows(found: Audit) -> Rows:
    """A header, and a row for each attack."""
    rows = [["update of", "client", "PSNR in dB", "recognised"]]
    for each in found.inverted:
        decibels = ", ".join(f"{value:.1f}" for value in each.psnr)
        rows.append([each.when, each.client, decibels, f"{each.recognised} of {len(each.psnr)}, among {each.among:,}"])
    return rows


def audit_findings(found: Audit) -> list[str]:
    """The tables in words."""
    said = []
    telling = [domain for domain in found.membership if domain.is_beyond_chance]
    if telling:
        worst = max(telling, key=lambda domain: domain.auc.value)
        names = ", ".join(domain.domain for domain in telling)
        said.append(
            f"The model gives away which images it was trained on in {len(telling)} of {len(found.membership)} domains "
            f"({names}): the interval of the AUC is above 0.50 or that of the advantage above 0. The AUC is highest "
            f"in {worst.domain}: {worst.auc:.2f}; guessing has 0.50."
        )
    elif found.membership:
        said.append("This attack could not tell training images from test images better than chance in any domain.")
    if found.inverted:
        known = sum(each.recognised for each in found.inverted)
        total = sum(len(each.psnr) for each in found.inverted)
        said.append(
            f"From the update of one step, {known} of {total} reconstructed images are nearer to their original than "
            "to any other image of that client."
        )
    return [*said, *(sentence(note) for note in found.notes)]


def audit_page(found: Audit, picture: str | None) -> str:
    """The page's HTML."""
    domains = tuple(each.domain for each in found.membership)
    places = tuple(float(place) for place in range(len(domains)))
    value, low, high = (tuple(getattr(each.auc, end) for each in found.membership) for end in ("value", "low", "high"))
    bars = Bars("", "AUC", domains, (Series(found.name, places, value, low, high),))
    sections = [
        Section("Findings", (Words(tuple(audit_findings(found))),)),
        Section(
            "Which images it was trained on",
            (
                Table("Telling training images from test images by their loss", membership_rows(found)),
                Figure("AUC by domain", {"": bars}, "0.5 is guessing. Whiskers show 95 % intervals."),
            ),
        ),
    ]
    if picture is not None:
        shown = Words(
            (f"The picture is in {picture}, beside this page. It shows training images: keep it as you keep them.",)
        )
        sections.append(Section("What an update shows", (Table("Images from a gradient", inverted_rows(found)), shown)))
    if found.sent:
        beside = (
            "Each upload also carries the mean losses and the number of images; each test the number of correct ones."
        )
        sections.append(Section("What left each client", (Table("Uploads", sent_rows(found)), Words((beside,)))))
    sections.append(Section("What this does not prove", (Words(LIMITS),)))
    return page(f"{found.name}: audit", f"{found.algorithm} on {found.dataset}.", sections, [])


def draw_inversions(inverted: Sequence[Inverted], path: Path) -> None:
    """Originals in the first row, and what came out of each attack below."""
    rows = [("original", inverted[0].originals), *((plain(f"from {each.when}"), each.found) for each in inverted)]
    columns = len(inverted[0].originals)
    drawing = Drawing(figsize=(1.2 + 1.8 * columns, 2.0 * len(rows)), layout="constrained")
    axes = drawing.subplots(len(rows), columns, squeeze=False)
    for line, (name, images) in zip(axes, rows, strict=True):
        line[0].set_ylabel(name)
        for place, image in zip(line, images, strict=True):
            shown = np.clip(image.transpose(1, 2, 0), 0, 1)
            place.imshow(shown.squeeze(-1) if shown.shape[-1] == 1 else shown, cmap="gray", vmin=0, vmax=1)
            place.set_xticks([])
            place.set_yticks([])
    save(drawing, path)
