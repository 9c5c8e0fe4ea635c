"""Published datasets whose names are checked: PACS, Office-Caltech-10, DomainNet, and two of WILDS.

`camelyon17` and `iwildcam` have the folder layout of WILDS: metadata.csv, and images at the paths that its columns
tell. Koh et al., "WILDS: A Benchmark of in-the-Wild Distribution Shifts", https://arxiv.org/abs/2012.07421. Its
package is not needed to read them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

from fedcir.config import DataConfig
from fedcir.data.sources.download import Download
from fedcir.data.sources.folders import list_folder_images
from fedcir.data.sources.source import DatasetSource, ImageFiles, ImageIndex, ImageRecord, Part, Published
from fedcir.data.sources.table import TableRow, read_rows
from fedcir.errors import InputError, suggest_name
from fedcir.files import MAX_TABLE_BYTES, read_text
from fedcir.text import join_names

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

_BU = "https://csr.bu.edu/ftp/visda/2019/multi-source"
# The beginnings of the SHA-512, 200 bits and more, are those that kwcoco's grab_domainnet.py has written down; it has
# none for painting's lists. Without one, https says who sends a file, and an archive's checksums whether it is whole.
DOMAINNET_SHA512 = {
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
_CODALAB = "https://worksheets.codalab.org/rest/bundles"
CAMERAS = 10
ANIMALS = 10
EMPTY = "0"  # the category of images without an animal
CAMELYON17 = Published(
    {"hospital-0": 59436, "hospital-1": 34904, "hospital-2": 85054, "hospital-3": 129838, "hospital-4": 146722},
    ("normal", "tumor"),
)


def read_list(path: Path) -> dict[str, int]:
    """Return the line of each path in a list of lines `path label`; a path may hold spaces."""
    try:
        lines = read_text(path, MAX_TABLE_BYTES).splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the list {path}: {error}") from error
    names = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            name, _, label = line.strip().rpartition(" ")
            if not name or not label.isdigit():
                raise InputError(f"{path}, line {number}: expected `path label`, got {line!r}")
            names[name] = number
    return names


def with_lists(items: Sequence[ImageRecord], train: Iterable[str], test: Iterable[str]) -> list[ImageRecord]:
    """Select the items that a list names, each marked as train or test. Extensions may differ (.png, .jpg)."""

    def stem(name: str) -> str:
        return name.rpartition(".")[0] or name

    train_names, test_names = ({stem(name): name for name in names} for names in (train, test))
    if repeated := train_names.keys() & test_names.keys():
        raise InputError(f"{min(repeated)} is in the train list and in the test list: remove it from one of them")
    parts: dict[str, Part] = {**dict.fromkeys(train_names, "train"), **dict.fromkeys(test_names, "test")}
    marked = [item._replace(part=parts[stem(item.name)]) for item in items if stem(item.name) in parts]
    if missing := parts.keys() - {stem(item.name) for item in marked}:
        names = [repr((train_names | test_names)[name]) for name in sorted(missing)]
        raise InputError(f"the lists name images that do not exist: {join_names(names, 1)}")
    return marked


class Pacs(DatasetSource):
    about = "Photographs, paintings, cartoons and sketches; seven classes."
    licence = "none stated; research use"
    size = "9,991 images"
    where = (
        "domaingeneralization.github.io, as DIR/<domain>/<class>/<image>; or --dataset hub --data-root flwrlabs/pacs"
    )
    published = PACS

    def list_images(self, root: Path, data: DataConfig) -> ImageIndex:
        """Split by the official lists if data.lists names their folder, or they are beside the images."""
        index = list_folder_images(root)
        lists = root if data.lists is None else Path(data.lists)
        if data.lists is None and not (root / "photo_train_kfold.txt").is_file():
            note = "there are no official lists (data.lists), so the split is drawn at random"
            return index._replace(notes=index.notes or (note,))
        train = [name for domain in PACS.counts for name in read_list(lists / f"{domain}_train_kfold.txt")]
        test = [name for domain in PACS.counts for name in read_list(lists / f"{domain}_crossval_kfold.txt")]
        listed = with_lists(index.pictures.items, train, test)
        unlisted = len(index.pictures.items) - len(listed)
        notes = (f"{unlisted} images are in no list and are left out",) if unlisted else ()
        unused = tuple(u for u in index.unused if u.kind != ".txt" or (root / u.place).resolve() != lists.resolve())
        return ImageIndex(ImageFiles(root, listed), notes, unused)


class OfficeCaltech10(DatasetSource):
    about = "Objects in shop pictures, two cameras and Caltech-256; ten classes."
    licence = "none stated; research use"
    size = "2,533 images, 26 of them copies"
    where = "with the code of FedBN or GFK, as DIR/<domain>/<class>/<image>"
    published = OFFICE_CALTECH_10

    def list_images(self, root: Path, data: DataConfig) -> ImageIndex:
        index = list_folder_images(root)  # some copies spell the first class back_pack
        items = [i._replace(label="backpack") if i.label == "back_pack" else i for i in index.pictures.items]
        return index._replace(pictures=ImageFiles(root, items))


class DomainNet(DatasetSource):
    about = "Six styles, from clip art to quick sketches; ten classes by default, of 345."
    licence = "fair use, research only"
    size = "586,575 images, 18 GB"
    where = "ai.bu.edu/M3SDA, cleaned, as DIR/<domain>/<class>/*.jpg and DIR/<domain>_train.txt, _test.txt"
    published = DOMAINNET
    classes = TEN_CLASSES
    downloads = tuple(
        Download(f"{_BU}/{path}", Path(path).name.removesuffix(".zip"), path.endswith(".zip"), prefix)
        for path, prefix in DOMAINNET_SHA512.items()
    )

    def list_images(self, root: Path, data: DataConfig) -> ImageIndex:
        """List the images of the domains that are there, split by their official lists."""
        present = [domain for domain in DOMAINNET.counts if (root / f"{domain}_train.txt").is_file()]
        if not present:
            raise InputError(f"data.root: {root} holds no <domain>_train.txt of DomainNet, such as clipart_train.txt")
        selected = set(data.classes or TEN_CLASSES)
        items: list[ImageRecord] = []
        labels: set[str] = set()
        parts: tuple[Part, ...] = ("train", "test")
        for domain, part in product(present, parts):
            path = root / f"{domain}_{part}.txt"
            for name, line in read_list(path).items():
                folders = name.split("/")
                if len(folders) != 3 or folders[0] != domain:
                    raise InputError(f"{path}, line {line} names {name!r}, expected {domain}/<class>/<image>")
                labels.add(folders[1])
                if selected == {"all"} or folders[1] in selected:
                    items.append(ImageRecord(name, domain, folders[1], part))
        if selected != {"all"} and (missing := min(selected - labels, default=None)):
            hint = suggest_name(missing, labels)
            raise InputError(f"data.classes: no image of {missing!r} in the lists of {root}; {hint}")
        absent = [domain for domain in DOMAINNET.counts if domain not in present]
        notes = (f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing, and left out",)
        return ImageIndex(ImageFiles(root, items), notes if absent else ())


def _read_metadata(root: Path, columns: Sequence[str], numbers: Sequence[str]) -> Iterator[TableRow]:
    """Yield the rows of metadata.csv, which may have more columns than these."""
    path = root / "metadata.csv"
    if not path.exists():
        raise InputError(f"data.root: {root} holds no metadata.csv: give the folder that WILDS unpacks")
    for row in read_rows(path, columns):
        if wrong := next((column for column in numbers if not row.cells[column].isdigit()), None):
            raise InputError(f"{path}, line {row.line}: {wrong} must be a number, got {row.cells[wrong]!r}")
        yield row


class Camelyon17(DatasetSource):
    about = "Lymph nodes with and without tumour, from five hospitals."
    licence = "CC0"
    size = "455,954 patches, 11 GB"
    where = "wilds.stanford.edu, as DIR/metadata.csv and DIR/patches/"
    published = CAMELYON17
    downloads = (
        Download(f"{_CODALAB}/0xe45e15f39fb54e9d9e919556af67aabe/contents/blob/", "metadata.csv", packed=True),
    )

    def list_images(self, root: Path, data: DataConfig) -> ImageIndex:
        """List the patches; those of one patient look alike, so they stay together."""
        columns = ("patient", "node", "x_coord", "y_coord", "tumor", "center")
        items = []
        for line, row in _read_metadata(root, columns, ("center",)):
            slide = f"patient_{row['patient']}_node_{row['node']}"
            name = f"patches/{slide}/patch_{slide}_x_{row['x_coord']}_y_{row['y_coord']}.png"
            label = {"0": "normal", "1": "tumor"}.get(row["tumor"])
            if label is None:
                raise InputError(f"{root / 'metadata.csv'}, line {line}: tumor must be 0 or 1, got {row['tumor']!r}")
            items.append(ImageRecord(name, f"hospital-{row['center']}", label, group=row["patient"]))
        return ImageIndex(ImageFiles(root, sorted(items)))


class IWildCam(DatasetSource):
    about = "Camera traps: the ten cameras with the most animals, the ten most frequent animals."
    licence = "Community Data License Agreement, permissive"
    size = "203,029 images, 12 GB"
    where = "wilds.stanford.edu, as DIR/metadata.csv and DIR/train/"
    downloads = (
        Download(f"{_CODALAB}/0x6313da2b204647e79a14b468131fcd64/contents/blob/", "metadata.csv", packed=True),
    )

    def list_images(self, root: Path, data: DataConfig) -> ImageIndex:
        """List the images; those of one burst show one animal in one place, so they stay together."""
        numbers = ("location_remapped", "category_id")
        rows = [row for _, row in _read_metadata(root, (*numbers, "filename"), numbers) if row["category_id"] != EMPTY]
        for column, most in zip(numbers, (CAMERAS, ANIMALS), strict=True):  # of equally frequent ones the lower number
            counts = Counter(row[column] for row in rows)
            frequent = set(sorted(counts, key=lambda value: (-counts[value], int(value)))[:most])
            rows = [row for row in rows if row[column] in frequent]
        path = root / "categories.csv"  # names of the animals, if WILDS has written it
        categories = read_rows(path, ("category_id", "name")) if path.is_file() else ()
        names = {row.cells["category_id"]: row.cells["name"] for row in categories}
        items = []
        for row in rows:
            label = names.get(row["category_id"], f"category-{int(row['category_id']):03d}")
            group = row.get("sequence_remapped") or None
            camera = f"camera-{int(row['location_remapped']):03d}"
            items.append(ImageRecord(f"train/{row['filename']}", camera, label, group=group))
        if not items:
            raise InputError(f"{root / 'metadata.csv'} names no image of an animal")
        return ImageIndex(ImageFiles(root, sorted(items, key=lambda item: (item.domain, item.name))))
