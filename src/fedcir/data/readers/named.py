"""The folder datasets of the paper: PACS, Office-Caltech-10 and DomainNet, with their names checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedcir.config import nearest
from fedcir.data.pictures.items import Files, Found, Item
from fedcir.data.readers.folders import scan
from fedcir.data.readers.lists import read_list, with_lists
from fedcir.types import InputError


@dataclass(frozen=True)
class Published:
    """What a dataset holds according to its publication."""

    counts: dict[str, int]
    """Images by domain."""
    classes: tuple[str, ...] = ()
    """Empty where they are not checked."""
    partial: bool = False
    """Whether domains may be missing."""


PACS = Published(
    {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
    ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
)
OFFICE_CALTECH_10 = Published(
    {"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295},
    (
        "backpack", "bike", "calculator", "headphones", "keyboard",
        "laptop_computer", "monitor", "mouse", "mug", "projector",
    ),
)  # fmt: skip
DOMAINNET = Published(
    {"clipart": 48129, "infograph": 51605, "painting": 72266, "quickdraw": 172500, "real": 172947, "sketch": 69128},
    partial=True,
)
"""The cleaned version, all 345 classes."""
TEN_CLASSES = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
)  # fmt: skip
"""The classes of DomainNet that most papers use."""


def pacs(root: Path, lists: Path | None) -> Found:
    """Four domains of seven classes, split by the official lists where they are given or lie beside the images."""
    found = scan(root)
    items = found.pictures.items
    if lists is None and (root / "photo_train_kfold.txt").is_file():
        lists = root
    if lists is None:
        drawn = "there are no official lists (data.lists), so the split is drawn at random"
        return found._replace(notes=found.notes or (drawn,))
    train = [name for domain in PACS.counts for name in read_list(lists / f"{domain}_train_kfold.txt")]
    test = [name for domain in PACS.counts for name in read_list(lists / f"{domain}_crossval_kfold.txt")]
    listed = with_lists(items, train, test)
    left = len(items) - len(listed)
    notes = (f"{left} images are in no list and are left out",) if left else ()
    unused = tuple(u for u in found.unused if u.kind != ".txt" or (root / u.place).resolve() != lists.resolve())
    return Found(Files(root, listed), notes, unused)


def office_caltech_10(root: Path) -> Found:
    """Four domains of ten classes; some copies spell the first back_pack."""
    found = scan(root)
    items = [item._replace(label="backpack") if item.label == "back_pack" else item for item in found.pictures.items]
    return found._replace(pictures=Files(root, items))


def domainnet(root: Path, classes: Sequence[str]) -> Found:
    """Six domains, those of them that are there, split by their official lists."""
    wanted = set(classes)
    absent = [domain for domain in DOMAINNET.counts if not (root / f"{domain}_train.txt").is_file()]
    if len(absent) == len(DOMAINNET.counts):
        raise InputError(f"data.root: {root} holds no <domain>_train.txt of DomainNet, such as clipart_train.txt")
    items = []
    for domain in DOMAINNET.counts:
        for part in ("train", "test") if domain not in absent else ():
            path = root / f"{domain}_{part}.txt"
            for name, line in read_list(path).items():
                parts = name.split("/")
                if len(parts) != 3 or parts[0] != domain:
                    raise InputError(f"{path}, line {line} names {name!r}, expected {domain}/<class>/<image>")
                if wanted == {"all"} or parts[1] in wanted:
                    items.append(Item(name, domain, parts[1], part))
    if wanted != {"all"} and (missing := wanted - {item.label for item in items}):
        listed = {
            name.split("/")[1]
            for d in DOMAINNET.counts
            if d not in absent
            for name in read_list(root / f"{d}_train.txt")
        }
        raise InputError(
            f"data.classes: no image of {min(missing)!r} in the lists of {root}; {nearest(min(missing), listed)}"
        )
    notes = (f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing, and left out",)
    return Found(Files(root, items), notes if absent else ())


def verify(items: Sequence[Item], published: Published, name: str, root: Path) -> None:
    """Domains and classes are those of the publication."""
    for what, plural, got, want in (
        ("domain", "domains", {item.domain for item in items}, set(published.counts)),
        ("class", "classes", {item.label for item in items}, set(published.classes)),
    ):
        if want and (extra := got - want):
            raise InputError(
                f"{root} has the {what} {min(extra)!r}, but the {plural} of {name} are {', '.join(sorted(want))}; "
                "use the dataset folders for images of your own"
            )
        if want and not published.partial and (missing := want - got):
            raise InputError(f"{root} lacks the {what} {min(missing)!r} of {name}")
