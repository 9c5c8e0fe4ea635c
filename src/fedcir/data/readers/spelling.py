"""Classes that are likely one, but are spelt in different ways at different sites."""

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import combinations

CLOSE = 0.9
"""Likeness of two words that are one with a letter more or less: tumor and tumour, giraffe and girafe."""
LONG = 5
"""Letters of a word for which this is unlikely to be chance."""
SHORT = 3
"""Letters of a word that may have a plural: MR and MRS are two."""
BETWEEN = re.compile(r"(?<=[^\W_])[\s_-]+(?=[^\W\d_])|(?<=[^\W\d_])[\s_-]+(?=[^\W_])")
"""What separates words, of which one at least begins or ends in a letter there."""


def spelt_alike(classes: Mapping[str, Collection[str]]) -> list[tuple[str, str]]:
    """Pairs of classes that differ in case, in separators, in a plural s or in one letter of a long word.

    `classes` are those of each site. A site that has both means both: such a pair is not given.
    """
    at: dict[str, set[str]] = {}
    for site, names in classes.items():
        for name in names:
            at.setdefault(name, set()).add(site)
    by_initial: dict[str, list[str]] = {}
    for name in sorted(name for name, sites in at.items() if len(sites) < len(classes)):
        by_initial.setdefault("".join(_words(name))[:1], []).append(name)
    pairs = (pair for names in by_initial.values() for pair in combinations(names, 2))
    return sorted((one, other) for one, other in pairs if not at[one] & at[other] and _alike(one, other))


def notes_on_spelling(classes: Mapping[str, Collection[str]], most: int = 5) -> tuple[str, ...]:
    """What a run says of them."""
    return tuple(_sentences(classes, spelt_alike(classes)[:most]))


def _sentences(classes: Mapping[str, Collection[str]], pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    for pair in pairs:
        where = [[site for site, names in classes.items() if name in names] for name in pair]
        told = [f"{name!r} ({_some(sites)})" for name, sites in zip(pair, where, strict=True)]
        yield f"{' and '.join(told)} count as two classes: if they are one, give them one name"


def _some(sites: Sequence[str]) -> str:
    return ", ".join(sites[:3]) + (f" and {len(sites) - 3} more" if len(sites) > 3 else "")


def _alike(one: str, other: str) -> bool:
    words, others = _words(one), _words(other)
    short, long = sorted(("".join(words), "".join(others)), key=len)
    if long == short or (len(short) >= SHORT and long in (f"{short}s", f"{short}es")):
        return True
    return len(words) == len(others) and all(a == b or _one_letter(a, b) for a, b in zip(words, others, strict=True))


def _one_letter(one: str, other: str) -> bool:
    if min(len(one), len(other)) < LONG or (one[0], one[-1]) != (other[0], other[-1]):
        return False
    return one.isalpha() and other.isalpha() and SequenceMatcher(None, one, other).ratio() > CLOSE


def _words(name: str) -> list[str]:
    """The words of a name in small letters. Signs count (HER2+, HER2-), and so does what is between two digits."""
    return BETWEEN.split(unicodedata.normalize("NFKC", name).casefold())
