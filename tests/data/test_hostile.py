"""Files that would hang a reader, fill its memory or disk, or start a program: each is named, and nothing happens."""

import io
import os
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.config import DataConfig
from fedcir.data.decoding import Decoding, decode_files
from fedcir.data.inspection import inspect_dataset
from fedcir.data.opening import open_dataset
from fedcir.data.sources.arrays import Arrays
from fedcir.data.sources.folders import list_folder_images, open_folder
from fedcir.errors import InputError
from fedcir.inference.predictor import files_in, read_file

SMALL = Decoding(4, max_bytes=1000, max_pixels=1000)


def seen(path: Path, decoding: Decoding = SMALL) -> str:
    return decode_files([str(path)], decoding)[0].error


def png(width: int, height: int) -> bytes:
    """A picture of zeros that takes few bytes, whatever its size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jpg")
    assert seen(tmp_path / "x.jpg") == "it is not a regular file, but a pipe or a device"
    assert read_file(str(tmp_path / "x.jpg"), 4, 3) == "it is not a regular file, but a pipe or a device"


def test_a_link_to_a_device_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").symlink_to("/dev/zero")
    assert seen(tmp_path / "x.jpg") == "it is not a regular file, but a pipe or a device"
    (tmp_path / "y.jpg").symlink_to(tmp_path)
    assert seen(tmp_path / "y.jpg") == "it is a folder"


def test_a_file_of_too_many_bytes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x.png").touch()
    os.truncate(tmp_path / "x.png", 10**12)
    assert seen(tmp_path / "x.png") == "it has 1,000,000,000,000 bytes, more than data.max_bytes=1,000"


def test_a_picture_of_too_many_pixels_is_not_decoded(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png(13_000, 13_000))
    assert seen(tmp_path / "x.png", Decoding(4)) == "it has 169,000,000 pixels, more than data.max_pixels=100,000,000"
    (tmp_path / "y.png").write_bytes(png(60_000, 60_000))
    assert seen(tmp_path / "y.png") == "it has too many pixels: make it smaller"  # Pillow's own limit


def test_limits_are_settings_and_reach_processes_that_decode(tmp_path: Path) -> None:
    for path in ("ink/a", "ink/b", "oil/a", "oil/b"):
        (tmp_path / path).mkdir(parents=True)
        for number in range(3):
            Image.new("L", (8, 8), 20 * number).save(tmp_path / path / f"{number}.png")
    Image.new("L", (20, 20)).save(tmp_path / "ink/a/9.png")
    data = DataConfig("folders", str(tmp_path), image_size=4, max_pixels=100)
    with pytest.raises(InputError, match=r"9\.png is not a readable image: it has 400 pixels, more than .*=100; fix"):
        open_dataset(data, seed=0)
    assert len(inspect_dataset(data).unreadable) == 1
    many = decode_files([str(tmp_path / "ink/a/9.png")] * 257, Decoding(4, max_bytes=10**6, max_pixels=100))
    assert {look.error for look in many} == {"it has 400 pixels, more than data.max_pixels=100"}


def test_a_program_in_the_name_of_a_picture_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    assert seen(tmp_path / "x.jpg") == "it is not an image of a known format"


def test_a_fan_of_links_is_gone_through_once(tmp_path: Path) -> None:
    """Each of 40 folders is linked to twice from the one above: 2^40 ways lead to the last."""
    root = tmp_path / "root"
    (root / "ink/a").mkdir(parents=True)
    for number in range(40):
        (tmp_path / f"{number}").mkdir()
    for number in range(39):
        for link in "xy":
            (tmp_path / f"{number}" / link).symlink_to(tmp_path / f"{number + 1}")
    (tmp_path / "39/1.png").touch()
    (root / "ink/a/fan").symlink_to(tmp_path / "0")
    (root / "ink/b").symlink_to(tmp_path / "0")
    items = list_folder_images(root).pictures.items
    assert [item.name for item in items] == ["ink/a/fan/" + "x/" * 39 + "1.png", "ink/b/" + "x/" * 39 + "1.png"]


def test_folders_may_be_nested_deeper_than_calls_of_python(tmp_path: Path) -> None:
    deep = f"{tmp_path}/ink"
    os.mkdir(deep)
    for _ in range(1200):
        deep += "/d"
        os.mkdir(deep)
    Path(f"{deep}/1.png").touch()
    assert [len(item.name.split("/")) for item in list_folder_images(tmp_path).pictures.items] == [1202]
    assert files_in([tmp_path]) == [f"{deep}/1.png"]
    os.remove(f"{deep}/1.png")
    os.removedirs(deep)  # pytest cannot
    tmp_path.mkdir()


def test_folders_deeper_than_a_path_can_be_are_named(tmp_path: Path) -> None:
    within = os.open(tmp_path, os.O_RDONLY)
    for _ in range(21):  # of 200 letters each: a path has at most 4,096
        os.mkdir("d" * 200, dir_fd=within)
        deeper = os.open("d" * 200, os.O_RDONLY, dir_fd=within)
        os.close(within)
        within = deeper
    os.close(within)
    with pytest.raises(InputError, match=r"cannot read the folder .*: File name too long"):
        list(open_folder(tmp_path).files())


def npz(path: Path, **members: Any) -> None:
    """An archive of arrays, or of headers of arrays with as many bytes after them as are given."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in members.items():
            file = io.BytesIO()
            if isinstance(value, np.ndarray):
                np.save(file, value)
            else:
                shape, dtype, content = value
                header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                file.write(bytes(content))
            archive.writestr(f"{name}.npy", file.getvalue())


X, Y = np.zeros((4, 8, 8, 3), np.uint8), np.array([0, 1, 0, 1])
HOSTILE = {
    "sizes that are not there": (((10**6, 8, 8, 3), "u1", 100), "does not have the size that it says it has"),
    "bytes beyond the array": (((4, 8, 8, 3), "u1", 10**6), "does not have the size that it says it has"),
    "another type": (((4, 8, 8, 3), "c8", 6144), r"x_train must be uint8 of .*, got complex64\[4, 8, 8, 3\]"),
    "wide images": (((4, 1, 5000, 3), "u1", 60_000), "a side has at most 4,096 pixels"),
    "objects": (np.array([["x"]], object), r"x_train must be uint8 of .*, got object\[1, 1\]|size that it says"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_archive_is_refused_by_its_headers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, message = HOSTILE[kind]
    npz(tmp_path / "ink.npz", x_train=held, y_train=Y, x_test=X, y_test=Y)
    monkeypatch.setattr("fedcir.data.sources.arrays._open_member", lambda *_: pytest.fail("it was unpacked"))
    with pytest.raises(InputError, match=message):
        Arrays().load_arrays(tmp_path)


def test_an_archive_that_would_fill_the_disk_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npz(tmp_path / "ink.npz", x_train=X, y_train=Y, x_test=X, y_test=Y)
    usage = type("Usage", (), {"free": 2 * (X.nbytes + Y.nbytes) - 1})
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage)
    with pytest.raises(InputError, match=f"more than half of what is free in {tempfile.gettempdir()}"):
        Arrays().load_arrays(tmp_path)


def test_other_members_of_an_archive_are_not_unpacked(tmp_path: Path) -> None:
    npz(tmp_path / "ink.npz", x_train=X, y_train=Y, x_test=X, y_test=Y, bomb=((10**9,), "u1", 10))
    assert len(Arrays().load_arrays(tmp_path)["ink"].train) == 4


def test_a_pipe_in_place_of_an_archive_or_of_a_table_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ink.npz")
    with pytest.raises(InputError, match=r"ink\.npz is not a readable \.npz file: it is not a regular file"):
        Arrays().load_arrays(tmp_path)
    os.mkfifo(tmp_path / "labels.csv")
    with pytest.raises(InputError, match=r"labels\.csv as UTF-8: it is not a regular file"):
        open_dataset(DataConfig("table", str(tmp_path)), seed=0)
