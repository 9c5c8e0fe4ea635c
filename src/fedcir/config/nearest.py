"""The hint at the end of an error about a name."""

import difflib
from collections.abc import Iterable


def nearest(name: str, choices: Iterable[str]) -> str:
    """The nearest name if there is one, else all."""
    names = sorted(choices)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names)}"
