"""JSON piece by piece, so that a text of a hundred megabytes is never held whole: the same as json.dumps writes."""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from json.encoder import encode_basestring
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcir.data.partition.names import DIGITS, Chosen, Item_co, Made, Numbered

AT_A_TIME = 256
"""Items that are written together, which is faster."""

_sorted = json.JSONEncoder(sort_keys=True, default=str).encode
_plain = json.JSONEncoder(ensure_ascii=False).encode


class Written(Made[Item_co]):
    """A sequence that knows a faster way to the JSON of its items."""

    @abstractmethod
    def texts(self, inside: str | None) -> Iterator[str]:
        """Each item, as `compact` writes it, or as `indented` does, with `inside` before what the item holds."""


def compact(value: Any) -> Iterator[str]:
    """With keys in their order and no line breaks, as checksums are taken of."""
    if isinstance(value, Written) and len(value):
        before = "["
        for text in value.texts(None):
            yield before + text
            before = ", "
        yield "]"
    elif isinstance(value, Made):
        items, before = iter(value), "["
        while some := list(islice(items, AT_A_TIME)):
            yield before + _sorted(some)[1:-1]
            before = ", "
        yield "]" if len(value) else "[]"
    elif isinstance(value, dict) and _holds_made(value):
        before = "{"
        for key in sorted(value):
            yield f"{before}{_sorted(key)}: "
            yield from compact(value[key])
            before = ", "
        yield "}"
    else:
        yield _sorted(value)


def indented(value: Any, depth: int = 0) -> Iterator[str]:
    """With a line for each value, as people read it."""
    inside, after = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, Made) and len(value):
        each = (_text(item, depth + 1) for item in value)
        before = "["
        for text in value.texts(inside + " ") if isinstance(value, Written) else each:
            yield f"{before}{inside}{text}"
            before = ","
        yield after + "]"
    elif isinstance(value, dict) and _holds_made(value):
        before = "{"
        for key, each in value.items():
            yield f"{before}{inside}{encode_basestring(key)}: "
            yield from indented(each, depth + 1)
            before = ","
        yield after + "}"
    else:
        yield _text(value, depth)


def _text(value: Any, depth: int) -> str:
    inside, after = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, dict) and value:
        lines = [f"{encode_basestring(key)}: {_text(each, depth + 1)}" for key, each in value.items()]
        return f"{{{inside}{f',{inside}'.join(lines)}{after}}}"
    if isinstance(value, list | tuple) and value:
        if set(map(type, value)) == {str}:
            return f"[{inside}{_lines(inside)(value)[1:-1]}{after}]"
        return f"[{inside}{f',{inside}'.join([_text(each, depth + 1) for each in value])}{after}]"
    if isinstance(value, str):
        return encode_basestring(value)
    return "[]" if isinstance(value, Made) else _plain(value)


def _holds_made(value: Any) -> bool:
    return isinstance(value, Made) or (isinstance(value, dict) and any(map(_holds_made, value.values())))


@lru_cache
def _lines(inside: str) -> Any:
    """What writes a list of texts with a line for each: far faster than one by one."""
    return json.JSONEncoder(ensure_ascii=False, separators=(f",{inside}", ": ")).encode


@dataclass(frozen=True)
class Joined:
    """Texts of which a slice is one text."""

    texts: Sequence[str]
    between: str

    def __getitem__(self, at: slice) -> str:
        return self.between.join(self.texts[at])


@dataclass(frozen=True)
class Even:
    """The same of texts that are equally long: they lie in one text, each with what comes between."""

    text: str
    width: int
    between: str

    def __getitem__(self, at: slice) -> str:
        begin = at.start * self.width
        return self.text[begin : max(begin, at.stop * self.width - len(self.between))]


def written_names(
    names: Sequence[str], rows: NDArray[np.int64], between: str, encode: Callable[[str], str]
) -> Joined | Even:
    """The names of these rows as JSON; those with a number are written all at once, ten times as fast."""
    if isinstance(names, Chosen):
        return written_names(names.names, names.rows[rows], between, encode)
    if not isinstance(names, Numbered) or names.size > 10**DIGITS or not names.before.isascii():
        return Joined([encode(names[row]) for row in rows.tolist()], between)
    before = encode(names.before)[:-1]
    one = f'{before}{"0" * DIGITS}"{between}'
    letters = np.empty((len(rows), len(one)), dtype=np.uint8)
    letters[:] = np.frombuffer(one.encode(), dtype=np.uint8)
    for place in range(DIGITS):
        letters[:, len(before) + DIGITS - 1 - place] = ord("0") + rows // 10**place % 10
    return Even(letters.tobytes().decode("ascii"), len(one), between)
