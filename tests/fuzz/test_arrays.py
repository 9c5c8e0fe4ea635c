"""Mutated archives of arrays: checked and opened, or refused in one line; nothing is unpacked beyond what fits."""

import random
import shutil
import zipfile
from pathlib import Path

import numpy as np
from ended import fault
from mutate import batches, damaged_bytes, damaged_copy, outcomes

from fedcir.config import DataConfig
from fedcir.data.inspection import inspect_dataset
from fedcir.data.opening import open_dataset

X = [
    np.zeros((0, 8, 8, 3), np.uint8), np.zeros((4, 0, 8, 3), np.uint8), np.zeros((4, 8, 8), np.uint8),
    np.zeros((4, 8, 8, 1), np.uint8), np.zeros((4, 1, 5000, 1), np.uint8), np.zeros((4, 8, 8, 3), np.float32),
    np.zeros((4, 8, 8, 3), np.uint8, order="F"), np.zeros((), np.uint8), np.zeros(4, object), np.zeros((2,) * 9, "u1"),
    np.zeros(3, [("a", "u1"), ("b", "O")]), np.array("x"), np.broadcast_to(np.uint8(0), (4, 4096, 4096, 3)),
]  # fmt: skip
Y = [
    np.zeros(4, np.int64), np.array([0, 1, 0, 1], np.uint64), np.full(4, 2**64 - 1, np.uint64), np.full(4, -1),
    np.array([0.0, 1, 0, 1]), np.zeros((4, 1), int), np.array([], int), np.array([0, 1, 0, 10**9]), np.zeros(4, bool),
    np.array(["a", "b", "a", "b"]), np.array([0, 1, 0, 1], np.int8), np.zeros(4, "M8[s]"),
]  # fmt: skip


def rewritten(path: Path, rng: random.Random) -> str:
    """Replace members of an archive by arrays of other kinds, or by bytes that are none."""
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(sorted(held))
    what = rng.randrange(4)
    with zipfile.ZipFile(path, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for item, content in held.items():
            if item != name or what == 0:
                archive.writestr(item, content)
            elif what == 1:
                with archive.open(item, "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, rng.choice(X if "x_" in item else Y), allow_pickle=True)
            elif what == 2:
                archive.writestr(item, damaged_bytes(content, rng))
        if what == 0:
            archive.writestr(rng.choice((".npy", "x", "../x.npy", "x_train", f"{name}.npy")), b"x")
    return f"{path.name}: {name} changed ({what})"


@batches(40)
def test_a_mutated_archive_is_checked_and_opened_or_refused_in_one_line(
    seeds: range, data_root: Path, tmp_path: Path
) -> None:
    def attempt(rng: random.Random) -> str | None:
        root = tmp_path / "copy"
        shutil.rmtree(root, ignore_errors=True)
        if rng.random() < 0.5:
            what = damaged_copy(data_root, root, rng)
        else:
            shutil.copytree(data_root, root)
            what = rewritten(rng.choice(sorted(root.iterdir())), rng)
        data = DataConfig("arrays", str(root))
        wrong = fault(lambda: inspect_dataset(data)) or fault(lambda: open_dataset(data, seed=0))
        return wrong and f"{what}: {wrong}"

    assert not outcomes(seeds, attempt)
