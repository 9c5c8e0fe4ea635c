"""What a field takes, in words: its type, its choices, and its bounds."""

from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fedcir.config import bounds_of

_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text"}


def takes(cls: type, name: str) -> tuple[str, tuple[str, ...]]:
    """What a field of a dataclass takes, and its choices where they are few."""
    words, choices = _words(get_type_hints(cls)[name])
    bounds = bounds_of(cls).get(name)
    return words if bounds is None else f"{words}, {bounds}", choices


def _words(hint: Any) -> tuple[str, tuple[str, ...]]:
    if isinstance(hint, UnionType):
        given = [arg for arg in get_args(hint) if arg is not NoneType]
        return _words(given[0]) if len(given) == 1 else (str(hint), ())
    if get_origin(hint) is Literal:
        *some, last = get_args(hint)
        return f"{', '.join(map(str, some))} or {last}", get_args(hint)
    if get_origin(hint) is tuple:
        words, choices = _words(get_args(hint)[0])
        return f"list of {', '.join(choices) or words + 's'}", choices
    if get_origin(hint) is dict:
        return "table", ()
    return _WORDS.get(hint, str(hint)), ()
