"""Seeded damage: to bytes, to the values of JSON and TOML, and to what lies in a file's place.

A mutation is a function of its input and a random.Random, so a seed is enough to repeat it.
"""

import copy
import json
import os
import random
import shutil
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

FIRST, _, LAST = os.environ.get("FEDCIR_FUZZ", "1000").rpartition("-")
MANY = range(int(FIRST or 0), int(LAST))
"""Seeds of the inputs of each kind in `make test-slow`: FEDCIR_FUZZ=1000, or FEDCIR_FUZZ=360-1000 for a part."""

LONG = 300
"""Digits of a number that no machine type holds."""

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, -(2**63), 10**LONG, 0.5, -0.0, 1e308, -1e308, 1e-320,
    float("nan"), float("inf"), float("-inf"), "", " ", "\x00", "\x1b[31m", "../../..", "/dev/zero", "ä" * 5000, "=1+1",
    "0", "true", "os:system", [], {}, [[]], [None], [0] * 1000, {"": ""}, {"a": {"b": {"c": []}}},
)  # fmt: skip
"""What a field may come to hold, of every type."""


def batches(few: int, many: range = MANY) -> Any:
    """Seeds for a test to go through: a few in every run of the tests, many in those that take longer."""
    slow = pytest.param(range(max(few, many.start), many.stop), marks=pytest.mark.slow, id=f"seeds to {many.stop}")
    return pytest.mark.parametrize("seeds", [pytest.param(range(few), id=f"seeds to {few}"), slow])


def outcomes(seeds: Iterable[int], attempt: Callable[[random.Random], str | None]) -> list[str]:
    """What went wrong, by seed; `attempt` gives None if the outcome was a clean one."""
    result = ((seed, attempt(random.Random(seed))) for seed in seeds)
    return [f"seed {seed}: {fault}" for seed, fault in result if fault is not None]


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """The same bytes with some flipped, cut, doubled, moved or replaced; never the same, unless there are none."""
    data = data or b"\x00"
    at = rng.randrange(len(data))
    to = min(len(data), at + rng.choice((1, 4, 64, 4096)))
    return rng.choice((
        lambda: _flipped(data, rng, 1),
        lambda: _flipped(data, rng, 16),
        lambda: data[:at],
        lambda: b"",
        lambda: data[:at] + data[to:],
        lambda: data[:to] + data[at:],
        lambda: data[:at] + rng.randbytes(rng.choice((1, 8, 1000))) + data[at:],
        lambda: data[:at] + bytes(to - at + 1) + data[to:],
        lambda: rng.randbytes(len(data)),
        lambda: data + data,
    ))()  # fmt: skip


def _flipped(data: bytes, rng: random.Random, most: int) -> bytes:
    """With a bit or some turned over, each in a byte of its own."""
    changed = bytearray(data)
    for at in rng.sample(range(len(data)), k=min(len(data), rng.randint(1, most))):
        changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def damaged_value(value: Any, rng: random.Random) -> Any:
    """Nested dicts and lists with one place changed: another value, another name, gone, twice, or deeply nested."""
    changed = copy.deepcopy(value)
    places = list(_places(changed))
    if not places:
        return rng.choice(VALUES)
    holder, key = rng.choice(places)
    what = rng.randrange(6)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, dict):
        holder[rng.choice(("", "__class__", "name", f"{key}x", "ä\x00"))] = holder.pop(key)
    elif what == 2:
        holder[key] = deep(rng.choice((5, 200)), rng)
    elif what == 3:
        holder[key] = [holder[key]] * rng.choice((1, 2, 1000))
    else:
        holder[key] = rng.choice(VALUES)
    return changed


def _places(value: Any) -> Iterable[tuple[Any, Any]]:
    """Everything in it, as what holds it and the key."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def deep(levels: int, rng: random.Random) -> Any:
    """A list or an object in another, and so on."""
    value: Any = 0
    for _ in range(levels):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def damaged_json(data: bytes, rng: random.Random) -> bytes:
    """JSON with a value changed, with text that only looks like JSON, or with bytes damaged."""
    what = rng.randrange(8)
    if what == 0:
        return damaged_bytes(data, rng)
    if what == 1:
        return rng.choice((b"null", b"[]", b"{}", b"0", b"1e999", b'"x"', b"[" * 100_000, b'{"a":' * 100_000))
    if what == 2:
        return b"9" * rng.choice((LONG, 5000))
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # it is damaged already
        return damaged_bytes(data, rng)
    return json.dumps(damaged_value(value, rng), ensure_ascii=False).encode(errors="replace")


def damaged_toml(data: bytes, rng: random.Random) -> bytes:
    """TOML with a value changed, or with its bytes damaged; TOML has no null, so that is an empty string."""
    what = rng.randrange(8)
    if what == 0:
        return damaged_bytes(data, rng)
    if what == 1:
        return data + rng.choice((b"\n[", b"\nx = " + b"[" * 10_000, b"\nx." + b"y." * 1000 + b"z = 1\n", b"\n\x00"))
    try:
        tables = tomllib.loads(data.decode())
    except ValueError:  # it is damaged already
        return damaged_bytes(data, rng)
    return tomli_w.dumps(_without_none(damaged_value(tables or {"a": 0}, rng))).encode(errors="replace")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items()}
    return [_without_none(item) for item in value] if isinstance(value, list) else "" if value is None else value


def damaged_content(path: Path, rng: random.Random) -> None:
    """Damage a file as its kind allows; JSON by lines in a .jsonl."""
    data = path.read_bytes()
    if path.suffix == ".jsonl" and data:
        lines = data.splitlines(keepends=True)
        at = rng.randrange(len(lines))
        change = rng.randrange(4)
        if change == 0:
            lines.insert(at, lines[rng.randrange(len(lines))])
        elif change == 1:
            del lines[at]
        else:
            lines[at] = damaged_json(lines[at], rng) + b"\n"
        path.write_bytes(b"".join(lines))
        return
    kinds = {".json": damaged_json, ".toml": damaged_toml}
    path.write_bytes(kinds.get(path.suffix, damaged_bytes)(data, rng))


def damaged_place(path: Path, rng: random.Random) -> str:
    """Put something else where a file lies, or nothing."""
    path.unlink()
    what = rng.choice(("nothing", "a folder", "a pipe", "a link to nothing", "a link to itself", "an endless link"))
    if what == "a folder":
        path.mkdir()
        (path / "x").write_bytes(b"")
    elif what == "a pipe":
        os.mkfifo(path)
    elif what.startswith(("a link", "an endless")):
        path.symlink_to({"a link to nothing": "nowhere", "an endless link": "/dev/zero"}.get(what, path.name))
    return what


def damaged_file(folder: Path, rng: random.Random) -> str:
    """Damage one file somewhere in a folder; says what was done."""
    path = rng.choice(sorted(each for each in folder.rglob("*") if each.is_file()))
    name = path.relative_to(folder).as_posix()
    if rng.random() < 0.2:
        return f"{damaged_place(path, rng)} in the place of {name}"
    damaged_content(path, rng)
    return f"{name} damaged"


def damaged_copy(folder: Path, to: Path, rng: random.Random) -> str:
    """A copy of a folder with one file damaged, sometimes two."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    return " and ".join(damaged_file(to, rng) for _ in range(rng.choice((1, 1, 1, 2))))
