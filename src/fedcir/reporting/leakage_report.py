"""Audit what a finished run reveals about its training images, and write a page about the result."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedcir.algorithms import make_algorithm
from fedcir.algorithms.fedcirone import FedCiROne
from fedcir.analysis import leakage
from fedcir.analysis.leakage import Audit, Inversion, SumLeakage, UploadSummary
from fedcir.analysis.sum_leakage import attack_sums
from fedcir.data.federation import build_federation
from fedcir.errors import InputError
from fedcir.files import check_output_folder, write_file
from fedcir.machine import use_threads
from fedcir.reporting.charts import Bars, Series
from fedcir.reporting.drawing import escape_math, save_figure
from fedcir.reporting.page import Figure, Rows, Section, Sentences, Table, render_page, to_sentence
from fedcir.runs.evaluation_data import exclude_seen_images, open_run_data
from fedcir.runs.reader import RunSource, to_run
from fedcir.runtime.resume import use_saved_code
from fedcir.types import OnProgress, ignore_progress

LIMITS = (
    "These attacks are simple. Where they find nothing, stronger attacks may succeed: with shadow models (Carlini et "
    "al., 2022), with updates of many rounds, or by a server that changes the model to learn more.",
    "Membership is measured on the final model. A server sees the model of every client in every round, which reveals "
    "more.",
    "Training and test images may differ for other reasons, for example because they show different patients. Then an "
    "AUC away from 0.5 does not only show memorisation.",
    "The reconstruction is an easy case: one step, few images, known labels, BatchNorm in evaluation mode. A "
    "round of many steps on larger batches is harder to invert, but not proven safe.",
    "Only differential privacy bounds what any attack can learn. An audit cannot.",
)
"""What an audit does not prove."""
FEW = 12
"""Most clients that are all listed."""
SUMS = (
    "AUC and advantage: training images of the client with the fewest images, and of the one with the most, against "
    "test images of its domain, by how far each lies outside the span of the Gram matrix (its leverage).",
    "Cosine: between the features of the images of the client's rarest class and the sum of that class. 1 shows an "
    "image's features as they are. Beside it, that of test images of this class, which are in no sum.",
)


def audit(
    run: RunSource,
    *,
    data_root: str | Path | None = None,
    samples: int = leakage.SAMPLES,
    images: int = leakage.IMAGES,
    steps: int = leakage.STEPS,
    out: str | Path | None = None,
    trust_code: bool = False,
    on_work: OnProgress = ignore_progress,
) -> Audit:
    """Attack a finished run with its own data: membership inference, gradient inversion, and what clients uploaded.

    `samples` is the number of training images of each domain to test for membership, `images` the batch size to
    reconstruct in `steps` steps; 0 steps skip the reconstruction. With `out`, that folder gets audit.html, audit.json
    and audit.png. `trust_code` allows code that is stored with the run to be executed.
    """
    for name, value, least in (("samples", samples, 10), ("images", images, 1), ("steps", steps, 0)):
        if value < least:
            raise InputError(f"{name} must be at least {least}, got {value}")
    folder = None if out is None else Path(out)
    if folder is not None:
        check_output_folder(folder)
    audited = to_run(run, trust_code)
    method = Path(audited.config.algorithm.name).stem
    audited = replace(audited, config=use_saved_code(audited.config, audited.path, audited.trust_code))
    config, domains, partitions = open_run_data(audited, None if data_root is None else str(data_root))
    if not audited.task.has_classes:
        raise InputError(f"audit attacks models of classification, and {audited.path} is a run of {audited.task.name}")
    domains, overlap = exclude_seen_images(audited, domains)
    algorithm, federation = make_algorithm(config.algorithm), build_federation(config, domains, partitions)
    membership = leakage.attack_membership(audited, config, domains, partitions, federation, samples)
    on_work(1, 2 if steps else 1, what="attacking the run")
    reason = leakage.explain_no_inversion(algorithm, federation)
    notes = [] if reason is None else [reason]
    if algorithm.pools:
        notes.append(f"{method} trains on all images in one place, so every image left its client")
    can_invert = steps > 0 and not notes
    inverted = leakage.invert_updates(audited, config, algorithm, federation, images, steps) if can_invert else ()
    is_secret = "key" in audited.manifest and config.privacy.by_server
    if is_secret:
        notes.append("participation in rounds is secret in this run: each site's audit log holds what it has sent")
    uploads = () if algorithm.pools or is_secret else leakage.summarise_uploads(audited, config, algorithm, federation)
    sums: tuple[SumLeakage, ...] = ()
    if isinstance(algorithm, FedCiROne):
        with use_threads(config.run.threads):
            sums = attack_sums(audited, config, algorithm, federation, samples)
    name = audited.path.resolve().name
    result = Audit(name, config.data.name, method, membership, inverted, uploads, (*notes, *overlap.notes), sums)
    if folder is None:
        return result
    folder.mkdir(parents=True, exist_ok=True)
    page, numbers, picture = (folder / f"audit.{kind}" for kind in ("html", "json", "png"))
    result = replace(result, page=page, numbers=numbers, picture=picture if inverted else None)
    if inverted:
        draw_inversions(inverted, picture)
    write_file(page, _render(result))
    write_file(numbers, json.dumps(result.to_json(), indent=1, ensure_ascii=False) + "\n")
    return result


def build_membership_rows(audit: Audit) -> Rows:
    """Build a table with a row for each domain."""
    rows = [["domain", "trained on", "others", "AUC (95 %)", "advantage (95 %)"]]
    for m in audit.membership:
        rows.append([m.domain, f"{m.trained:,}", f"{m.others:,}", f"{m.auc:.2f}", f"{m.advantage:.2f}"])
    return rows


def build_upload_rows(audit: Audit) -> Rows:
    """Build a table with a row for each client; with many, one for all that have sent the same."""
    rows = [["client", "uploads", "tensors each", "groups, bytes each", "bytes in all"]]
    equal: dict[str, list[UploadSummary]] = {}
    for upload in audit.sent:
        key = upload.client if len(audit.sent) <= FEW else str(replace(upload, client=""))
        equal.setdefault(key, []).append(upload)
    for upload, *others in equal.values():
        groups = ", ".join(f"{name} {size:,}" for name, size in upload.groups.items())
        client = upload.client + f" and {len(others)} others" * bool(others)
        rows.append([client, f"{upload.uploads:,}", f"{upload.tensors:,}", groups, f"{upload.bytes:,}"])
    return rows


def build_sum_rows(audit: Audit) -> Rows:
    """Build a table with a row for each client whose sums were attacked."""
    rows = [["sums with", "images", "AUC (95 %)", "advantage (95 %)", "rarest class", "cosine", "of others"]]
    for attack in audit.sums:
        m = attack.membership
        images = f"{attack.images:,}" + f" of {attack.summed:,}" * (attack.summed > attack.images)
        others = "-" if attack.cosine_of_others is None else f"{attack.cosine_of_others:.2f}"
        rare = f"{attack.rarest}, {attack.rarest_images:,}"
        rows.append([attack.client, images, f"{m.auc:.2f}", f"{m.advantage:.2f}", rare, f"{attack.cosine:.2f}", others])
    return rows


def build_inversion_rows(audit: Audit) -> Rows:
    """Build a table with a row for each inverted update."""
    rows = [["update of", "client", "PSNR in dB", "recognised"]]
    for inversion in audit.inverted:
        decibels = ", ".join(f"{value:.1f}" for value in inversion.psnr)
        recognised = f"{inversion.recognised} of {len(inversion.psnr)}, among {inversion.among:,}"
        rows.append([inversion.when, inversion.client, decibels, recognised])
    return rows


def describe_audit(audit: Audit) -> list[str]:
    """Summarise an audit in sentences."""
    sentences = []
    revealing = [domain for domain in audit.membership if domain.is_beyond_chance]
    if revealing:
        worst = max(revealing, key=lambda domain: domain.auc.value)
        names = ", ".join(domain.domain for domain in revealing)
        sentences.append(
            f"The model reveals which images it was trained on in {len(revealing)} of {len(audit.membership)} domains "
            f"({names}): the interval of the AUC is above 0.50 or that of the advantage above 0. The AUC is highest "
            f"in {worst.domain}: {worst.auc:.2f}; chance is 0.50."
        )
    elif audit.membership:
        sentences.append(
            "This attack could not tell training images from test images better than chance in any domain."
        )
    for attack in audit.sums:
        how = "in its sums" if attack.summed == attack.images else f"in the total of {attack.summed:,} images"
        sentence = (
            f"A server tells the training images of client {attack.client} ({attack.images:,}) {how} from test images "
            f"with an AUC of {attack.membership.auc:.2f}; chance is 0.50"
        )
        if not attack.is_noised:
            if attack.summed <= attack.features:
                sentence += f", and fewer images than the {attack.features:,} features hide nobody"
            if attack.summed == attack.images and attack.rarest_images == 1:
                sentence += f". The sum of its only image of {attack.rarest} is that image's features"
        sentences.append(f"{sentence}.")
    if audit.sums and not audit.sums[0].is_noised:
        sentences.append(
            "A site's min_per_class and min_batch_size keep sums over few images from leaving, and bound nothing; "
            "privacy.noise bounds what any attack can learn."
        )
    if audit.inverted:
        recognised = sum(inversion.recognised for inversion in audit.inverted)
        total = sum(len(inversion.psnr) for inversion in audit.inverted)
        sentences.append(
            f"From the update of one step, {recognised} of {total} reconstructed images are nearer to their original "
            "than to any other image of that client."
        )
    return [*sentences, *map(to_sentence, audit.notes)]


def _render(audit: Audit) -> str:
    domains = tuple(membership.domain for membership in audit.membership)
    series = Series.from_intervals(audit.name, [membership.auc for membership in audit.membership])
    bars = Bars("", "AUC", domains, (series,))
    table = Table("Telling training images from test images by their loss", build_membership_rows(audit))
    figure = Figure("AUC by domain", {"": bars}, "0.5 is chance. Whiskers show 95 % intervals.")
    sections = [
        Section("Findings", (Sentences(tuple(describe_audit(audit))),)),
        Section("Membership inference", (table, figure)),
    ]
    if audit.sums:
        table = Table("Attacks on the sums that clients sent", build_sum_rows(audit))
        sections.append(Section("Sums", (table, Sentences(SUMS))))
    if audit.picture is not None:
        where = f"The picture is in {audit.picture.name}, beside this page."
        warning = f"{where} It shows training images: protect it as such."
        table = Table("Images reconstructed from a gradient", build_inversion_rows(audit))
        sections.append(Section("Gradient inversion", (table, Sentences((warning,)))))
    if audit.sent:
        note = (
            "Each upload also carries the mean losses and the number of images, and each test result the number of "
            "correct predictions."
        )
        table = Table("What left each client", build_upload_rows(audit))
        sections.append(Section("Uploads", (table, Sentences((note,)))))
    sections.append(Section("What this does not prove", (Sentences(LIMITS),)))
    return render_page(f"{audit.name}: audit", f"{audit.algorithm} on {audit.dataset}.", sections)


def draw_inversions(inversions: Sequence[Inversion], path: Path) -> None:
    """Draw the originals in the first row, and the reconstructions of each attack below."""
    from matplotlib.figure import Figure as Drawing

    rows = [("original", inversions[0].originals)]
    rows += [(escape_math(f"from {inversion.when}"), inversion.reconstructed) for inversion in inversions]
    columns = len(inversions[0].originals)
    drawing = Drawing(figsize=(1.2 + 1.8 * columns, 2.0 * len(rows)), layout="constrained")
    for axes_row, (name, images) in zip(drawing.subplots(len(rows), columns, squeeze=False), rows, strict=True):
        axes_row[0].set_ylabel(name)
        for axes, image in zip(axes_row, images, strict=True):
            pixels = np.clip(image.transpose(1, 2, 0), 0, 1)
            axes.imshow(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels, cmap="gray", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
    save_figure(drawing, path)
