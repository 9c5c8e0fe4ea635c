"""The datasets by name: what each is, and where it comes from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedcir.config import DataConfig, nearest
from fedcir.data.domains import Domains
from fedcir.data.pictures.items import Found
from fedcir.data.readers.download import Download
from fedcir.data.readers.folders import folders
from fedcir.data.readers.hub import hub
from fedcir.data.readers.made import kept_minidigits
from fedcir.data.readers.named import (
    DOMAINNET,
    OFFICE_CALTECH_10,
    PACS,
    TEN_CLASSES,
    Published,
    domainnet,
    office_caltech_10,
    pacs,
)
from fedcir.data.readers.npz import arrays
from fedcir.data.readers.table import table
from fedcir.data.readers.wilds import CAMELYON17, camelyon17, iwildcam
from fedcir.types import InputError

IMAGE_SIZE = 128
ALL = ("all",)
"""Every class, as a setting."""


def named_classes(data: DataConfig) -> tuple[str, ...]:
    """The classes that `data.classes` names; none if it is left out or asks for all."""
    return () if data.classes in (None, ALL) else data.classes or ()


@dataclass(frozen=True)
class Source:
    """A dataset: either pictures, which are decoded into the cache, or arrays that are there already."""

    about: str
    licence: str
    size: str
    where: str
    """How to get it."""
    pictures: Callable[[Path, DataConfig], Found] | None = None
    arrays: Callable[[Path], Domains] | None = None
    root: str = "folder"
    """What data.root names: a folder, a name, or nothing."""
    published: Published | None = None
    classes: tuple[str, ...] = ALL
    """Those that are taken unless data.classes says otherwise."""
    downloads: tuple[Download, ...] = ()
    """What `fedcir data prepare` fetches."""


_BU = "https://csr.bu.edu/ftp/visda/2019/multi-source"
_CODALAB = "https://worksheets.codalab.org/rest/bundles"
# The beginnings of the SHA-512, 200 bits and more, are those that kwcoco's grab_domainnet.py has written down; it has
# none for painting's lists. Without one, https says who sends a file, and an archive's checksums whether it is whole.
_DOMAINNET_SHA512 = {
    "groundtruth/clipart.zip": "3bcfb9ec1b4061e8d5b0b887d4ebd4a708732787fc563c6dfc2d",
    "infograph.zip": "47841f0d1b8606e4b02d508b250484d54f5cf04ef6c4875c6c5a39c",
    "groundtruth/painting.zip": "4c98b02563075948668a298c488660fda1d1a7ed85fd69caa7985fba",
    "quickdraw.zip": "127cce1dd57fc99992f8614de77d03ae8ed6af242973f7a013ec0a",
    "real.zip": "751713d4592d1278b50bf69787988cfae280cabdac80ee34ec4016e",
    "sketch.zip": "369b8b6d78ac61bfcc85f660d878ba5fc701524b82bbc2eb65ca9a",
    "domainnet/txt/clipart_train.txt": "400985ce2a0878df2d8e54f1996c4fc253e577c1f91136304e553b",
    "domainnet/txt/clipart_test.txt": "4d34a4a540d8b139499581875e2d18bbedd37c347233523d66beaf",
    "domainnet/txt/infograph_train.txt": "d9ed4d86e2ea20b44315699964b6b7dc09442f0539300444d9329d",
    "domainnet/txt/infograph_test.txt": "700f2b5deaad3923b0b8b85aeb694b73f24b13255cf48db3e770eaf",
    "domainnet/txt/painting_train.txt": "",
    "domainnet/txt/painting_test.txt": "",
    "domainnet/txt/quickdraw_train.txt": "7410e8a1debd769e0412725a0fcc646d83055d297b5f44a92f50308",
    "domainnet/txt/quickdraw_test.txt": "07a97e84d723f58dea67683ae5ddf013ebc5d33b76deca9a5d34f72",
    "domainnet/txt/real_train.txt": "a5a510fec614018546510d55c378bca008fcfd51062f6414583639e",
    "domainnet/txt/real_test.txt": "9586235e335340f065de720f99332bc906aa0ab147006a1a7ea4925",
    "domainnet/txt/sketch_train.txt": "ee92102f2b98f11765e6a97afbab15c60f2bac6e30fa7e1bc5a7db",
    "domainnet/txt/sketch_test.txt": "7384fc06670979911d7e1e9a34ba8a6cd20e9e77d6bc3536c739ff4",
}

SOURCES = {
    "minidigits": Source(
        "Digits in four styles: handwritten, printed, over photographs, outlined.",
        "BSD and font licences of the packages that it comes from",
        "2,396 images",
        "comes with fedcir",
        arrays=lambda root: kept_minidigits(),
        root="nothing",
    ),
    "folders": Source(
        "Your own images.",
        "yours",
        "any",
        "DIR/<domain>/<class>/<image>",
        pictures=lambda root, data: folders(root),
    ),
    "table": Source(
        "Your own images, with their labels in a CSV file.",
        "yours",
        "any",
        "DIR/labels.csv with the columns path, label and site",
        pictures=lambda root, data: table(root, None if data.table is None else Path(data.table), data.columns),
    ),
    "arrays": Source(
        "Your own arrays.", "yours", "any", "DIR/<domain>.npz of x_train, y_train, x_test, y_test", arrays=arrays
    ),
    "hub": Source(
        "Any Hugging Face dataset with columns for image, label and domain.",
        "differs by dataset",
        "any",
        "--data-root NAME on the hub (such as flwrlabs/pacs), a saved folder, or .parquet files",
        pictures=lambda root, data: hub(str(data.root), data.columns),
        root="name",
    ),
    "pacs": Source(
        "Photographs, paintings, cartoons and sketches; seven classes.",
        "none stated; research use",
        "9,991 images",
        "domaingeneralization.github.io, as DIR/<domain>/<class>/<image>; or --dataset hub --data-root flwrlabs/pacs",
        pictures=lambda root, data: pacs(root, None if data.lists is None else Path(data.lists)),
        published=PACS,
    ),
    "office-caltech-10": Source(
        "Objects in shop pictures, two cameras and Caltech-256; ten classes.",
        "none stated; research use",
        "2,533 images, 26 of them copies",
        "with the code of FedBN or GFK, as DIR/<domain>/<class>/<image>",
        pictures=lambda root, data: office_caltech_10(root),
        published=OFFICE_CALTECH_10,
    ),
    "domainnet": Source(
        "Six styles, from clip art to quick sketches; ten classes by default, of 345.",
        "fair use, research only",
        "586,575 images, 18 GB",
        "ai.bu.edu/M3SDA, cleaned, as DIR/<domain>/<class>/*.jpg and DIR/<domain>_train.txt, _test.txt",
        pictures=lambda root, data: domainnet(root, data.classes or TEN_CLASSES),
        published=DOMAINNET,
        classes=TEN_CLASSES,
        downloads=tuple(
            Download(f"{_BU}/{path}", Path(path).name.removesuffix(".zip"), path.endswith(".zip"), prefix)
            for path, prefix in _DOMAINNET_SHA512.items()
        ),
    ),
    "camelyon17": Source(
        "Lymph nodes with and without tumour, from five hospitals.",
        "CC0",
        "455,954 patches, 11 GB",
        "wilds.stanford.edu, as DIR/metadata.csv and DIR/patches/",
        pictures=lambda root, data: camelyon17(root),
        published=CAMELYON17,
        downloads=(
            Download(f"{_CODALAB}/0xe45e15f39fb54e9d9e919556af67aabe/contents/blob/", "metadata.csv", packed=True),
        ),
    ),
    "iwildcam": Source(
        "Camera traps: the ten cameras with the most animals, the ten most frequent animals.",
        "Community Data License Agreement, permissive",
        "203,029 images, 12 GB",
        "wilds.stanford.edu, as DIR/metadata.csv and DIR/train/",
        pictures=lambda root, data: iwildcam(root),
        downloads=(
            Download(f"{_CODALAB}/0x6313da2b204647e79a14b468131fcd64/contents/blob/", "metadata.csv", packed=True),
        ),
    ),
}

BUNDLED = tuple(name for name, source in SOURCES.items() if source.root == "nothing")
"""Datasets that come with fedcir."""


def find(data: DataConfig) -> tuple[Source, Path]:
    """The source of a name, and its root."""
    if data.name not in SOURCES:
        raise InputError(f"there is no dataset {data.name!r}; {nearest(data.name, SOURCES)}")
    source = SOURCES[data.name]
    if data.root is None and data.table is not None and data.name == "table":
        return source, Path(data.table).parent
    if source.root != "nothing" and data.root is None:
        raise InputError(f"dataset {data.name!r} needs data.root, the {source.root} that holds it")
    root = Path(data.root or ".")
    if source.root == "folder" and not root.is_dir():
        fetch = f"; `fedcir data prepare {data.name} --data-root {root}` fetches it" if source.downloads else ""
        hint = f": give it as data.table={root}" if data.name == "table" else ""
        raise InputError(
            f"data.root: {root} is a file, not a folder{hint}"
            if root.exists()
            else f"data.root: there is no folder {root}{fetch}",
            public="its data-root is not a folder",
        )
    return source, root
