"""A first file of settings for some data, from a look at every image; nothing is trained."""

import os
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedcir.analysis.diagnose import Diagnosis, diagnose_data
from fedcir.analysis.diagnosis import total_variation
from fedcir.analysis.words import apart_in_words
from fedcir.config import Config, DataConfig, RunConfig, dump_toml, nested
from fedcir.data.catalogue import find
from fedcir.data.inspection import Findings, inspect_dataset
from fedcir.engine.files import write
from fedcir.engine.machine import pick_device
from fedcir.insight.choices import Choice, Look, choose
from fedcir.runs.batch import OnWork, unheard
from fedcir.types import InputError

WIDTH = 100


@dataclass(frozen=True)
class Starter:
    """Settings for some data, and why."""

    data: DataConfig
    look: Look
    findings: Sequence[str]
    """What the data look like, in sentences."""
    counts: Mapping[str, Mapping[str, int]]
    """Images by domain and class."""
    choices: Sequence[Choice]

    @property
    def tables(self) -> dict[str, Any]:
        """The settings, as sections of a TOML file."""
        named = {"data.name": self.data.name, "data.root": self.data.root}
        return nested({**named, **{choice.place: choice.value for choice in self.choices}})

    def toml(self, file: str = "fedcir.toml") -> str:
        """The file: what was found, then each setting under its reason."""
        lines = [f"# Settings for {self.data.root}, written by `fedcir init`. Change what you like.", "#"]
        lines += _comment("What was found: " + self._counted())
        lines += [f"# {line}".rstrip() for line in self._table()]
        for sentence in self.findings:
            lines += _comment(sentence)
        lines += ["#", *(f"# {line}" for line in _next(file))]
        why = {choice.place: choice.why for choice in self.choices}
        for section, values in self.tables.items():
            lines += ["", f"[{section}]"]
            for name, value in values.items():
                is_relative = (section, name) == ("data", "root") and not Path(value).is_absolute()
                # Paths in a file are relative to its folder.
                written = os.path.relpath(value, Path(file).parent) if is_relative else value
                lines += _comment(why.get(f"{section}.{name}", ""))
                lines.append(dump_toml({name: written}).rstrip())
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path, force: bool = False) -> None:
        """Write the file; with `force`, over an older one."""
        check_place(Path(path), self.data, force)
        write(Path(path), self.toml(str(path)))

    def _counted(self) -> str:
        images = sum(self.look.counts.values())
        return f"{len(self.look.counts)} domains, {self.look.classes} classes, {images:,} images."

    def _table(self) -> list[str]:
        width = max(len("domain"), *map(len, self.counts))
        rows = [f"  {'domain':{width}}  images  fewest of a class  most of a class"]
        for domain, by_class in self.counts.items():
            few, most = min(by_class.values()), max(by_class.values())
            rows.append(f"  {domain:{width}}  {sum(by_class.values()):6,}  {few:17,}  {most:15,}")
        return rows


def init(root: str | Path, *, dataset: str = "folders", on_work: OnWork = unheard) -> Starter:
    """Look at some data and choose settings for them, as `fedcir init` does.

    `root` is the data's folder, DIR/<domain>/<class>/<image> unless `dataset` names another kind. Every image is read.
    Feature shift is measured as `recommend` and `diagnose` do: on training images, under a network that has learned
    nothing.
    """
    data = DataConfig(dataset, str(root))
    try:
        found = inspect_dataset(data, partial(on_work, what="checking images"))
        _check(found, data)
        parts = _parts(data)
    except InputError as error:
        raise InputError(str(error).removeprefix("data.root: ")) from error
    look = Look(
        counts={domain: sum(by_class.values()) for domain, by_class in found.counts.items()},
        classes=len(found.classes),
        skew=_skew(found),
        side=int(np.median([min(size) for size, count in found.sizes.items() for _ in range(count)])),
        has_test="test" in parts,
        has_validation="validation" in parts,
        gpu=pick_device("auto").type != "cpu",
    )
    diagnosis = _diagnosis(data, on_work)
    findings = ["There are too few images to measure how far the domains are apart."]
    if diagnosis is not None:
        look = replace(look, shift=diagnosis.apart.mean_pair.value, skew=float(np.mean(list(diagnosis.skew.values()))))
        findings = apart_in_words(diagnosis)
    counts = {domain: {label: found.counts[domain][label] for label in found.classes} for domain in found.counts}
    return Starter(data, look, [*findings, *_notes(found)], counts, choose(look))


def check_place(path: Path, data: DataConfig, force: bool) -> None:
    """Refuse to write over a file, or in between the data."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file, such as {path / 'fedcir.toml'}")
    if path.exists() and not force:
        raise InputError(f"{path} exists: name another file, or write over it with force")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent}: create it, or choose another")
    if Path(data.root or "").resolve() in path.resolve().parents:
        raise InputError(f"{path} would lie among the data in {data.root}: choose another place")


def _check(found: Findings, data: DataConfig) -> None:
    """What stands in the way of training on several domains together."""
    if found.obstacle:
        raise InputError(f"{data.root} cannot be trained on: {found.obstacle}")
    if len(found.counts) < 2:
        only = next(iter(found.counts))
        raise InputError(
            f"{data.root} has one domain only, {only!r}: it should hold a folder for each site or kind of image, "
            "with the same classes in each"
        )
    for domain, labels in found.counts.items():
        others = {label for other, more in found.counts.items() if other != domain for label in more}
        if not others & labels.keys():
            own, elsewhere = (", ".join(sorted(names)[:3]) for names in (labels, others))
            raise InputError(
                f"domain {domain!r} of {data.root} has no class of the others: it has {own}, they have {elsewhere}; "
                "name the folders of a class alike"
            )


def _parts(data: DataConfig) -> set[str | None]:
    """What the data say themselves that their images are for."""
    source, root = find(data)
    if source.pictures is None:
        return {"train", "test"}
    return {item.part for item in source.pictures(root, data).pictures.items}


def _diagnosis(data: DataConfig, on_work: OnWork) -> Diagnosis | None:
    """How far the domains are apart; None where there are too few images to measure it."""
    config = Config(data=data, run=RunConfig(device="cpu"))
    measuring = partial(on_work, what="measuring distances")
    with suppress(InputError):
        return diagnose_data(config, on_distance=measuring, on_file=partial(on_work, what="decoding images"))
    return None


def _skew(found: Findings) -> float:
    """Mean total variation of the domains' labels to their average, over all images."""
    counts = {domain: np.array([by_class[c] for c in found.classes]) for domain, by_class in found.counts.items()}
    return float(np.mean(list(total_variation(counts).values())))


def _notes(found: Findings) -> list[str]:
    said = [f"Note: {domain} has no image of {', '.join(lacking)}." for domain, lacking in found.missing.items()]
    if copies := found.copies_left_out:
        are = "copies of other images are" if copies > 1 else "copy of another image is"
        said.append(f"Note: {copies} {are} left out.")
    more = len(found.spelling) + len(found.disputed) + sum(bool(each.advice) for each in found.unused)
    if more:
        said.append(f"Note: `fedcir data check` has {more} more remark{'s' * (more > 1)} on these data.")
    return said


def _next(file: str) -> list[str]:
    rows = [
        (f"fedcir run {file}", "train a model"),
        (f"fedcir compare {file}", "what this choice brings, beside plain FedAvg and a ceiling"),
        (f"fedcir recommend {file}", "try four candidates in short runs, if you have the time"),
        (f"fedcir tune {file}", "search for a better learning rate"),
    ]
    width = max(len(command) for command, _ in rows)
    return ["Next:", *(f"  {command:{width}}  {what}" for command, what in rows)]


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False)
