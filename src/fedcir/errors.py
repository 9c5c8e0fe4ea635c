"""The error family, and the hint at the end of an error about a name."""

import difflib
from collections.abc import Iterable


class FedcirError(Exception):
    """An error that ends a command with one line, which names the value and the fix."""

    def __init__(self, message: str, public: str = "") -> None:
        super().__init__(replace_unprintable(message))
        self.public = public
        """The message without names of files or images, which a site may send to the server; empty if there is none."""


class InputError(FedcirError, ValueError):
    """The user's input is wrong."""


class RunError(FedcirError, RuntimeError):
    """A run failed although the user's input may be right."""


def suggest_name(name: str, choices: Iterable[str]) -> str:
    """Suggest the closest name if there is one, otherwise list all choices."""
    names = sorted(choices)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names)}"


def replace_unprintable(text: str) -> str:
    """Return text as one line that a terminal can show."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)
