"""What a site or a server has done, as lines that are only ever added. They name no image and no file of one."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedcir.flower.state import writing

NAME = "audit.jsonl"


@dataclass(frozen=True)
class AuditLog:
    """A log in a folder; only its owner can read it. What cannot be written is an error, so nothing goes unnoted."""

    folder: Path
    about: Mapping[str, Any] = field(default_factory=dict)
    """What every line says beside its own."""

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines so far; a line that was cut short by a crash is left out."""
        path = self.folder / NAME
        if path.exists():
            with open(path, encoding="utf-8", errors="replace") as file:
                for line in file:
                    with contextlib.suppress(ValueError):
                        yield dict(json.loads(line))

    def note(self, event: str, **more: Any) -> None:
        """Add a line, on disk when this returns."""
        said = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **self.about, **more}
        line = json.dumps(said).encode() + b"\n"
        path = self.folder / NAME
        with writing(self.folder), open(path, "ab", buffering=0, opener=_for_its_owner) as file:
            if file.write(line) != len(line):  # one call, so that lines of several processes do not mix
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(file.fileno())


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
