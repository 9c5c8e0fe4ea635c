"""Values of a setting to try: `1e-3..1e-1` are all between two numbers, `0.1,0.5,0.9` are these."""

import math
from dataclasses import dataclass
from typing import Any

from fedcir.config.tables import toml_value
from fedcir.types import InputError


@dataclass(frozen=True)
class Span:
    """All numbers between two, both included."""

    low: float
    high: float
    whole: bool = False
    """Only whole numbers."""

    @property
    def log(self) -> bool:
        """Whether each factor of ten gets the same attention: the numbers are above 0 and span a factor of ten."""
        return self.low > 0 and self.high >= 10 * self.low

    @property
    def ends(self) -> tuple[Any, ...]:
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)

    def rounded(self, value: float) -> float:
        """To three digits, as people write it."""
        return value if self.whole else min(max(float(f"{value:.3g}"), self.low), self.high)

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low:.12g}..{self.high:.12g}"


@dataclass(frozen=True)
class Choices:
    """A few values."""

    values: tuple[Any, ...]

    @property
    def ends(self) -> tuple[Any, ...]:
        """All of them: each must be possible by itself."""
        return self.values

    def __contains__(self, value: object) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return ",".join(str(value).lower() if isinstance(value, bool) else f"{value}" for value in self.values)


Range = Span | Choices


def parse_range(text: str, setting: str) -> Range:
    """The values that a text names; `setting` is what they are of, for errors."""
    low, dots, high = text.partition("..")
    if not dots:
        values = tuple(toml_value(each.strip()) for each in text.split(",") if each.strip())
        if not values:
            raise InputError(f"{setting} has no value to try: write {setting}=0.1,0.5 or {setting}=0.01..1")
        return Choices(tuple(dict.fromkeys(values)))
    try:
        span = Span(float(low), float(high))
    except ValueError:
        raise InputError(f"{setting}={text} is no range: write two numbers, such as {setting}=0.001..0.1") from None
    if not (math.isfinite(span.low) and math.isfinite(span.high) and span.low < span.high):
        raise InputError(f"{setting}={text} is no range: its first number must be below its second")
    return span
