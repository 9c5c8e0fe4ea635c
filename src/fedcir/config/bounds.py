"""How small and how large a number may be: declared beside a field's default, and checked wherever its class is made.

`steps: Annotated[int, Between(1, 10**6)] = 20`. No sensible user meets an upper bound. It turns a typing error into one
line, instead of a machine without memory.
"""

import dataclasses
import functools
import math
import reprlib
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, get_type_hints

from fedcir.types import InputError


@dataclass(frozen=True)
class Between:
    """Both ends are included, unless they are `above` or `below`."""

    low: float
    high: float
    above: bool = False
    """Whether the lowest number is left out."""
    below: bool = False
    """Whether the highest is."""

    def check(self, name: str, value: Any) -> None:
        if not (value > self.low if self.above else value >= self.low):  # it may be nan
            least = "a number above" if self.above else "at least"
            raise InputError(f"{name} must be {least} {self.low:,}, got {shown(value)}")
        if not (value < self.high if self.below else value <= self.high):
            most = "below" if self.below else "at most"
            raise InputError(f"{name} must be {most} {self.high:,}, got {shown(value)}")

    def __str__(self) -> str:
        least = f"{'above' if self.above else 'at least'} {self.low:,}"
        most = f"{'below' if self.below else 'at most'} {self.high:,}"
        return f"{least}, {most}" if self.above or self.below else f"{self.low:,} to {self.high:,}"


MANY = 1_000_000

Count = Annotated[int, Between(1, MANY)]
"""Of rounds or steps."""
Width = Annotated[int, Between(1, 16_384)]
"""Of a layer."""
Weight = Annotated[float, Between(0, MANY)]
"""Of a loss's term."""
Positive = Annotated[float, Between(0, MANY, above=True)]
Rate = Annotated[float, Between(0, 1_000, above=True)]
"""Of learning."""
Spread = Annotated[float, Between(0, 100, above=True)]
"""A standard deviation."""
Decay = Annotated[float, Between(0, 1, above=True)]
"""The factor of a value from one round to the next."""
Share = Annotated[float, Between(0, 1, below=True)]


def check_bounds(values: Any, section: str) -> None:
    """Check every number of a dataclass that has bounds; one of a list, each."""
    for name, between in bounds_of(type(values)).items():  # type: ignore[arg-type]
        value = getattr(values, name)
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, Real):
                between.check(f"{section}.{name}", each)


@functools.cache
def bounds_of(cls: type) -> dict[str, Between]:
    """The bounds of a dataclass's fields by name."""
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        said = [each for each in getattr(hints[field.name], "__metadata__", ()) if isinstance(each, Between)]
        if said:
            found[field.name] = said[0]
    return found


def shown(value: Any) -> str:
    """A value in an error: one line that is not too long."""
    if isinstance(value, int) and abs(value) >= 2**63:  # Python itself prints none of 5,000 digits
        return f"a number of {math.floor((value.bit_length() - 1) * math.log10(2)) + 1:,} digits"
    return reprlib.repr(value)
