"""A run's rounds in TensorBoard, Weights & Biases or MLflow, beside its own records.

A tracker is told every round once, over kills and resumes. When it fails, training goes on without it: the run folder
has everything, and a later resume sends what is missing.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedcir.config import PATHS, Config, config_tables, nearest
from fedcir.engine.files import write
from fedcir.engine.folder import RunFolder
from fedcir.runs.tracking.trackers import MLflow, Settings, TensorBoard, Tracker, WandB, without_password
from fedcir.types import InputError, RoundRecord

TRACKERS: dict[str, Callable[[Path, str, Settings, str | None], Tracker]] = {
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "wandb": WandB,
}
PACKAGES = {"mlflow": ("mlflow", "sqlalchemy", "alembic", "cryptography")}
"""What a tracker needs, where that is not the package of its name alone."""


def check_tracker(name: str | None) -> None:
    """Refuse a tracker that does not exist, or whose package is missing, before anything starts."""
    if name is None:
        return
    if name not in TRACKERS:
        raise InputError(f"track cannot be {name!r}; {nearest(name, TRACKERS)}")
    for package in PACKAGES.get(name, (name,)):
        spec = find_spec(package)
        if spec is None or spec.origin is None:  # without an origin it is a mere folder of that name, such as ./wandb
            raise InputError(f"track {name} needs {package}: pip install 'fedcir[{name}]'")


class Track:
    """What a tracker was told of the run in a folder; without a name it does nothing."""

    def __init__(self, name: str | None, out: Path, on_note: Callable[[str], None]) -> None:
        self._name, self._folder, self._on_note = name, RunFolder(out), on_note
        self._tracker: Tracker | None = None
        self._file = out / "track" / f"{name}.json"
        self._told: dict[str, Any] = {"id": None, "round": 0, "final": 0}

    @property
    def place(self) -> str | None:
        """Where a person finds it, once it is open."""
        return None if self._tracker is None else self._tracker.place

    def begin(self) -> None:
        """Open the tracker and tell it the rounds that it has not been told, unless it knows the whole run."""
        self._attempt(self._begin)

    def round(self, record: RoundRecord) -> None:
        self._attempt(self._begin)
        self._attempt(self._round, record)

    def close(self, done: bool) -> None:
        if done:
            self._attempt(self._begin)
            self._attempt(self._finish)
        if self._tracker is not None:
            self._attempt(self._tracker.close, done)

    def _begin(self) -> None:
        if self._tracker is not None:
            return
        if self._file.exists():
            self._told = json.loads(self._file.read_text(encoding="utf-8"))
        records = self._folder.records()
        if self._folder.finished and self._told["final"] == len(records):
            return
        config, name = self._folder.config(), self._folder.path.resolve().name
        self._file.parent.mkdir(exist_ok=True)
        self._tracker = TRACKERS[str(self._name)](self._file.parent, name, settings_of(config), self._told["id"])
        self._note(id=self._tracker.id)
        for record in records:
            self._round(record)

    def _round(self, record: RoundRecord) -> None:
        # A round that is done again after a kill has the same numbers, and is not told again.
        if self._tracker is not None and record.round > self._told["round"]:
            self._tracker.log(record.round, values_of(record))
            self._note(round=record.round)

    def _finish(self) -> None:
        if self._tracker is not None:
            summary = self._folder.summary()
            self._tracker.finish(
                summary["rounds"], _numbers({name: summary[name] for name in ("final", "best", "cost")})
            )
            self._note(final=summary["rounds"])

    def _note(self, **told: Any) -> None:
        self._told |= told
        write(self._file, json.dumps(self._told) + "\n")

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        if self._name is None:
            return
        try:
            action(*arguments)
        except Exception as error:  # of any kind: training does not depend on it
            reason = without_password(" ".join(str(error).split()))[:200] or type(error).__name__
            rest = f"resume the run with track {self._name} to send the rest"
            self._on_note(f"{self._name} failed, and the run goes on without it: {reason}; {rest}")
            self._name = self._tracker = None


@contextmanager
def open_track(name: str | None, out: Path, on_note: Callable[[str], None]) -> Iterator[Track]:
    """The track of a run in its folder, which may come to be later; `on_note` is told when the tracker fails."""
    check_tracker(name)
    track, done = Track(name, out, on_note), False
    try:
        yield track
        done = True
    finally:
        track.close(done and RunFolder(out).finished)


def settings_of(config: Config) -> Settings:
    """The settings by `section.field`, without paths."""
    tables = config_tables(config)
    tables["algorithm"]["name"] = Path(config.algorithm.name).stem
    flat = {f"{section}.{name}": value for section, table in tables.items() for name, value in table.items()}
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in flat.items()
        if name not in PATHS
    }


def values_of(record: RoundRecord) -> dict[str, float]:
    """The numbers of a round by name."""
    return _numbers(
        {
            "loss": record.losses,
            **{name: value for name, value in vars(record).items() if name not in ("round", "losses")},
            "seconds": record.seconds["total"],
            "dropped": len(record.dropped),
        }
    )


def _numbers(values: Mapping[str, Any], before: str = "") -> dict[str, float]:
    """Nested numbers as `name/name`; what is no number is left out."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{before}{name}/")
        elif isinstance(value, int | float):
            found[f"{before}{name}"] = value
    return found
