"""The request behind several runs in one folder, saved so that a resume needs no options again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedcir.config import Asked, absolute_paths, dump_toml, read_toml, typed
from fedcir.engine.files import RESTORE, reading, write
from fedcir.runs.sweep import SETTINGS
from fedcir.types import InputError


@dataclass(frozen=True)
class BatchRequest:
    """Algorithms, seeds and settings of a comparison or an experiment, as the user gave them; None if not given."""

    asked: Asked
    algorithms: list[str] | None = None
    seeds: list[int] | None = None
    target: float | None = None
    more: dict[str, str] = field(default_factory=dict)
    """What else the command takes, such as the scale of an experiment."""

    def save(self, folder: Path, name: str) -> None:
        """Write the request into the folder of its runs."""
        tables = absolute_paths(self.asked.tables())
        tables["run"] = {key: value for key, value in tables.get("run", {}).items() if key != "workers"}
        about: dict[str, Any] = {
            "algorithms": self.algorithms,
            "seeds": self.seeds,
            "target": self.target,
            "preset": self.asked.preset,
        }
        given = {key: value for key, value in {**about, "more": self.more}.items() if value not in (None, {})}
        path = request_path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, dump_toml({"request": given, "settings": tables}))

    def resume(self, folder: Path, name: str) -> "BatchRequest":
        """Fill in what is not given from the request that the runs in the folder were started with.

        Code of the user's own that only the folder names is refused: the folder may come from elsewhere.
        """
        path = request_path(folder, name)
        if not path.is_file():  # of an earlier version, whose user gives all options again
            return self
        with reading(path, RESTORE):
            tables = read_toml(path)
            about = typed(tables.get("request"), dict, "request")
            saved = BatchRequest(
                Asked(typed(about.get("preset"), str | None, "preset")),
                typed(about.get("algorithms"), list[str] | None, "algorithms"),
                typed(about.get("seeds"), list[int] | None, "seeds"),
                typed(about.get("target"), float | None, "target"),
                typed(about.get("more", {}), dict[str, str], "more"),
            )
            settings = typed(tables.get("settings"), dict[str, dict], "settings")  # type: ignore[type-arg]
        given = self.asked.tables()
        algorithms = saved.algorithms if self.algorithms is None else self.algorithms
        if self.algorithms is None:
            _refuse_code(folder, "algorithms", saved.algorithms or ())
            own = _name(settings, "algorithm") if _name(given, "algorithm") is None else None
            _refuse_code(folder, "algorithms", () if own is None else (own,))
        if _name(given, "model") is None and (model := _name(settings, "model")) is not None:
            _refuse_code(folder, "model", (model,))
        asked = replace(self.asked, preset=self.asked.preset or saved.asked.preset, saved=settings)
        seeds = saved.seeds if self.seeds is None else self.seeds
        target = saved.target if self.target is None else self.target
        return BatchRequest(asked, algorithms, seeds, target, {**saved.more, **self.more})


def request_path(folder: Path, name: str) -> Path:
    return folder / SETTINGS / f"{name}.request.toml"


def require_runs(folder: Path, what: str) -> None:
    """Refuse to resume where nothing was started."""
    if not (folder / SETTINGS).is_dir() and not any(folder.glob("*/config.toml")):
        raise InputError(f"{folder} holds no {what} to continue: start without resume")


def _name(tables: Mapping[str, Any], section: str) -> str | None:
    name: str | None = typed(tables.get(section, {}).get("name"), str | None, f"{section}.name")
    return name


def _refuse_code(folder: Path, setting: str, names: Sequence[str]) -> None:
    """Names with a file or a callable are code: the user names them again to run them."""
    if code := next((name for name in names if name.endswith(".py") or ":" in name), None):
        raise InputError(
            f"{folder} names code of its own, {code}, which was not run: if it is yours, give {setting} again"
        )
