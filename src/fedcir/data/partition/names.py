"""Sequences that are made item by item when they are asked for, such as the names of two million samples."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

Item_co = TypeVar("Item_co", covariant=True)

DIGITS = 6
"""Of a number in a name, at least."""


class Made(Sequence[Item_co]):
    """A sequence of which only what an item is made from is held. It equals a list of the same items."""

    @abstractmethod
    def make(self, position: int) -> Item_co:
        """The item at a position from 0 to the length."""

    @overload
    def __getitem__(self, at: int) -> Item_co: ...

    @overload
    def __getitem__(self, at: slice) -> list[Item_co]: ...

    def __getitem__(self, at: int | slice) -> Item_co | list[Item_co]:
        if isinstance(at, slice):
            return [self.make(position) for position in range(*at.indices(len(self)))]
        position = at + len(self) if at < 0 else at
        if not 0 <= position < len(self):
            raise IndexError(f"there is no item {at} among {len(self)}")
        return self.make(int(position))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made | list | tuple) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Numbered(Made[str]):
    """Names that are a number each: art/train/000000, art/train/000001, and so on."""

    before: str
    size: int

    def __len__(self) -> int:
        return self.size

    def make(self, position: int) -> str:
        return f"{self.before}{position:0{DIGITS}d}"


@dataclass(frozen=True, eq=False)
class Chosen(Made[str]):
    """Some of other names."""

    names: Sequence[str]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def make(self, position: int) -> str:
        return self.names[int(self.rows[position])]
