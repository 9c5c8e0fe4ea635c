"""Pictures from anywhere as squares of bytes, by the code that decodes a dataset."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedcir.data.pictures.decode import decode_file
from fedcir.data.pictures.square import MODES, SUFFIXES, square
from fedcir.data.readers.levels import top_level
from fedcir.types import InputError

Pixels = NDArray[np.uint8]
Picture = Image.Image | NDArray[Any] | str | Path


def files_in(paths: Iterable[str | Path]) -> list[str]:
    """The files that these paths name: files themselves, and the images in folders, however deep. Hidden ones are not.

    What is given by name need not look like an image.
    """
    found: list[str] = []
    for given in paths:
        path = str(given)
        if os.path.isdir(path):
            inside = [os.path.join(path, name) for name in top_level(path).images()]
            if not inside:
                raise InputError(f"{path} holds no images; they end in {', '.join(SUFFIXES)}")
            found += inside
        elif os.path.exists(path):
            found.append(path)
        else:
            raise InputError(f"there is no file or folder {path}")
    return found


def read_file(path: str, size: int, channels: int) -> Pixels | str:
    """A file's square (H, W, C), or what is wrong with the file."""
    if not os.path.exists(path):
        return "there is no such file"
    if os.path.isfile(path) and not os.path.getsize(path):
        return "it is empty"
    look, pixels = decode_file(path, size, _known(channels))
    return look.error or np.frombuffer(pixels, np.uint8).reshape(size, size, channels)


def one_by_one(images: Any) -> Sequence[Picture]:
    """What a caller gave as a list of pictures: a batch is taken apart, and a single one is a list of one."""
    if isinstance(images, Image.Image | str | Path):
        return [images]
    if isinstance(images, np.ndarray):
        return list(images) if images.ndim == 4 else [images]
    return list(images)


def squared(picture: Any, size: int, channels: int) -> Pixels:
    """The square (H, W, C) of an image or array of the caller's."""
    if isinstance(picture, np.ndarray):
        picture = _as_image(picture)
    if not isinstance(picture, Image.Image):
        raise InputError(f"an image must be a PIL image, an array or a path, got {type(picture).__name__}")
    return np.asarray(square(picture, size, _known(channels))).reshape(size, size, channels)


def _as_image(array: NDArray[Any]) -> Image.Image:
    grey = array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array
    if array.dtype != np.uint8 or grey.ndim not in (2, 3) or (grey.ndim == 3 and grey.shape[-1] not in (3, 4)):
        raise InputError(f"an array must be uint8 of (H, W, 3) or (H, W), got {array.dtype}{list(array.shape)}")
    return Image.fromarray(grey)


def _known(channels: int) -> int:
    """A model of grey images sees colours as their brightness."""
    if channels not in MODES:
        raise InputError(f"the model takes images of {channels} channels, which no picture has: use run.model()")
    return channels
