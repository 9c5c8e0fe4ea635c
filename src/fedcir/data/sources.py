"""The datasets by name: what each is, where it comes from, and how it is opened."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedcir.config import DataConfig, nearest
from fedcir.data.arrays import arrays
from fedcir.data.cache import OnFile
from fedcir.data.domains import Domain, Domains, stratified_sample
from fedcir.data.folders import ImageFile, Splitting, open_files, scan
from fedcir.data.named import DOMAINNET, OFFICE_CALTECH_10, PACS, Published, domainnet, office_caltech_10, pacs
from fedcir.data.wilds import camelyon17, iwildcam
from fedcir.rng import numpy_rng
from fedcir.types import InputError

IMAGE_SIZE = 128


@dataclass(frozen=True)
class Source:
    """A dataset: either image files, which are cached, or arrays that are there already."""

    about: str
    licence: str
    size: str
    where: str
    """How to get it."""
    files: Callable[[Path, DataConfig], list[ImageFile]] | None = None
    arrays: Callable[[Path], Domains] | None = None
    needs_root: bool = True
    published: Published | None = None


SOURCES = {
    "minidigits": Source(
        "Digits in four styles: handwritten, printed, over photographs, outlined.",
        "BSD and font licences of the packages that carry it",
        "2,396 images of 32 pixels",
        "comes with fedcir: it is made from scikit-learn's and matplotlib's own files",
        arrays=lambda root: _minidigits(),
        needs_root=False,
    ),
    "folders": Source(
        "Your own images.", "yours", "any", "DIR/<domain>/<class>/<image>", files=lambda root, data: scan(root)
    ),
    "arrays": Source(
        "Your own arrays.", "yours", "any", "DIR/<domain>.npz with x_train, y_train, x_test, y_test", arrays=arrays
    ),
    "pacs": Source(
        "Photographs, paintings, cartoons and sketches of seven classes.",
        "research use",
        "9,991 images",
        "the authors' page, domaingeneralization.github.io; DIR/<domain>/<class>/<image>",
        files=lambda root, data: pacs(root, None if data.lists is None else Path(data.lists)),
        published=PACS,
    ),
    "office-caltech-10": Source(
        "Objects in shop pictures, two cameras and Caltech-256; ten classes.",
        "research use",
        "2,533 images, 26 of them twice",
        "with the code of FedBN or of GFK; DIR/<domain>/<class>/<image>",
        files=lambda root, data: office_caltech_10(root),
        published=OFFICE_CALTECH_10,
    ),
    "domainnet": Source(
        "Six styles, from clip art to quick sketches; ten classes by default, of 345.",
        "fair use, research only",
        "586,575 images",
        "ai.bu.edu/M3SDA, the cleaned version; DIR/<domain>/<class>/*.jpg and DIR/<domain>_train.txt, _test.txt",
        files=lambda root, data: domainnet(root, data.classes),
        published=DOMAINNET,
    ),
    "camelyon17": Source(
        "Lymph nodes with and without tumour, from five hospitals.",
        "CC0",
        "455,954 patches, 10 GB",
        "wilds.stanford.edu; DIR/metadata.csv and DIR/patches/",
        files=lambda root, data: camelyon17(root),
    ),
    "iwildcam": Source(
        "Camera traps: the ten cameras with the most animals, the ten most frequent animals.",
        "Community Data License Agreement, permissive",
        "203,029 images, 11 GB",
        "wilds.stanford.edu; DIR/metadata.csv and DIR/train/",
        files=lambda root, data: iwildcam(root),
    ),
}


def open_dataset(data: DataConfig, seed: int, on_file: OnFile | None = None) -> Domains:
    """The configured dataset, checked to be one that can be trained on."""
    source, root = find(data)
    if source.files is not None:
        files = chosen_files(source, root, data)
        size = data.image_size or IMAGE_SIZE
        domains = open_files(data.name, root, files, size, Splitting(data.test_fraction, seed), on_file)
    else:
        assert source.arrays is not None
        domains = source.arrays(root)
        if data.image_size not in (None, domains.image_shape[0]):
            raise InputError(
                f"data.image_size is {data.image_size}, {data.name} has images of {domains.image_shape[0]}"
            )
    _check_classes(domains, f"in any domain of {data.name}")
    if data.val_fraction:
        domains = replace(domains, domains=tuple(_with_validation(each, data.val_fraction, seed) for each in domains))
    if data.train_per_domain is not None:
        domains = domains.capped(data.train_per_domain, seed)
        _check_classes(domains, f"left; raise data.train_per_domain={data.train_per_domain}")
    return domains


def find(data: DataConfig) -> tuple[Source, Path]:
    """The source of a name, and its folder."""
    if data.name not in SOURCES:
        raise InputError(f"no dataset {data.name!r}; {nearest(data.name, SOURCES)}")
    source = SOURCES[data.name]
    if source.needs_root and data.root is None:
        raise InputError(f"dataset {data.name!r} needs --data-root, the folder that holds it")
    root = Path(data.root or ".")
    if source.needs_root and not root.is_dir():
        raise InputError(
            f"data.root: {root} is a file, not a folder" if root.exists() else f"data.root: no folder {root}"
        )
    return source, root


def chosen_files(source: Source, root: Path, data: DataConfig) -> list[ImageFile]:
    """The files of a dataset, those of the configured classes."""
    assert source.files is not None
    files = source.files(root, data)
    if data.classes is None:
        return files
    labels = {file.label for file in files}
    for label in data.classes:
        if label not in labels:
            raise InputError(f"data.classes: no class {label!r} in {root}; {nearest(label, labels)}")
    return [file for file in files if file.label in data.classes]


def _minidigits() -> Domains:
    from fedcir.data.minidigits import minidigits  # brings scikit-learn, which takes a second to import

    return minidigits()


def _with_validation(domain: Domain, fraction: float, seed: int) -> Domain:
    rng = numpy_rng(seed, "validation", domain.name)
    held = stratified_sample(domain.train.labels, round(fraction * len(domain.train)), rng)
    kept = np.setdiff1d(np.arange(len(domain.train)), held)
    if not len(held) or not len(kept):
        raise InputError(f"data.val_fraction={fraction} of {len(domain.train)} images of {domain.name!r} leaves none")
    return replace(domain, train=domain.train.take(kept), validation=domain.train.take(held))


def _check_classes(domains: Domains, where: str) -> None:
    if len(domains.classes) < 2:
        raise InputError(f"{domains.name} has one class only, {domains.classes[0]!r}: a classifier needs two")
    counts = np.bincount(np.concatenate([d.train.labels for d in domains]), minlength=len(domains.classes))
    for name, count in zip(domains.classes, counts, strict=True):
        if count == 0:
            raise InputError(f"class {name!r} has no training image {where}")
    for domain in domains:
        if len(np.unique(domain.train.labels)) == 1:
            only = domains.classes[domain.train.labels[0]]
            raise InputError(
                f"domain {domain.name!r} holds the class {only!r} only: add images of another, or leave it out"
            )
