"""Features of images on disk, one row per image, which several processes read while one adds to them.

A store is a folder of the cache: `features` holds rows of floats, `images` for each row a hash of the image and a
checksum of the row, and `about.json` the width of a row. Rows are only appended. A row counts once its entry in
`images` is written, so what an interrupted process leaves behind is overwritten by the next one.
"""

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcir.config.reading import read_bytes, read_text
from fedcir.data.domains import Indices
from fedcir.data.examples.extraction import Values
from fedcir.data.private import inner_folder, new_file, open_to_append

ENTRY = np.dtype([("image", "S16"), ("checksum", "<u4")])
MOST = 20_000_000_000
"""Bytes of entries that a store may have: those of a billion images."""
Digests = NDArray[np.void]  # (N,), 16 bytes each


@dataclass(frozen=True)
class FeatureStore:
    folder: Path

    def find(self, digests: Digests) -> tuple[Values, Indices]:
        """Map all rows (M, F), and give the row of each image (N,): -1 where it is missing or damaged."""
        values, entries = self._read()
        rows = np.full(len(digests), -1)
        if not len(entries):
            return values, rows
        wanted = digests.view("S16")
        order = np.argsort(entries["image"], kind="stable")
        last = np.searchsorted(entries["image"], wanted, side="right", sorter=order) - 1  # the newest of its rows
        newest = order[np.maximum(last, 0)]
        for number in np.flatnonzero(entries["image"][newest] == wanted):
            row = newest[number]
            if _checksum(digests[number], values[row]) == entries["checksum"][row]:
                rows[number] = row
        return values, rows

    def append(self, digests: Digests, features: Values, about: Mapping[str, Any]) -> None:
        """Add a row for each image. The caller holds the lock of the store. A damaged store is begun anew."""
        values, entries = self._read()
        if values.shape[1] != features.shape[1]:
            shutil.rmtree(self.folder, ignore_errors=True)
            inner_folder(self.folder)
            text = json.dumps({**about, "width": features.shape[1]})
            new_file(self.folder / "about.json").write_text(text, encoding="utf-8")
            entries = entries[:0]
        new = np.zeros(len(digests), ENTRY)
        new["image"] = digests.view("S16")
        new["checksum"] = [_checksum(digest, row) for digest, row in zip(digests, features, strict=True)]
        self._extend("features", len(entries) * features[0].nbytes, features.tobytes())
        self._extend("images", len(entries) * ENTRY.itemsize, new.tobytes())

    def _read(self) -> tuple[Values, NDArray[np.void]]:
        """Map the rows, and read their entries; both are empty where the store is missing or damaged."""
        try:
            features = self.folder / "features"
            width = json.loads(read_text(self.folder / "about.json", MOST))["width"]
            if type(width) is not int or width < 1 or not features.is_file():
                raise ValueError(f"width is {width!r}")
            written = read_bytes(self.folder / "images", MOST)
            entries = np.frombuffer(written[: len(written) // ENTRY.itemsize * ENTRY.itemsize], ENTRY)
            rows = min(len(entries), features.stat().st_size // (4 * width))
            if rows:
                values: Values = np.memmap(features, np.float32, "r", shape=(rows, width))
                return values, entries[:rows]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            width = 0
        return np.empty((0, width), np.float32), np.empty(0, ENTRY)

    def _extend(self, name: str, end: int, data: bytes) -> None:
        """Write at the end of what counts, over what an interrupted process may have left."""
        with open_to_append(self.folder / name) as file:
            file.truncate(end)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _checksum(digest: np.void, row: Values) -> int:
    return zlib.crc32(row.tobytes(), zlib.crc32(digest.tobytes()))
