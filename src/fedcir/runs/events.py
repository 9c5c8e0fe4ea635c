"""What a process tells the one that started it: JSON lines, in a file that the environment names."""

import json
import os
from pathlib import Path
from typing import TypedDict

EVENTS = "FEDCIR_EVENTS"
"""The file. Whoever starts a process sets it, and reads what was told when the process has ended."""


class Event(TypedDict):
    event: str
    """note, or failed."""
    text: str


def tell(event: str, text: str) -> bool:
    """Add a line, and say whether anybody asked for it."""
    path = os.environ.get(EVENTS)
    if path is None:
        return False
    told: Event = {"event": event, "text": text}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(told) + "\n")
    return True


def told(path: Path) -> list[Event]:
    """All lines so far; a last one that a killed process did not finish is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
