"""Decoding of image files to squares of 8 bits per channel, of many files in parallel processes.

A DICOM file is shown by the window that it names. The order of operations is that of DICOM's PS3.3, C.11: modality
(rescaling), values of interest (a table, or window centre and width), then MONOCHROME1 inverted. A file without a
window is stretched from its lowest to its highest value.

`python -m fedcir.data.decoding` is one of the processes. It does not import torch, so that it starts fast.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

from fedcir.config import DataConfig
from fedcir.errors import InputError
from fedcir.files import read_bytes
from fedcir.machine import count_cores
from fedcir.text import to_one_line

if TYPE_CHECKING:  # numpy takes a tenth of a second to import, and most images do not need it
    import numpy as np
    from numpy.typing import NDArray

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".dcm")
RGB, GREY = 3, 1  # channels
MODES = {RGB: "RGB", GREY: "L"}  # Pillow's names
MASK = 0
"""In place of channels: an image whose pixel values are class numbers."""
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP", "TIFF")
"""Formats that Pillow may use; others start programs (EPS) or are rarely tested."""
PREAMBLE = 128  # bytes before the DICOM marker
DEFLATED = b"1.2.840.10008.1.2.1.99"  # transfer syntax of DICOM files that are compressed as a whole
MISSING_PYDICOM = "DICOM files need pydicom: pip install 'fedcir[dicom]'"
IMAGE_SIZE = 128
MAX_IN_PROCESS = 256  # number of files up to which decoding in this process is faster than starting others
REPORT_EVERY = 32  # files

OnFile = Callable[[int, int], None]  # receives the number of finished files and the total number


class Decoding(NamedTuple):
    """Size and channels of decoded images, and the limits beyond which a file is not decoded."""

    size: int
    channels: int = RGB
    max_bytes: int = DataConfig.max_bytes
    max_pixels: int = DataConfig.max_pixels

    @classmethod
    def from_config(cls, data: DataConfig) -> Decoding:
        return cls(data.image_size or IMAGE_SIZE, data.channels or RGB, data.max_bytes, data.max_pixels)

    def check_pixels(self, width: int, height: int) -> None:
        if width * height > self.max_pixels:
            raise ValueError(f"it has {width * height:,} pixels, more than data.max_pixels={self.max_pixels:,}")


class DecodedFile(NamedTuple):
    """Hash of a file's bytes, the stored size of its image, and why it cannot be decoded (empty if it can)."""

    digest: str
    width: int
    height: int
    error: str


class PixelFile(NamedTuple):
    """A file of decoded images of one size, one after the other from an offset on."""

    path: str
    offset: int


def read_image(encoded: bytes, decoding: Decoding) -> tuple[Image.Image, tuple[int, int]]:
    """Decode an image to an upright square in RGB or grey; also return its stored width and height.

    Raises exceptions of many types for a damaged file.
    """
    if decoding.channels == MASK:
        return read_mask(encoded, decoding)
    if encoded[PREAMBLE : PREAMBLE + 4] == b"DICM":
        picture = read_dicom(encoded, decoding)
        return to_square(picture, decoding.size, decoding.channels), picture.size
    with Image.open(io.BytesIO(encoded), formats=FORMATS) as opened:
        stored = opened.size
        decoding.check_pixels(*stored)
        return to_square(opened, decoding.size, decoding.channels), stored


def read_mask(encoded: bytes, decoding: Decoding) -> tuple[Image.Image, tuple[int, int]]:
    """Decode a mask to a square of class numbers, of which the nearest is taken; also return its width and height."""
    import numpy as np

    with Image.open(io.BytesIO(encoded), formats=FORMATS) as opened:
        decoding.check_pixels(*opened.size)
        if opened.format == "JPEG":
            raise ValueError("it is a JPEG, which changes class numbers: save masks as PNG")
        values = np.asarray(opened)
        if values.ndim != 2 or values.dtype.kind not in "biu":
            raise ValueError(f"it has the mode {opened.mode}, but a mask is one number a pixel: save it as grey")
        if not 0 <= values.min() <= values.max() <= 255:
            raise ValueError(f"it holds the class {values.max()}: classes are 0 to 255")
        square = Image.fromarray(values.astype(np.uint8))
        return square.resize((decoding.size, decoding.size), Image.Resampling.NEAREST), opened.size


def to_square(picture: Image.Image, size: int, channels: int = RGB) -> Image.Image:
    """Convert an opened image to an upright square."""
    mode = MODES[channels]
    picture.draft(mode, (size, size))  # decodes a large JPEG at a smaller size, which is faster
    if picture.format != "JPEG" or "exif" in picture.info:  # most JPEGs have none, and the check takes time
        picture = ImageOps.exif_transpose(picture)
    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers: save it with 8 or 16 bits per channel")
    if picture.mode.startswith("I"):  # 16 bits a pixel; Pillow would cut off everything above 255
        import numpy as np

        values = np.asarray(picture).astype(np.float32)
        picture = Image.fromarray((values / 257).round().clip(0, 255).astype(np.uint8))
    elif picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        coloured = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured)
    converted = picture if picture.mode == mode else picture.convert(mode)
    return converted.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0)


def read_dicom(encoded: bytes, decoding: Decoding) -> Image.Image:
    """Decode a DICOM file to a grey or RGB image. Raises exceptions of many types for a damaged file."""
    import numpy as np

    try:
        import pydicom
    except ImportError:
        raise ValueError(MISSING_PYDICOM) from None
    if DEFLATED in encoded:  # a few bytes could expand to any size
        raise ValueError("it is a DICOM file that is deflated as a whole: save it without")
    file = pydicom.dcmread(io.BytesIO(encoded))
    if "PixelData" not in file:
        raise ValueError("it is a DICOM file without pixels")
    if (frames := int(file.get("NumberOfFrames") or 1)) > 1:
        raise ValueError(f"it is a DICOM file of {frames} frames: save the one you need as a file of its own")
    decoding.check_pixels(int(file.Columns), int(file.Rows))
    try:
        pixels = np.asarray(file.pixel_array)
    except (RuntimeError, NotImplementedError) as error:  # raised by pydicom if no decoder is installed
        syntax = file.file_meta.TransferSyntaxUID
        if not syntax.is_compressed:
            raise
        fix = "save it uncompressed, or install a decoder such as pylibjpeg"
        raise ValueError(
            f"it is a DICOM file compressed as {syntax.name}, which pydicom cannot decode here: {fix}"
        ) from error
    kind = file.PhotometricInterpretation
    if kind in ("MONOCHROME1", "MONOCHROME2"):
        values01 = _apply_window(file, pixels)
        values01 = 1 - values01 if kind == "MONOCHROME1" else values01
    elif kind == "PALETTE COLOR":
        from pydicom.pixels.processing import apply_color_lut

        pixels = apply_color_lut(pixels, file)
        values01 = pixels / float(np.iinfo(pixels.dtype).max)
    else:
        values01 = pixels / float(2**file.BitsStored - 1)  # colours, which pydicom converts to RGB
    return Image.fromarray((255 * values01.clip(0, 1)).round().astype(np.uint8))


def _apply_window(file: Any, pixels: NDArray[Any]) -> NDArray[np.float64]:
    """Map stored values to grey values from 0 to 1."""
    import numpy as np
    from pydicom.pixels.processing import apply_modality_lut, apply_voi, apply_windowing

    values = apply_modality_lut(pixels, file)
    if file.get("VOILUTSequence"):
        depth = int(file.VOILUTSequence[0].LUTDescriptor[2])
        return np.asarray(apply_voi(values, file) / float(2**depth - 1), np.float64)
    if file.get("WindowWidth") is not None and file.get("WindowCenter") is not None:
        with np.errstate(over="ignore"):  # of a sigmoid's end
            black, white = apply_windowing(np.array([-1e9, 1e9]), file)  # pydicom's scale depends on the file
            return np.asarray((apply_windowing(values, file) - black) / (white - black), np.float64)
    inside = values[pixels != file.PixelPaddingValue] if "PixelPaddingValue" in file else values
    low, high = (float(inside.min()), float(inside.max())) if inside.size else (0.0, 0.0)
    return np.asarray((values - low) / (high - low or 1.0), np.float64)


def decode_files(
    paths: Sequence[str], decoding: Decoding, images: PixelFile | None = None, on_file: OnFile | None = None
) -> list[DecodedFile]:
    """Decode every file, and write its image into its row of `images` if that is given."""
    if any(path.lower().endswith(".dcm") for path in paths) and find_spec("pydicom") is None:
        raise InputError(MISSING_PYDICOM, public="it has DICOM files, but not pydicom")
    rows = range(len(paths))
    few = len(paths) <= MAX_IN_PROCESS
    decoded: dict[int, DecodedFile] = {}
    for batch in (_decode_in_process if few else _decode_in_processes)(paths, rows, decoding, images):
        decoded |= batch
        if on_file is not None:
            on_file(len(decoded), len(paths))
    return [decoded[row] for row in rows]


def _decode_in_process(
    paths: Sequence[str], rows: Sequence[int], decoding: Decoding, images: PixelFile | None
) -> Iterator[dict[int, DecodedFile]]:
    """Yield decoded files by row, in batches."""
    with ExitStack() as stack:
        target = None if images is None else stack.enter_context(open(images.path, "r+b", buffering=0))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of large images and odd metadata
        for start in range(0, len(rows), REPORT_EVERY):
            batch = {}
            for row, path in zip(rows[start : start + REPORT_EVERY], paths[start : start + REPORT_EVERY], strict=True):
                batch[row], pixels = decode_file(path, decoding)
                if target is not None and images is not None and pixels:
                    target.seek(images.offset + row * len(pixels))
                    target.write(pixels)
            yield batch
        if target is not None:
            os.fsync(target.fileno())


def decode_file(path: str, decoding: Decoding) -> tuple[DecodedFile, bytes]:
    """Decode a file to square pixels, which are empty if it has an error."""
    try:
        encoded = read_bytes(path, decoding.max_bytes, "data.max_bytes")
        picture, (width, height) = read_image(encoded, decoding)
    except UnidentifiedImageError:
        return DecodedFile("", 0, 0, "it is not an image of a known format"), b""
    except Image.DecompressionBombError:
        return DecodedFile("", 0, 0, "it has too many pixels: make it smaller"), b""
    except Exception as error:  # Pillow raises nearly anything on a damaged file
        return DecodedFile("", 0, 0, to_one_line(error) or type(error).__name__), b""
    return DecodedFile(hashlib.blake2b(encoded, digest_size=16).hexdigest(), width, height, ""), picture.tobytes()


def _decode_in_processes(
    paths: Sequence[str], rows: Sequence[int], decoding: Decoding, images: PixelFile | None
) -> Iterator[dict[int, DecodedFile]]:
    """Yield decoded files by row, from one process per core."""
    count = count_cores()
    results: queue.Queue[dict[int, DecodedFile] | None] = queue.Queue()  # None at the end of each process
    workers = []
    try:
        for number in range(count):
            with tempfile.TemporaryFile("w+", encoding="ascii") as job:
                json.dump([paths[number::count], list(rows[number::count]), decoding, images], job)
                job.seek(0)
                command = [sys.executable, "-P", "-m", "fedcir.data.decoding"]
                # In a session of its own, so that Ctrl-C reaches only the parent process.
                worker = subprocess.Popen(command, stdin=job, stdout=subprocess.PIPE, text=True, start_new_session=True)
            workers.append(worker)
            threading.Thread(target=_receive_results, args=(worker.stdout, results), daemon=True).start()
        running = count
        while running:
            if (batch := results.get()) is None:
                running -= 1
            else:
                yield batch
        if failed := next((worker.returncode for worker in workers if worker.wait()), None):
            raise InputError(f"a process that decodes images ended with code {failed}: check memory and disk space")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _receive_results(output: IO[str], results: queue.Queue[dict[int, DecodedFile] | None]) -> None:
    try:
        with output, suppress(ValueError):  # a line cut short by a kill; the exit code is checked
            for line in output:
                results.put({row: DecodedFile(*values) for row, values in json.loads(line)})
    finally:
        results.put(None)


def main() -> None:
    """Decode the files that standard input lists, and print results every few files."""
    paths, rows, decoding, images = json.load(sys.stdin)
    for batch in _decode_in_process(paths, rows, Decoding(*decoding), None if images is None else PixelFile(*images)):
        print(json.dumps(list(batch.items())), flush=True)


if __name__ == "__main__":
    main()
