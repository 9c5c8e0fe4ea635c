"""Data of a finished run, and the overlap of other images with its training data."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcir.config import Config
from fedcir.data.domains import Domain, Domains, Split
from fedcir.data.federation import partition_dataset
from fedcir.data.manifest import build_manifest
from fedcir.data.opening import get_source, has_dataset, open_dataset
from fedcir.data.partition import Partition
from fedcir.data.splits import ImageHashes, hash_images_in_use, hash_samples
from fedcir.errors import InputError
from fedcir.rng import numpy_rng
from fedcir.runs.reader import Run
from fedcir.runtime.resume import use_saved_data
from fedcir.runtime.run_folder import IMAGE_HASHES, RunFolder

Labels = NDArray[np.int64]

SEED = 0
"""Seed of every evaluation, so that all runs are evaluated on the same images and can be paired."""


def open_run_data(run: Run, data_root: str | None = None) -> tuple[Config, Domains, Partition]:
    """Open the data of a finished run: its config, domains and partition. Refuse data that have changed."""
    if not run.finished:
        raise InputError(f"{run.path} holds no finished run: resume it to finish it")
    config = use_saved_data(run.config, run.path, run.trust_code)
    if not has_dataset(config.data.name):
        fix = "pass their representations to fedcir.analysis.divergences instead"
        raise InputError(f"{run.path} is a run of fedcir.train on your own Datasets: {fix}")
    if data_root is not None:
        config = replace(config, data=replace(config.data, root=data_root))
    root = config.data.root
    if root is None and "key" in run.manifest and get_source(config.data.name).root == "folder":
        sites = ", ".join(dict.fromkeys(client["domain"] for client in run.manifest["clients"]))
        fix = "give data_root, a folder that holds the images of all of them, or another dataset and its data_root"
        raise InputError(f"{run.path} ran across sites, which keep their images ({sites}): {fix}")
    if get_source(config.data.name).root == "folder" and root is not None and not Path(root).is_dir():
        raise InputError(f"{run.path} ran on {root}, which is no longer a folder: give its new place as data_root")
    domains, shares = partition_dataset(config)
    if "test" in run.manifest:
        same = build_manifest(domains, shares)["hash"] == run.manifest["hash"]
    else:  # a deployment, whose manifest counts samples and does not name them
        counts = {domain.name: len(domain.test) for domain in domains}
        same = {client["domain"]: client.get("test") for client in run.manifest["clients"]} == counts
    if not same:
        raise InputError(
            f"the data at {root} are not those that {run.path} ran on: restore the folder as it was then"
            if root is not None
            else f"{config.data.name} has changed since {run.path} ran on it: use the version of fedcir that wrote it"
        )
    return config, domains, shares


def sample_rows(count: int, limit: int | None, seed: int, domain: str) -> Labels:
    """Choose at most `limit` rows of a domain's images. Equal arguments give equal rows."""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.sort(numpy_rng(seed, "views", domain).permutation(count)[:limit])


SplitName = Literal["test", "val", "train", "all"]
"""Images to evaluate on. With test and all, images that the run trained or validated on are left out."""


@dataclass(frozen=True)
class Overlap:
    """Number of images of an evaluation that the run has used."""

    images: int
    """All images of the evaluation."""
    trained: int = 0
    """Images that the run trained on."""
    chosen: int = 0
    """Further images that it validated on."""
    left_out: bool = True
    """Whether they were left out."""
    unchecked: str = ""
    """Reason why the overlap could not be checked; empty if it was."""

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


def select_images(run: Run, domains: Domains, split: SplitName) -> tuple[dict[str, Split], Overlap]:
    """Select the images to evaluate on by domain, without those that the run has used."""
    hashes = _load_hashes(run, domains)
    left_out = split in ("test", "all")
    selected: dict[str, Split] = {}
    images = trained = chosen = 0
    unchecked = ""
    if hashes is None and "key" in run.manifest:
        unchecked = "sites do not tell the server which images they hold"
    elif hashes is None:
        unchecked = f"the run has no {IMAGE_HASHES}, and the images that its manifest names cannot all be found"
    for domain in domains:
        parts = []
        for part in _select_splits(domain, split):
            images += len(part)
            matches = None if hashes is None else hashes.find(part)
            if matches is None:
                unchecked = unchecked or f"the run keeps hashes of files, and the images of {domains.name} are no files"
                parts.append(part)
                continue
            trained, chosen = trained + int(matches[0].sum()), chosen + int(matches[1].sum())
            seen = matches[0] | matches[1]
            parts.append(part.take(np.flatnonzero(~seen)) if left_out and seen.any() else part)
        if any(map(len, parts)):
            selected[domain.name] = _join_splits([part for part in parts if len(part)])
    overlap = Overlap(images, trained, chosen, left_out, unchecked)
    if images and not selected:
        used = f"of {images:,} images, the run trained on {trained:,} and chose on {chosen:,}"
        left = f"no image of {domains.name} ({split}) is left to test on"
        raise InputError(f"{left}: {used}; add images that it has not seen")
    return selected, overlap


def exclude_seen_images(run: Run, domains: Domains) -> tuple[Domains, Overlap]:
    """Remove the test images that the run has used from a dataset."""
    selected, overlap = select_images(run, domains, "test")
    tested = (replace(domain, test=selected.get(domain.name, domain.test.take([]))) for domain in domains)
    return (replace(domains, domains=tuple(tested)) if overlap.seen else domains), overlap


def _select_splits(domain: Domain, split: SplitName) -> list[Split]:
    parts = {"train": domain.train, "val": domain.validation, "test": domain.test}
    return [part for name, part in parts.items() if split in (name, "all") and part is not None]


def _join_splits(parts: list[Split]) -> Split:
    if len(parts) == 1:
        return parts[0]
    labels = np.concatenate([part.labels for part in parts])
    if all(part.images is parts[0].images for part in parts):
        rows = np.concatenate([part.where for part in parts])
        return replace(parts[0], labels=labels, rows=rows, groups=None)
    names = [name for part in parts for name in part.ids]
    images = np.concatenate([part.pixels(np.arange(len(part))) for part in parts])
    targets = None
    if parts[0].targets is not None:
        targets = np.concatenate([part.select_targets(np.arange(len(part))) for part in parts])
    return Split(images, labels, names, targets=targets)


def _load_hashes(run: Run, domains: Domains) -> ImageHashes | None:
    """Hashes that the run saved, or of the images that its manifest names, if all are found."""
    saved = RunFolder(run.path).image_hashes()
    if saved is not None or "test" not in run.manifest:
        return saved
    data = use_saved_data(run.config, run.path, run.trust_code).data
    if not get_source(data.name).has_image_files:  # names are positions in a file, which may have changed
        with suppress(InputError):
            return hash_images_in_use(*open_run_data(run)[1:])
        return None
    candidates: list[Domains] = [domains] if domains.name == data.name else []
    with suppress(InputError):
        whole = replace(data, val_fraction=0.0, train_per_domain=None)
        candidates = [open_dataset(whole, run.config.run.seed, to_train=False), *candidates]
    candidate_hashes = (_hash_named_images(run, candidate) for candidate in candidates)
    return next((hashes for hashes in candidate_hashes if hashes is not None), None)


def _hash_named_images(run: Run, domains: Domains) -> ImageHashes | None:
    """Hashes of the images that the manifest names; None if one is missing."""
    hash_of: dict[str, int] = {}
    for domain in domains:
        for split in _select_splits(domain, "all"):
            if (hashes := hash_samples(split, "file")) is not None:
                hash_of |= zip(split.ids, hashes.tolist(), strict=True)
    train = {name for client in run.manifest["clients"] for name in client["train"]}
    validation = {name for names in run.manifest.get("validation", {}).values() for name in names}
    if not hash_of.keys() >= train | validation:
        return None

    ascending = (np.unique(np.array([hash_of[name] for name in names], np.uint64)) for names in (train, validation))
    return ImageHashes("file", *ascending)
