"""JSON piece by piece, so that a text of a hundred megabytes is never held whole: the same as json.dumps writes."""

import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from json.encoder import encode_basestring
from typing import Any

from fedcir.data.names import Made

AT_A_TIME = 256
"""Items that are written together, which is faster."""

_sorted = json.JSONEncoder(sort_keys=True, default=str).encode
_plain = json.JSONEncoder(ensure_ascii=False).encode


def compact(value: Any) -> Iterator[str]:
    """With keys in their order and no line breaks, as checksums are taken of."""
    if isinstance(value, Made):
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
        before = "["
        for item in value:
            yield f"{before}{inside}{_text(item, depth + 1)}"
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
