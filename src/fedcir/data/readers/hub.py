"""`hub`: any dataset of the Hugging Face libraries that has columns for image, label and domain.

From the hub by its name (flwrlabs/pacs), from a folder that `save_to_disk` wrote, or from parquet files.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcir.data.pictures.items import Found, Item, Part
from fedcir.types import InputError


@dataclass(frozen=True)
class Cells:
    """Images that are cells of a table."""

    items: Sequence[Item]
    table: Any
    column: str

    def only(self, rows: Sequence[int]) -> "Cells":
        return Cells([self.items[row] for row in rows], self.table.select(rows), self.column)

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


def hub(root: str, columns: Sequence[str]) -> Found:
    """The rows of all splits; those of a split named test are for testing."""
    if len(columns) != 3:
        raise InputError(
            f"data.columns must name three columns, for image, label and domain, got {', '.join(columns)!r}"
        )
    image, label, domain = columns
    splits = _load(root)
    items = []
    for split, table in splits.items():
        for column in columns:
            if column not in table.column_names:
                raise InputError(
                    f"{root} has no column {column!r}, it has {', '.join(table.column_names)}: "
                    "name yours with data.columns=IMAGE,LABEL,DOMAIN"
                )
        part: Part | None = None if "test" not in splits else "test" if split == "test" else "train"
        pairs = zip(_words(table, label), _words(table, domain), strict=True)
        items += [Item(f"{split}/{row:06d}", where, what, part) for row, (what, where) in enumerate(pairs)]
    if not items:
        raise InputError(f"{root} has no rows")
    return Found(Cells(items, _undecoded(list(splits.values()), image, root), image))


def _load(root: str) -> dict[str, Any]:
    """Tables by split."""
    try:
        import datasets
    except ImportError:
        raise InputError("dataset 'hub' needs the datasets library: pip install 'fedcir[hub]'") from None
    place = Path(root)
    bars = datasets.is_progress_bar_enabled()
    if bars:
        datasets.disable_progress_bars()
    try:
        if place.is_dir() and any((place / name).exists() for name in ("dataset_dict.json", "state.json")):
            loaded = datasets.load_from_disk(root)
        elif place.exists():
            files = [place] if place.is_file() else sorted(each for each in place.rglob("*.parquet") if each.is_file())
            if not files:  # a pipe is no file
                raise InputError(f"data.root: {root} holds no .parquet file and no saved dataset")
            loaded = datasets.load_dataset("parquet", data_files=_by_split(files))
        else:
            _ask_for(root)
            loaded = datasets.load_dataset(root)
    except InputError:
        raise
    except Exception as error:  # the library raises nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"cannot open {root!r} from the hub: {reason[:300]}; "
            "give the name of a dataset on the hub, or a local folder or .parquet file"
        ) from error
    finally:
        if bars:
            datasets.enable_progress_bars()
    return dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}


def _ask_for(name: str) -> None:
    """A hub that does not answer is noticed at once; the library would try for half a minute.

    What it has fetched before it opens without asking.
    """
    import datasets
    import huggingface_hub

    fetched = Path(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___"))
    if not fetched.exists() and not huggingface_hub.constants.HF_HUB_OFFLINE:
        huggingface_hub.HfApi().dataset_info(name, timeout=10)


def _by_split(files: Sequence[Path]) -> dict[str, list[str]]:
    """Files by split, as on the hub: train-00000-of-00002.parquet, or default/train/0000.parquet."""
    splits: dict[str, list[str]] = {}
    for file in files:
        words = (file.stem.partition("-")[0], file.parent.name)
        split = next((word for word in words if word in ("train", "validation", "test")), "train")
        splits.setdefault(split, []).append(str(file))
    return splits


def _undecoded(tables: Sequence[Any], column: str, root: str) -> Any:
    import datasets

    try:
        only = [table.select_columns([column]).cast_column(column, datasets.Image(decode=False)) for table in tables]
        return datasets.concatenate_datasets(only)
    except Exception as error:
        raise InputError(f"the column {column!r} of {root} holds no images: {error}") from error


def _words(table: Any, column: str) -> list[str]:
    """The values of a column, by name where they are numbered classes."""
    names = getattr(table.features[column], "names", None)
    words = []
    for row, value in enumerate(table[column]):
        if value is None or (names is not None and not 0 <= value < len(names)):
            raise InputError(
                f"the column {column!r} has no value in row {row} ({value}): fill it in, or remove the row"
            )
        words.append(str(value) if names is None else names[value])
    return words
