"""Published lists that say which images are for training and which for testing: lines of `path label`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from fedcir.data.folders import ImageFile
from fedcir.types import InputError


def read_list(path: Path) -> list[str]:
    """The paths of a list, without their labels; a path may hold spaces."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the list {path}: {error}") from error
    names = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            name, _, label = line.strip().rpartition(" ")
            if not name or not label.isdigit():
                raise InputError(f"{path}, line {number}: expected `path label`, got {line!r}")
            names.append(name)
    return names


def with_lists(files: Sequence[ImageFile], train: Sequence[str], test: Sequence[str]) -> list[ImageFile]:
    """The files that a list names, each marked as train or test. Their endings may differ (.png, .jpg)."""
    places = {_stem(name): False for name in train} | {_stem(name): True for name in test}
    both = {_stem(name) for name in train} & {_stem(name) for name in test}
    if both:
        raise InputError(f"{min(both)} is in the train list and in the test list")
    marked = [replace(file, test=places[_stem(file.name)]) for file in files if _stem(file.name) in places]
    if not marked:
        raise InputError(f"no file is named by the lists; the first list names {next(iter(train), 'none')!r}")
    return marked


def _stem(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))
