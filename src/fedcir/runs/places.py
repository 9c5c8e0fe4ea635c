"""Where results go."""

import itertools
from pathlib import Path

from fedcir.config import Config
from fedcir.data.private import check_no_links
from fedcir.runs.sweep import SETTINGS
from fedcir.types import InputError


def run_name(config: Config) -> str:
    return f"{config.data.name}-{Path(config.algorithm.name).stem}-{config.run.seed}"


def place_for(out: str | Path | None, usual: Path, resume: bool) -> Path:
    """The folder asked for, else the usual one: a new one, or the last to go on with. It must be one for runs."""
    place = Path(out) if out is not None else latest(usual) if resume else unused(usual)
    if place.exists() and not place.is_dir():
        raise InputError(f"{place} is a file: choose another folder")
    runs = (place / SETTINGS).is_dir() or any(place.glob("*/config.toml"))
    if place.is_dir() and any(place.iterdir()) and not runs:
        raise InputError(f"{place} holds other files and no runs: choose another folder")
    check_no_links(place)
    return place


def unused(path: Path) -> Path:
    """This path, or the first with a number behind it where nothing lies yet."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if not _in_use(each))


def latest(path: Path) -> Path:
    """The last of those that `unused` has given out, or the path itself."""
    free = unused(path)
    number = int(free.name.removeprefix(f"{path.name}-")) if free != path else 2
    return path if number <= 2 else path.with_name(f"{path.name}-{number - 1}")


def _in_use(path: Path) -> bool:
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))
