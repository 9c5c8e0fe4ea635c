"""Images of an evaluation that the run trained on or chose on, found by content and not by name."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedcir.analysis.views import data_of_run
from fedcir.data.catalogue import SOURCES
from fedcir.data.domains import Domain, Domains, Split
from fedcir.data.hashes import ImageHashes, hash_samples, image_hashes
from fedcir.data.opening import open_dataset
from fedcir.engine.folder import IMAGE_HASHES, RunFolder
from fedcir.runs.run import Run
from fedcir.types import InputError

Which = Literal["test", "val", "train", "all"]
"""The images to evaluate on. Only train and val keep images that the run trained on or chose on."""


@dataclass(frozen=True)
class Overlap:
    """How many images of an evaluation the run had seen."""

    images: int
    """All images that were looked at."""
    trained: int = 0
    """Those that the run trained on."""
    chosen: int = 0
    """Others that it chose on: its validation images."""
    left_out: bool = True
    """Whether these were left out."""
    unchecked: str = ""
    """Why it could not be checked; empty if it was."""

    @property
    def seen(self) -> int:
        return self.trained + self.chosen

    @property
    def notes(self) -> list[str]:
        if self.unchecked:
            return [f"whether the model was trained on any of these images could not be checked: {self.unchecked}"]
        if not self.seen:
            return []
        seen = f"the run trained on {self.trained:,} of them and chose on {self.chosen:,} (equal content)"
        if self.left_out:
            return [f"{self.seen:,} of {self.images:,} images are left out: {seen}"]
        return [f"WARNING: this is no test, and accuracies are too high: of {self.images:,} images {seen}"]

    def to_json(self) -> dict[str, Any]:
        return {
            "checked": not self.unchecked,
            "images": self.images,
            "trained_on": self.trained,
            "chosen_on": self.chosen,
            "left_out": self.seen if self.left_out else 0,
        }


def select_images(run: Run, domains: Domains, which: Which) -> tuple[dict[str, Split], Overlap]:
    """The images to evaluate on by domain, and what was left out of them."""
    hashes = _hashes_of_run(run, domains)
    left_out = which in ("test", "all")
    selected: dict[str, Split] = {}
    images = trained = chosen = 0
    unchecked = "" if hashes is not None else _why_unknown(run)
    for domain in domains:
        parts = []
        for part in _parts(domain, which):
            images += len(part)
            found = None if hashes is None else hashes.find(part)
            if found is None:
                unchecked = unchecked or f"the run keeps hashes of files, and the images of {domains.name} are no files"
                parts.append(part)
                continue
            trained, chosen = trained + int(found[0].sum()), chosen + int(found[1].sum())
            seen = found[0] | found[1]
            parts.append(part.take(np.flatnonzero(~seen)) if left_out and seen.any() else part)
        if any(map(len, parts)):
            selected[domain.name] = _joined([part for part in parts if len(part)])
    overlap = Overlap(images, trained, chosen, left_out, unchecked)
    if images and not selected:
        raise InputError(
            f"no image of {domains.name} ({which}) is left to test on: of {images:,} images, the run trained on "
            f"{trained:,} and chose on {chosen:,}; add images that it has not seen"
        )
    return selected, overlap


def unseen_tests(run: Run, domains: Domains) -> tuple[Domains, Overlap]:
    """A dataset whose test images are those that the run has not seen, and what was left out of them."""
    selected, overlap = select_images(run, domains, "test")
    tested = (replace(domain, test=selected.get(domain.name, domain.test.take([]))) for domain in domains)
    return (replace(domains, domains=tuple(tested)) if overlap.seen else domains), overlap


def _parts(domain: Domain, which: Which) -> list[Split]:
    parts = {"train": domain.train, "val": domain.validation, "test": domain.test}
    return [part for name, part in parts.items() if which in (name, "all") and part is not None]


def _joined(parts: list[Split]) -> Split:
    if len(parts) == 1:
        return parts[0]
    labels, ids = np.concatenate([part.labels for part in parts]), [name for part in parts for name in part.ids]
    if all(part.images is parts[0].images for part in parts):
        rows = np.concatenate([part.where for part in parts])
        return Split(parts[0].images, labels, ids, rows, hashes=parts[0].hashes)
    return Split(np.concatenate([part.pixels(np.arange(len(part))) for part in parts]), labels, ids)


def _hashes_of_run(run: Run, domains: Domains) -> ImageHashes | None:
    """Those that the run keeps, or those of the images that its manifest names, if all are at hand."""
    saved = RunFolder(run.path).image_hashes()
    if saved is not None or "test" not in run.manifest:
        return saved
    data = run.config.data
    if SOURCES[data.name].pictures is None:  # names are positions in a file, which says nothing once it has changed
        with suppress(InputError):
            return image_hashes(*data_of_run(run)[1:])
        return None
    candidates: list[Domains] = [domains] if domains.name == data.name else []
    with suppress(InputError):
        whole = replace(data, val_fraction=0.0, train_per_domain=None)
        candidates = [open_dataset(whole, run.config.run.seed, to_train=False), *candidates]
    found = (_named_hashes(run, candidate) for candidate in candidates)
    return next((hashes for hashes in found if hashes is not None), None)


def _named_hashes(run: Run, domains: Domains) -> ImageHashes | None:
    """Hashes of the images that a manifest names; None if one of them is missing."""
    of_name = dict(_hashes_by_name(domains))
    train = {name for client in run.manifest["clients"] for name in client["train"]}
    validation = {name for names in run.manifest.get("validation", {}).values() for name in names}
    if not of_name.keys() >= train | validation:
        return None

    def ascending(names: Iterable[str]) -> Any:
        return np.unique(np.array([of_name[name] for name in names], dtype=np.uint64))

    return ImageHashes("file", ascending(train), ascending(validation))


def _hashes_by_name(domains: Domains) -> Iterator[tuple[str, int]]:
    for domain in domains:
        for split in _parts(domain, "all"):
            hashes = hash_samples(split, "file")
            if hashes is not None:
                yield from zip(split.ids, hashes.tolist(), strict=True)


def _why_unknown(run: Run) -> str:
    if "key" in run.manifest:
        return "sites do not tell the server which images they hold"
    return f"the run has no {IMAGE_HASHES}, and the images that its manifest names are not all at hand"
