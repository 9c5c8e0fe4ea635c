"""DICOM files: shown by their own window, and what cannot be shown is named."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.config import DataConfig
from fedcir.data.decoding import GREY, Decoding, decode_files, read_image
from fedcir.data.opening import open_dataset
from fedcir.errors import InputError

pydicom = pytest.importorskip("pydicom", reason="no pydicom: pip install 'fedcir[dicom]'")

from pydicom.dataset import Dataset, FileMetaDataset  # noqa: E402
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, JPEG2000Lossless, RLELossless  # noqa: E402

VALUES = np.array([[0, 100], [200, 300]])


def dicom(pixels: Any = VALUES, bits: int = 16, syntax: str = ExplicitVRLittleEndian, **tags: Any) -> bytes:
    """A file of these pixels and tags."""
    file = Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = syntax
    file.SOPClassUID, file.SOPInstanceUID = CTImageStorage, "1.2.3"
    dtype = np.dtype(f"{'i' if tags.get('PixelRepresentation') else 'u'}{bits // 8}")
    stored = np.asarray(pixels).astype(dtype)
    file.Rows, file.Columns = stored.shape[:2]
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
    file.BitsAllocated = file.BitsStored = bits
    file.HighBit, file.PixelRepresentation = bits - 1, 0
    file.PixelData = stored.tobytes()
    for name, value in tags.items():
        setattr(file, name, value)
    into = io.BytesIO()
    file.save_as(into, enforce_file_format=True)
    return into.getvalue()


def shown(content: bytes) -> list[list[int]]:
    picture, _ = read_image(content, Decoding(2, GREY))
    return np.asarray(picture).tolist()


def test_a_file_without_a_window_is_stretched_from_its_lowest_to_its_highest_value() -> None:
    assert shown(dicom()) == [[0, 85], [170, 255]]
    assert shown(dicom(VALUES - 100, PixelRepresentation=1)) == [[0, 85], [170, 255]]


def test_padding_does_not_count_as_the_lowest_value() -> None:
    padded = VALUES - 100
    padded[0, 0] = -2000
    assert shown(dicom(padded, PixelRepresentation=1, PixelPaddingValue=-2000)) == [[0, 0], [128, 255]]


def test_an_image_of_one_value_is_black() -> None:
    assert shown(dicom(np.full((2, 2), 7))) == [[0, 0], [0, 0]]


def test_the_window_of_the_file_is_used_after_rescaling() -> None:
    """Values 0, 100, 200, 300 are -1000, -800, -600, -400; the window goes from -900 to -500 (width 401 means 400)."""
    result = shown(dicom(RescaleSlope=2, RescaleIntercept=-1000, WindowCenter=-699.5, WindowWidth=401))
    assert result == [[0, 64], [191, 255]]
    result = shown(dicom(WindowCenter=[150, 7], WindowWidth=[200, 7], VOILUTFunction="LINEAR_EXACT"))  # 50 to 250
    assert result == [[0, 64], [191, 255]]


def test_a_sigmoid_window_is_a_sigmoid() -> None:
    result = shown(dicom(WindowCenter=100, WindowWidth=400, VOILUTFunction="SIGMOID"))
    assert result == np.round(255 / (1 + np.exp(-(VALUES - 100) / 100))).astype(int).tolist()


def test_a_table_of_values_of_interest_goes_before_a_window() -> None:
    item = Dataset()
    item.LUTDescriptor, item.LUTData = [4, 0, 8], np.array([255, 0, 51, 102], "<u2").tobytes()
    pixels = np.arange(4).reshape(2, 2)
    assert shown(dicom(pixels, VOILUTSequence=[item], WindowCenter=2, WindowWidth=2)) == [[255, 0], [51, 102]]


def test_monochrome1_is_inverted() -> None:
    assert shown(dicom(PhotometricInterpretation="MONOCHROME1")) == [[255, 170], [85, 0]]


def test_colours_stay_what_they_are() -> None:
    pixels = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [9, 8, 7]]])
    content = dicom(pixels, bits=8, SamplesPerPixel=3, PhotometricInterpretation="RGB", PlanarConfiguration=0)
    picture, size = read_image(content, Decoding(2))
    assert size == (2, 2)
    assert np.asarray(picture).tolist() == pixels.tolist()


def test_what_pydicom_can_decode_is_decoded() -> None:
    file = pydicom.dcmread(io.BytesIO(dicom()))
    file.compress(RLELossless)
    into = io.BytesIO()
    file.save_as(into)
    assert shown(into.getvalue()) == [[0, 85], [170, 255]]


def without_pixels() -> bytes:
    file = pydicom.dcmread(io.BytesIO(dicom()))
    del file.PixelData
    into = io.BytesIO()
    file.save_as(into)
    return into.getvalue()


def compressed() -> bytes:
    return dicom(syntax=JPEG2000Lossless, PixelData=pydicom.encaps.encapsulate([b"no picture"]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: dicom(NumberOfFrames=3), "it is a DICOM file of 3 frames: save the one you need as a file of its own"),
        (without_pixels, "it is a DICOM file without pixels"),
        (lambda: dicom(PixelData=b"ab"), "The number of bytes of pixel data is less than expected"),
        (
            compressed,
            "it is a DICOM file compressed as JPEG 2000 Image Compression (Lossless Only), which pydicom cann",
        ),
    ],
)
def test_what_cannot_be_shown_is_told_in_one_line(content: Callable[[], bytes], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.dcm").write_bytes(content())
    [look] = decode_files([str(tmp_path / "a.dcm")], Decoding(2))
    assert look.error.startswith(message)
    assert "\n" not in look.error


def write(root: Path, suffix: str = ".dcm") -> Path:
    for path, label in ((path, label) for path in "ab" for label in ("ill", "well")):
        (root / path / label).mkdir(parents=True)
        for number in range(4):
            pixels = VALUES + number + 10 * (label == "ill") + 100 * (path == "a")
            (root / path / label / f"{number}{suffix}").write_bytes(dicom(pixels, WindowCenter=200, WindowWidth=400))
    return root


def test_folders_and_tables_may_hold_them(tmp_path: Path) -> None:
    root = write(tmp_path / "named")
    domains = open_dataset(DataConfig("folders", str(root), image_size=2, channels=1), seed=0)
    assert domains.image_shape == (2, 2, 1)
    assert {domain.name: (len(domain.train), len(domain.test)) for domain in domains} == {"a": (6, 2), "b": (6, 2)}
    bare = write(tmp_path / "bare", suffix="")  # files without an ending, which only a table can name
    paths = sorted(path.relative_to(bare) for path in bare.rglob("*") if path.is_file())
    lines = ["path,label,site", *(f"{path},{path.parent.name},{path.parts[0]}" for path in paths)]
    (bare / "labels.csv").write_text("\n".join(lines), encoding="utf-8")
    same = open_dataset(DataConfig("table", str(bare), image_size=2, channels=1), seed=0)
    assert np.array_equal(np.sort(same["a"].train.images, axis=0), np.sort(domains["a"].train.images, axis=0))


def test_without_pydicom_one_line_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(InputError, match=r"^DICOM files need pydicom: pip install 'fedcir\[dicom\]'$"):
        open_dataset(DataConfig("folders", str(tmp_path), image_size=2), seed=0)
    with pytest.raises(ValueError, match="DICOM files need pydicom"):
        read_image(dicom(), Decoding(2))


def test_pictures_of_other_kinds_do_not_load_pydicom(tmp_path: Path) -> None:
    """Its import takes as long as decoding a thousand images."""
    import subprocess

    Image.new("L", (2, 2)).save(tmp_path / "a.png")
    script = (
        "import sys; from fedcir.data.decoding import Decoding, decode_files; decode_files([sys.argv[1]], Decoding(2))"
    )
    script += "; print({'pydicom', 'numpy', 'torch'} & sys.modules.keys())"
    output = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "a.png"], capture_output=True, text=True, check=True
    )
    assert output.stdout == "set()\n"


def test_a_scan_looks_the_same_however_it_is_stored() -> None:
    """The files come with pydicom."""
    root = Path(pydicom.__file__).parent / "data" / "test_files"
    kinds = ("", "_RLE", "_bigendian", "_implicit", "_jp2klossless")
    if not all((root / f"MR_small{kind}.dcm").is_file() for kind in kinds):
        pytest.skip("this pydicom comes without its test files")
    first, *others = ((root / f"MR_small{kind}.dcm").read_bytes() for kind in kinds)
    picture, size = read_image(first, Decoding(32, GREY))
    assert size == (64, 64)
    assert all(read_image(other, Decoding(32, GREY))[0].tobytes() == picture.tobytes() for other in others)
