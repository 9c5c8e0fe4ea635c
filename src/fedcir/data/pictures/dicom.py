"""A DICOM file as a picture of 8 bits, as a viewer would show it: by the window that the file itself names.

The order is that of DICOM's PS3.3, C.11: modality (rescaling), values of interest (a table, or window centre and
width), then MONOCHROME1 inverted. A file that names no window is stretched from its lowest to its highest value.
"""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedcir.data.pictures.square import Limits

MISSING = "DICOM files need pydicom: pip install 'fedcir[dicom]'"

DEFLATED = b"1.2.840.10008.1.2.1.99"
"""The transfer syntax of files that are compressed as a whole."""

Values = NDArray[np.float64]


def read_dicom(encoded: bytes, limits: Limits) -> Image.Image:
    """The picture in a DICOM file, grey or RGB. Raises nearly anything on one that holds none."""
    try:
        import pydicom
    except ImportError:
        raise ValueError(MISSING) from None
    if DEFLATED in encoded:  # a few bytes could become any number
        raise ValueError("it is a DICOM file that is deflated as a whole: save it without")
    file = pydicom.dcmread(io.BytesIO(encoded))
    if "PixelData" not in file:
        raise ValueError("it is a DICOM file without pixels")
    if (frames := int(file.get("NumberOfFrames") or 1)) > 1:
        raise ValueError(f"it is a DICOM file of {frames} frames: save the one you need as a file of its own")
    limits.check(int(file.Columns), int(file.Rows))
    pixels = _pixels(file)
    kind = file.PhotometricInterpretation
    if kind in ("MONOCHROME1", "MONOCHROME2"):
        shares = _window(file, pixels)
        return _picture(1 - shares if kind == "MONOCHROME1" else shares)
    if kind == "PALETTE COLOR":
        from pydicom.pixels.processing import apply_color_lut

        pixels = apply_color_lut(pixels, file)
        return _picture(pixels / float(np.iinfo(pixels.dtype).max))
    return _picture(pixels / float(2**file.BitsStored - 1))  # colours, which pydicom has made RGB


def _pixels(file: Any) -> NDArray[Any]:
    """The numbers that the file stores."""
    try:
        return np.asarray(file.pixel_array)
    except (RuntimeError, NotImplementedError) as error:  # what pydicom raises if no decoder can
        syntax = file.file_meta.TransferSyntaxUID
        if not syntax.is_compressed:
            raise
        raise ValueError(
            f"it is a DICOM file compressed as {syntax.name}, which pydicom cannot decode here: "
            "save it uncompressed, or install a decoder such as pylibjpeg"
        ) from error


def _window(file: Any, pixels: NDArray[Any]) -> Values:
    """Grey values from 0 to 1."""
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


def _picture(shares: Values) -> Image.Image:
    return Image.fromarray((255 * shares.clip(0, 1)).round().astype(np.uint8))
