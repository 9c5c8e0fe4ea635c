"""The folder datasets of the paper: PACS, Office-Caltech-10 and DomainNet, with their names checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedcir.data.folders import ImageFile, scan
from fedcir.data.lists import read_list, with_lists
from fedcir.types import InputError


@dataclass(frozen=True)
class Published:
    """What a dataset holds according to its publication."""

    classes: tuple[str, ...]
    counts: dict[str, int]
    """Images by domain; 0 where the publication counts another set of classes."""


PACS = Published(
    ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
    {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
)
OFFICE_CALTECH_10 = Published(
    (
        "back_pack", "bike", "calculator", "headphones", "keyboard",
        "laptop_computer", "monitor", "mouse", "mug", "projector",
    ),
    {"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295},
)  # fmt: skip
DOMAINNET = Published(
    ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra"),
    dict.fromkeys(("clipart", "infograph", "painting", "quickdraw", "real", "sketch"), 0),
)
"""The ten classes that the field uses; the whole has 345."""


def pacs(root: Path, lists: Path | None) -> list[ImageFile]:
    """Four domains of seven classes, split by the official lists where they are given."""
    files = _checked(scan(root), PACS, "pacs", root)
    if lists is None:
        return files
    train = [name for domain in PACS.counts for name in read_list(lists / f"{domain}_train_kfold.txt")]
    test = [name for domain in PACS.counts for name in read_list(lists / f"{domain}_crossval_kfold.txt")]
    return with_lists(files, train, test)


def office_caltech_10(root: Path) -> list[ImageFile]:
    """Four domains of ten classes."""
    return _checked(scan(root), OFFICE_CALTECH_10, "office-caltech-10", root)


def domainnet(root: Path, classes: Sequence[str] | None) -> list[ImageFile]:
    """Six domains, those of them that are there, split by their official lists."""
    wanted = set(DOMAINNET.classes if classes is None else classes)
    present = [domain for domain in DOMAINNET.counts if (root / f"{domain}_train.txt").is_file()]
    if not present:
        raise InputError(f"data.root: {root} holds no <domain>_train.txt of DomainNet, such as clipart_train.txt")
    files = []
    for domain in present:
        for part in ("train", "test"):
            for name in read_list(root / f"{domain}_{part}.txt"):
                parts = name.split("/")
                if len(parts) != 3:
                    raise InputError(
                        f"{root / f'{domain}_{part}.txt'} names {name!r}, expected <domain>/<class>/<image>"
                    )
                if not wanted or parts[1] in wanted:
                    files.append(ImageFile(name, domain, parts[1], test=part == "test"))
    missing = wanted - {file.label for file in files}
    if missing:
        raise InputError(f"data.classes: no image of {min(missing)!r} in the lists of {root}")
    return files


def _checked(files: list[ImageFile], published: Published, name: str, root: Path) -> list[ImageFile]:
    """The same files if their domains and classes are those of the publication."""
    for what, got, want in (
        ("domain", {file.domain for file in files}, set(published.counts)),
        ("class", {file.label for file in files}, set(published.classes)),
    ):
        for extra in sorted(got - want):
            raise InputError(
                f"{root} has the {what} {extra!r}, which is not one of {name}; use --dataset folders for your own"
            )
        for missing in sorted(want - got):
            raise InputError(f"{root} lacks the {what} {missing!r} of {name}")
    return files
