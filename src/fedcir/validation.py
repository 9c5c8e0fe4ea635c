"""Typed and bounded values: the fields of settings, and what is read from JSON and TOML.

pydantic and msgspec were measured against this module; see CHANGELOG for why it stays.
"""

import dataclasses
import functools
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from fedcir.errors import InputError, suggest_name

T = TypeVar("T")


@dataclass(frozen=True)
class Between:
    """Bounds of a number. Both ends are included, unless they are `above` or `below`."""

    low: float
    high: float
    above: bool = False
    """Whether the lowest number is excluded."""
    below: bool = False
    """Whether the highest number is excluded."""

    def check(self, name: str, value: Any) -> None:
        if not (value > self.low if self.above else value >= self.low):  # NaN fails too
            least = "a number above" if self.above else "at least"
            raise InputError(f"{name} must be {least} {self.low:,}, got {format_value(value)}")
        if not (value < self.high if self.below else value <= self.high):
            most = "below" if self.below else "at most"
            raise InputError(f"{name} must be {most} {self.high:,}, got {format_value(value)}")

    def __str__(self) -> str:
        least = f"{'above' if self.above else 'at least'} {self.low:,}"
        most = f"{'below' if self.below else 'at most'} {self.high:,}"
        return f"{least}, {most}" if self.above or self.below else f"{self.low:,} to {self.high:,}"


Count = Annotated[int, Between(1, 1_000_000)]
"""Number of rounds or steps."""
Width = Annotated[int, Between(1, 16_384)]
"""Width of a layer."""
Weight = Annotated[float, Between(0, 1_000_000)]
"""Weight of a loss term."""
Positive = Annotated[float, Between(0, 1_000_000, above=True)]
LearningRate = Annotated[float, Between(0, 1_000, above=True)]
StdDev = Annotated[float, Between(0, 100, above=True)]
Decay = Annotated[float, Between(0, 1, above=True)]
"""Factor of a value from one round to the next."""
Fraction = Annotated[float, Between(0, 1, below=True)]


def check_bounds(values: Any, section: str) -> None:
    """Check every number of a dataclass that has bounds, also in lists and tuples."""
    for name, bounds in bounds_of(type(values)).items():  # type: ignore[arg-type]
        value = getattr(values, name)
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, Real):
                bounds.check(f"{section}.{name}", number)


@functools.cache
def bounds_of(cls: type) -> dict[str, Between]:
    """Return the bounds of a dataclass's fields by name."""
    hints = get_type_hints(cls, include_extras=True)
    names = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    extras = [(name, extra) for name in names for extra in getattr(hints[name], "__metadata__", ())]
    return {name: extra for name, extra in extras if isinstance(extra, Between)}


def format_value(value: Any) -> str:
    """Format a value for an error, in one line of limited length."""
    if isinstance(value, int) and abs(value) >= 2**63:  # Python refuses to print numbers of 5,000 digits
        return f"a number of {math.floor((value.bit_length() - 1) * math.log10(2)) + 1:,} digits"
    return reprlib.repr(value)


def build_dataclass(cls: type[T], values: Mapping[str, Any], section: str) -> T:
    """Build a dataclass from a mapping: every key must be a field of the class and every value of its type."""
    hints = _get_hints(cls)  # type: ignore[arg-type]
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            hint = suggest_name(name, fields) if fields else "it has no fields"
            raise InputError(f"[{section}] has no field {name!r}; {hint}")
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise InputError(f"{section}.{name} is missing")
    return cls(**{name: check_type(value, hints[name], f"{section}.{name}") for name, value in values.items()})


UNIONS = (UnionType, Union)
"""Origins of `X | None`; that of Literal[...] | None is Union."""


def check_type(value: Any, hint: Any, name: str) -> Any:
    """Return a value read from a file as a type, which may be nested; an error names the part that is wrong."""
    if type(value) is hint and (hint is not int or abs(value) < 2**63):  # the usual case, for speed
        return value
    if get_origin(hint) in UNIONS:
        return None if value is None else check_type(value, strip_optional(hint), name)
    if dataclasses.is_dataclass(hint):
        return build_dataclass(hint, check_type(value, dict, name), name)  # type: ignore[arg-type]
    if is_typeddict(hint):
        hints = _get_hints(hint)
        if missing := sorted(hint.__required_keys__ - check_type(value, dict, name).keys()):
            raise InputError(f"{name}.{missing[0]} is missing")
        return {key: check_type(item, hints.get(key, object), f"{name}.{key}") for key, item in value.items()}
    is_container = get_origin(hint) in (dict, list, tuple)
    return _check_items(value, hint, name) if is_container else _check_scalar(value, hint, name)


def strip_optional(hint: Any) -> Any:
    """Return the type X of a hint `X | None`, and any other hint as it is."""
    if get_origin(hint) not in UNIONS:
        return hint
    (inner,) = (arg for arg in get_args(hint) if arg is not NoneType)
    return inner


def _check_items(value: Any, hint: Any, name: str) -> Any:
    container, inner = get_origin(hint), get_args(hint)[-1 if get_origin(hint) is dict else 0]
    if container is dict:
        return {key: check_type(item, inner, f"{name}.{key}") for key, item in check_type(value, dict, name).items()}
    if container is list:
        items = enumerate(check_type(value, list, name))
        return [check_type(item, inner, f"{name}[{index}]") for index, item in items]
    if inner is str and type(value) is int:  # --set partition.exclude=3
        value = str(value)
    if isinstance(value, str):  # --set data.classes=cat,dog
        value = [item.strip() for item in value.split(",") if item.strip()]
    if not isinstance(value, list | tuple):
        raise InputError(f"{name} must be a list, got {format_value(value)}")
    if inner is str and (invalid := next((item for item in value if not isinstance(item, str)), None)) is not None:
        text = format_value(invalid)
        raise InputError(f'{name} must be a list of names, got {text}; write each in quotes, ["{text}", ...]')
    return tuple(check_type(item, inner, name) for item in value)


def _check_scalar(value: Any, hint: Any, name: str) -> Any:
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        text = format_value(value)
        raise InputError(f"{name} cannot be {text}; {suggest_name(text.strip(_QUOTES), get_args(hint))}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**1023 else math.copysign(math.inf, value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint not in (bool, object)):
        text = format_value(value)
        quote = f'; write it in quotes, "{text}"' if hint is str and isinstance(value, int | float) else ""
        raise InputError(f"{name} must be {_TYPE_NAMES.get(hint, hint)}, got {text}{quote}")
    if hint is int:  # beyond 64 bits
        raise InputError(f"{name} must be a whole number of at most 19 digits, got {format_value(value)}")
    return value


_QUOTES = "'\""
_get_hints = functools.cache(get_type_hints)

_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}
