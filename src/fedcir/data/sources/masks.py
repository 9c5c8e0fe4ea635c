"""`masks`: images in DIR/<domain>/images/ and the class of each pixel in DIR/<domain>/masks/, under the same name.

Pixel values of a mask are class numbers. Folders train, val and test may stand at some level, as in `folders`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcir.config import DataConfig
from fedcir.data.cache import PreparedImages
from fedcir.data.sources.folders import list_folder_images, list_site_folder
from fedcir.data.sources.source import DatasetSource, ImageFiles, ImageIndex, ImageList, ImageRecord
from fedcir.data.targets import name_pixel_classes
from fedcir.errors import InputError
from fedcir.text import join_names

IMAGES, MASKS = "images", "masks"


def list_masks(root: Path, domain: str | None = None) -> ImageIndex:
    """List all images with their masks, or those of one site in DIR/images/ and DIR/masks/."""
    index = list_folder_images(root) if domain is None else list_site_folder(root, domain)
    assert isinstance(index.pictures, ImageFiles)
    items = index.pictures.items
    by_key = {_get_key(item): item for item in items if item.label == MASKS}
    images = [item._replace(label="") for item in items if item.label == IMAGES]
    keys = [_get_key(item) for item in items if item.label == IMAGES]
    layout = "DIR/<domain>/images/ and DIR/<domain>/masks/" if domain is None else "DIR/images/ and DIR/masks/"
    if not images:
        raise InputError(f"{root} holds no images with masks: put them into {layout}", public="it has no masks")
    if bare := next((image for image, key in zip(images, keys, strict=True) if key not in by_key), None):
        mask = f"{_get_key(bare._replace(label=IMAGES))}.png"
        raise InputError(
            f"{root}/{bare.name} has no mask: add {mask}, or remove the image", public="an image has no mask"
        )
    masks = replace(index.pictures, items=[by_key[key]._replace(label="") for key in keys])
    notes = list(index.notes)
    if unused := sorted(by_key.keys() - set(keys)):
        notes.append(f"{len(unused)} mask{'s' * (len(unused) > 1)} without an image, such as {by_key[unused[0]].name}")
    if others := sorted({item.label for item in items} - {IMAGES, MASKS}):
        notes.append(f"folders beside images and masks are left out: {join_names(others)}")
    return index._replace(pictures=replace(index.pictures, items=images), notes=tuple(notes), masks=masks)


def _get_key(item: ImageRecord) -> str:
    """Name of an item's mask, without its ending."""
    folders = item.name.rpartition(".")[0].split("/")
    folders[folders.index(item.label, 1)] = MASKS
    return "/".join(folders)


def read_masks(
    images: PreparedImages, masks: PreparedImages, files: ImageList, root: str, names: Sequence[str]
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return the class numbers of all masks (M, H, W) and the names of the classes, and check sizes and numbers."""
    items = files.items
    if images.sizes is not None and masks.sizes is not None and (images.sizes != masks.sizes).any():
        row = int(np.flatnonzero((images.sizes != masks.sizes).any(1))[0])
        mask, image = ("x".join(map(str, sizes[row].tolist())) for sizes in (masks.sizes, images.sizes))
        raise InputError(
            f"{root}/{items[row].name} has {mask} pixels, but its image {image}: make them equal",
            public="a mask has another size than its image",
        )
    values = masks.images[..., 0]
    highest = [int(mask.max()) for mask in values]
    top = int(np.argmax(highest))
    if names and highest[top] >= len(names):
        raise InputError(
            f"{root}/{items[top].name} holds the class {highest[top]}, but data.classes names {len(names)}: they are "
            f"numbered 0 to {len(names) - 1}",
            public="a mask holds a class that the run does not have",
        )
    try:
        return values, tuple(names) or name_pixel_classes([values])
    except InputError as error:
        raise InputError(f"{root}/{items[top].name}: {error}", public="its masks leave out a class") from error


class Masks(DatasetSource):
    about = "Your own images, with the class of each pixel in a mask."
    where = "DIR/<domain>/images/<image> and DIR/<domain>/masks/<image>.png"

    def list_images(self, root: Path, data: DataConfig) -> ImageIndex:
        return list_masks(root)
