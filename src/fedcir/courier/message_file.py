"""Signed files that sites send: a courier file, one site's FedCiROne message, is verified before it is parsed.

A line of text holds the format, the public key and the signature of all bytes after the line. These are a safetensors
file: the sums of the site, and its header as JSON. The header can hold nothing but the fields of `CourierHeader`.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedcir.errors import InputError
from fedcir.files import explain_read_errors, read_bytes
from fedcir.machine import check_memory
from fedcir.models.closed_form import class_counts, is_gram, triangle_width
from fedcir.models.private_sums import are_noised_sums
from fedcir.runtime.file_formats import check_card
from fedcir.signing import Signature, sign, verify
from fedcir.text import format_bytes, to_one_line
from fedcir.types import ExampleNoise, Tensors
from fedcir.validation import Between, Fraction, build_dataclass, check_bounds, check_type

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FORMAT = 1
KINDS = {"courier": ("courier", "courier file"), "hits": ("courier heads", "reply about heads")}
"""Purpose of the signature and title, by the word in the first line of a signed file."""
LINE = re.compile(rb"fedcir-([a-z]{1,20}) ([0-9]{1,9}) ([0-9a-f]{64}) ([0-9a-f]{128})\n")
MAX_BYTES = 4_000_000_000
"""Largest file: training and validation sums of 11,000 numbers for each image."""
MAX_HEADER = 1_000_000
MAX_NAME = 200
FIX = "ask the site for the file again"
T = TypeVar("T")
ImageCount = Annotated[int, Between(0, 1_000_000_000)]


@dataclass(frozen=True)
class CourierHeader:
    """Content of a courier file besides the sums."""

    federation: str
    site: str
    train: ImageCount
    """Number of training images; `validation` and `test` are those set aside."""
    validation: ImageCount
    test: ImageCount
    classes: tuple[str, ...]
    image_size: int
    channels: int
    mean: tuple[float, ...]
    """Mean and spread by channel that pixel values are normalised with."""
    std: tuple[float, ...]
    model: dict[str, object]
    """Settings of the encoder."""
    encoder: str
    """Hash of the encoder's weights."""
    seed: int
    val_fraction: Fraction
    project: Annotated[int, Between(0, 16_384)] = 0
    """Width of the random projection of the features; 0 if there is none."""
    noise: Annotated[float, Between(0, 1_000)] = 0.0
    """Standard deviation of the noise on the sums, in multiples of what one image can change; 0 if there is none."""
    clip: Annotated[float, Between(0, 1_000_000)] = 0.0
    """Bound on the norm of an image's features, if there is noise."""
    delta: Fraction = 0.0

    def __post_init__(self) -> None:
        check_bounds(self, "header")
        check_card({**asdict(self), "classes": list(self.classes), "mean": list(self.mean), "std": list(self.std)})
        for name in (self.federation, self.site, *self.classes):
            if not name.strip() or len(name) > MAX_NAME or not name.isprintable():
                raise InputError(f"the names of federation, site and classes must be 1 to {MAX_NAME} printable letters")
        if len(self.classes) < 2:
            raise InputError(f"a classifier needs two classes, but there is only {self.classes[0]!r}: name all of them")
        if not re.fullmatch("[0-9a-f]{64}", self.encoder):
            raise InputError("header.encoder is no hash")
        if self.train < 1:
            raise InputError("it has no training image")

    @property
    def parts(self) -> dict[str, int]:
        """Number of images of each part that has sums."""
        return {
            "train": self.train,
            **({"validation": self.validation} if self.val_fraction and not self.noise else {}),
        }


@dataclass(frozen=True)
class CourierFile:
    """A courier file that was verified."""

    path: Path
    header: CourierHeader
    sums: Tensors
    signature: Signature
    size: int

    @property
    def content(self) -> str:
        """Hash of the sums, which is equal for equal images."""
        digest = hashlib.blake2b(digest_size=16)
        for _, tensor in sorted(self.sums.items()):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def images_by_class(self, part: str) -> list[int]:
        return [int(count) for count in _count_classes(self.sums, part, len(self.header.classes))]


def pack_signed_file(kind: str, header: Any, tensors: Tensors, key: "Ed25519PrivateKey") -> bytes:
    """Encode tensors and a header, a dataclass, as a signed file of this kind."""
    content = save(tensors, {"fedcir": json.dumps(asdict(header), sort_keys=True)})
    signature = sign(key, f"{KINDS[kind][0]} {FORMAT}", content)
    return f"fedcir-{kind} {FORMAT} {signature.public_key} {signature.signature}\n".encode() + content


def read_signed_file(path: Path, kind: str, header_class: type[T]) -> tuple[T, Tensors, Signature, int]:
    """Verify and read a signed file: its header, its tensors, the signature, and its size in bytes."""
    check_memory(3 * min(path.stat().st_size, MAX_BYTES), "the file")
    data = read_bytes(path, MAX_BYTES)
    purpose, title = KINDS[kind]
    if (line := LINE.match(data)) is None or line[1].decode() != kind:
        raise InputError(f"it is no {title}, or its first line was changed")
    if int(line[2]) != FORMAT:
        raise InputError(f"it has format {int(line[2])}, but this fedcir reads format {FORMAT}")
    signature, content = Signature(line[3].decode(), line[4].decode()), data[line.end() :]
    verify(signature, f"{purpose} {FORMAT}", content)
    length = int.from_bytes(content[:8], "little")
    if length > MAX_HEADER:
        raise InputError(f"its header has {length:,} bytes, more than {MAX_HEADER:,}")
    about = check_type(json.loads(content[8 : 8 + length]), dict, "header").get("__metadata__")
    values = json.loads(check_type(check_type(about, dict, "metadata").get("fedcir"), str, "metadata.fedcir"))
    header = build_dataclass(header_class, check_type(values, dict, "header"), "header")
    return header, load(content), signature, len(data)


def read_courier_file(path: Path) -> CourierFile:
    """Read a courier file; an InputError says in one line why it cannot be used."""
    with explain_read_errors(path, FIX):
        header, sums, signature, size = read_signed_file(path, "courier", CourierHeader)
        _check_sums(sums, header)
        return CourierFile(path, header, sums, signature, size)


def _check_sums(sums: Mapping[str, Tensor], header: CourierHeader) -> None:
    """Refuse tensors that are not the sums of as many images as the header says."""
    if set(sums) != {f"{part}_{half}" for part in header.parts for half in ("high", "low")}:
        raise InputError("it does not hold the sums that its header names")
    width = triangle_width(len(sums["train_high"])) if sums["train_high"].ndim == 1 else 0
    if any(t.dtype != torch.int64 or list(t.shape) != [width * (width + 1) // 2] for t in sums.values()):
        raise InputError("its sums have the wrong shape")
    if width <= len(header.classes):
        raise InputError("its sums are of no feature")
    if header.noise:
        noise = ExampleNoise(header.clip, header.noise)
        if not are_noised_sums(sums["train_high"], sums["train_low"], noise, header.train):
            raise InputError(f"its sums are not the noised ones of {header.train:,} images")
        return
    for part, images in header.parts.items():
        counts = _count_classes(sums, part, len(header.classes))
        if not is_gram(sums[f"{part}_high"], sums[f"{part}_low"]) or (counts % 1).any() or counts.sum() != images:
            raise InputError(f"its {part} sums are not those of {images:,} images")


def _count_classes(sums: Mapping[str, Tensor], part: str, classes: int) -> Tensor:
    return class_counts({half: sums[f"{part}_{half}"] for half in ("high", "low")}, classes)


def describe_courier_file(file: CourierFile) -> list[tuple[str, str]]:
    """Describe all that a courier file holds, as pairs of a title and a sentence."""
    header, numbers = file.header, triangle_width(len(file.sums["train_high"]))
    labels, entries = len(header.classes), len(file.sums["train_high"])
    by_class = list(header.classes)
    if not header.noise:  # with noise, the counts in the sums have noise too
        counts = [file.images_by_class(part) for part in header.parts]
        by_class = [f"{name} {' + '.join(map(str, row))}" for name, *row in zip(by_class, *counts, strict=True)]
    purposes = [{"train": "for training", "validation": "validation"}[part] for part in header.parts]
    images = f"{header.train:,} for training"
    if header.val_fraction:
        images += f" + {header.validation:,} for validation (a share of {header.val_fraction:g})"
    about = sorted(header.model.items())
    settings = [f"{name} {to_one_line(value, 100)}" for name, value in about if name not in ("name", "mean", "std")]
    projection = f"projected to {header.project:,} numbers at random, " if header.project else ""
    per_channel = ["/".join(f"{value:g}" for value in values) for values in (header.mean, header.std)]
    return [
        ("site", f"{header.site}, of the federation {header.federation}"),
        ("signed by", f"{file.signature.fingerprint} (the signature is valid)"),
        ("images", f"{images}; {header.test:,} for the site's own tests, which are in no sum"),
        ("classes", f"{labels}{', with the number of images of each' * (not header.noise)}: {', '.join(by_class)}"),
        ("encoder", f"{header.model['name']} ({', '.join(settings)}), {projection}seed {header.seed}; hash of its "
                    f"weights {header.encoder}"),
        ("input", f"{header.image_size} x {header.image_size} pixels, {header.channels} channels, normalised by mean "
                  f"{per_channel[0]} and spread {per_channel[1]}"),
        ("sums", f"over all images {' and over all for '.join(purposes)}: of the products of each two of {numbers:,} "
                 f"numbers of an image, which are {numbers - labels:,} features and {labels} class labels; "
                 f"{len(purposes)} x {entries:,} whole numbers, {format_bytes(file.size)} with this text"),
        ("noise", f"Gaussian, {header.noise:g} times as large as what one image can change, features of norm "
                  f"{header.clip:g} at most, delta {header.delta:g}" if header.noise else "none: the sums are exact"),
        ("nothing else", "no image, no feature of an image, no file name, no accuracy"),
    ]  # fmt: skip
