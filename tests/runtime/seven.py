"""A run of seven rounds, and how to tell whether two runs are equal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedcir.config import Config
from fedcir.runtime.run_folder import RunFolder

Tiny = Callable[..., Config]
Train = Callable[..., Path]


def seven(tiny: Tiny) -> Config:
    return tiny("fedcir", "server.rounds=7", "server.checkpoint_every=1")


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]


def but_seconds(value: Any) -> Any:
    """The same JSON without what no two runs share."""
    if isinstance(value, dict):
        return {key: but_seconds(item) for key, item in value.items() if key not in ("seconds", "peak_memory")}
    return [but_seconds(item) for item in value] if isinstance(value, list) else value


def same_run(a: Path, b: Path) -> bool:
    """Equal to the byte, or to the value where a file holds times."""
    return (
        (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
        and but_seconds(lines(a)) == but_seconds(lines(b))
        and but_seconds(json.loads((a / "summary.json").read_text()))
        == but_seconds(json.loads((b / "summary.json").read_text()))
        and (a / "manifest.json").read_bytes() == (b / "manifest.json").read_bytes()
    )


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file's content and time of change, but for the lock, which has none."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and path.name != RunFolder.LOCK
    }
