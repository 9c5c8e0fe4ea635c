"""Published lists that say which images are for training and which for testing: lines of `path label`."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from fedcir.config.reading import TABLE, read_text
from fedcir.data.pictures.items import Item, Part
from fedcir.types import InputError


def read_list(path: Path) -> dict[str, int]:
    """The paths of a list with the line that each is in, without their labels; a path may hold spaces."""
    try:
        lines = read_text(path, TABLE).splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the list {path}: {error}") from error
    names = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            name, _, label = line.strip().rpartition(" ")
            if not name or not label.isdigit():
                raise InputError(f"{path}, line {number}: expected `path label`, got {line!r}")
            names[name] = number
    return names


def with_lists(items: Sequence[Item], train: Iterable[str], test: Iterable[str]) -> list[Item]:
    """The items that a list names, each marked as train or test. Their endings may differ (.png, .jpg)."""
    named = {_stem(name): name for name in (*train, *test)}
    parts: dict[Part, Iterable[str]] = {"train": train, "test": test}
    places = {_stem(name): part for part, names in parts.items() for name in names}
    both = {_stem(name) for name in train} & {_stem(name) for name in test}
    if both:
        raise InputError(f"{min(both)} is in the train list and in the test list: remove it from one of them")
    marked = [item._replace(part=places[_stem(item.name)]) for item in items if _stem(item.name) in places]
    missing = places.keys() - {_stem(item.name) for item in marked}
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"the lists name images that do not exist: {named[min(missing)]!r}{more}")
    return marked


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name
