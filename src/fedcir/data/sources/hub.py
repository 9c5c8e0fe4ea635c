"""`hub`: any dataset of the Hugging Face libraries that has columns for image, label and domain.

From the hub by its name (flwrlabs/pacs), from a folder that `save_to_disk` wrote, or from parquet files.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcir.config import DataConfig
from fedcir.data.sources.source import DatasetSource, ImageIndex, ImageRecord, Part
from fedcir.errors import InputError
from fedcir.text import describe_error


@dataclass(frozen=True)
class HubImages:
    """Images that are cells of a table."""

    items: Sequence[ImageRecord]
    table: Any
    column: str

    def only(self, rows: Sequence[int]) -> "HubImages":
        return HubImages([self.items[row] for row in rows], self.table.select(rows), self.column)

    def fingerprint(self) -> str:
        key = f"{self.column}\0{self.table._fingerprint}"
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()

    def paths(self, staging: Path) -> list[str]:
        paths = []
        for row, cell in enumerate(self.table.select_columns([self.column])):
            value = cell[self.column] or {}
            path = value.get("path")
            if value.get("bytes") is not None or path is None:
                path = str(staging / f"{row:08d}")
                Path(path).write_bytes(value.get("bytes") or b"")
            paths.append(path)
        return paths


def list_hub_images(root: str, columns: Sequence[str]) -> ImageIndex:
    """List the rows of all splits; those of a split named test are for testing."""
    if len(columns) != 3:
        names = ", ".join(columns)
        raise InputError(f"data.columns must name three columns, for image, label and domain, got {names!r}")
    image, label, domain = columns
    splits = _load_tables(root)
    items = []
    for split, table in splits.items():
        if missing := next((column for column in columns if column not in table.column_names), None):
            has = f"has no column {missing!r}, it has {', '.join(table.column_names)}"
            raise InputError(f"{root} {has}: name yours with data.columns=IMAGE,LABEL,DOMAIN")
        part: Part | None = None if "test" not in splits else "test" if split == "test" else "train"
        pairs = zip(_read_words(table, label), _read_words(table, domain), strict=True)
        items += [ImageRecord(f"{split}/{row:06d}", site, category, part) for row, (category, site) in enumerate(pairs)]
    if not items:
        raise InputError(f"{root} has no rows")
    import datasets

    try:
        undecoded = datasets.Image(decode=False)
        images = [table.select_columns([image]).cast_column(image, undecoded) for table in splits.values()]
        return ImageIndex(HubImages(items, datasets.concatenate_datasets(images), image))
    except Exception as error:  # the library raises nearly anything
        raise InputError(f"the column {image!r} of {root} holds no images: {error}") from error


def _load_tables(root: str) -> dict[str, Any]:
    """Load the tables by split."""
    try:
        import datasets
        import huggingface_hub
    except ImportError:
        raise InputError("dataset 'hub' needs the datasets library: pip install 'fedcir[hub]'") from None
    path = Path(root)
    bars = datasets.is_progress_bar_enabled()
    if bars:
        datasets.disable_progress_bars()
    try:
        if path.is_dir() and any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
            loaded = datasets.load_from_disk(root)
        elif path.exists():
            files = [path] if path.is_file() else sorted(file for file in path.rglob("*.parquet") if file.is_file())
            if not files:  # a pipe is no file
                raise InputError(f"data.root: {root} holds no .parquet file and no saved dataset")
            splits: dict[str, list[str]] = {}
            for file in files:  # named as on the hub: train-00000-of-00002.parquet, or default/train/0000.parquet
                words = (file.stem.partition("-")[0], file.parent.name)
                split = next((word for word in words if word in ("train", "validation", "test")), "train")
                splits.setdefault(split, []).append(str(file))
            loaded = datasets.load_dataset("parquet", data_files=splits)
        else:
            fetched = Path(datasets.config.HF_DATASETS_CACHE, root.replace("/", "___")).exists()
            if not fetched and not huggingface_hub.constants.HF_HUB_OFFLINE:
                # Fails soon if the hub does not answer, where load_dataset would try for half a minute.
                huggingface_hub.HfApi().dataset_info(root, timeout=10)
            loaded = datasets.load_dataset(root)
    except InputError:
        raise
    except Exception as error:  # the library raises nearly anything
        fix = "give the name of a dataset on the hub, or a local folder or .parquet file"
        raise InputError(f"cannot open {root!r} from the hub: {describe_error(error, 300)}; {fix}") from error
    finally:
        if bars:
            datasets.enable_progress_bars()
    return dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}


def _read_words(table: Any, column: str) -> list[str]:
    """Return the values of a column as text; those of numbered classes by name."""
    names = getattr(table.features[column], "names", None)
    words = []
    for row, value in enumerate(table[column]):
        if value is None or (names is not None and not 0 <= value < len(names)):
            raise InputError(f"column {column!r} has no value in row {row} ({value}): fill it in, or remove the row")
        words.append(str(value) if names is None else names[value])
    return words


class Hub(DatasetSource):
    about = "Any Hugging Face dataset with columns for image, label and domain."
    licence = "differs by dataset"
    where = "--data-root NAME on the hub (such as flwrlabs/pacs), a saved folder, or .parquet files"
    root = "name"

    def list_images(self, root: Path, data: DataConfig) -> ImageIndex:
        return list_hub_images(str(data.root), data.columns)
