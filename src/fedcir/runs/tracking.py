"""Send the rounds of a run to TensorBoard, Weights & Biases or MLflow.

Every round is sent once, also across kills and resumes. If a tracker fails, training continues without it: the run
folder holds everything, and a later resume sends the missing rounds.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from fedcir.config import PATH_SETTINGS, Config, config_to_tables
from fedcir.errors import InputError, suggest_name
from fedcir.files import write_file
from fedcir.runs.reader import load_run
from fedcir.runtime.run_folder import RunFolder
from fedcir.types import Metric, RoundRecord

FlatSettings = dict[str, bool | int | float | str]
Values = Mapping[str, float]


class Tracker(Protocol):
    """Built from the folder of its files, the run's name and settings, and its id of an earlier session, if any."""

    id: str
    location: str
    """Folder or address of its pages."""

    def log(self, round: int, values: Values) -> None: ...

    def finish(self, round: int, values: Values) -> None:
        """Send the final numbers."""
        ...

    def close(self, done: bool) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, name: str, settings: FlatSettings, id: str | None, metric: Metric) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self.id, self.location = name, str(folder / "tensorboard")
        make: Any = SummaryWriter  # untyped in torch
        self._writer = make(self.location)
        names = map(metric.name_in_files, ("score_mean", "score_worst"))
        columns = dict.fromkeys(names)  # of the page of hyper-parameters
        begun, started, self._ended = hparams(settings, columns)  # type: ignore[no-untyped-call]
        for summary in (begun, started):
            self._writer.file_writer.add_summary(summary)
        self._writer.flush()

    def log(self, round: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    finish = log

    def close(self, done: bool) -> None:
        if done:
            self._writer.file_writer.add_summary(self._ended)
        self._writer.close()


class WandB:
    def __init__(self, folder: Path, name: str, settings: FlatSettings, id: str | None, metric: Metric) -> None:
        import wandb

        defaults: dict[str, Any] = {
            "project": "fedcir",
            "run_name": name,
            "silent": True,
            "console": "off",
            "x_disable_meta": True,  # it would record the command line with its paths
            "finish_timeout": 120.0,  # instead of waiting forever for an unreachable server
            "finish_timeout_raises": True,
        }
        chosen = {"run_name" if key == "WANDB_NAME" else key.removeprefix("WANDB_").lower() for key in os.environ}
        self._run = wandb.init(
            id=id,
            resume="allow",
            dir=folder,
            config=settings,
            reinit="create_new",
            settings={key: value for key, value in defaults.items() if key not in chosen},
        )
        self.id = self._run.id
        self.location = str(folder / "wandb") if self._run.offline else str(self._run.url)

    def log(self, round: int, values: Values) -> None:
        self._run.log(dict(values), step=round)

    def finish(self, round: int, values: Values) -> None:
        self._run.summary.update(dict(values))

    def close(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)


class MLflow:
    def __init__(self, folder: Path, name: str, settings: FlatSettings, id: str | None, metric: Metric) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        # MLflow logs every table, and errors are raised anyway.
        logging.getLogger("mlflow.store.db").setLevel(logging.CRITICAL)
        local = (folder / "mlflow.db").resolve().as_posix().replace("%", "%25").replace("?", "%3F")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{local}"
        self.location = hide_passwords(uri)
        self._client = MlflowClient(uri)
        if id is None:
            self.id = self._client.create_run(self._experiment(), run_name=name).info.run_id
            params = [Param(_clean_name(key), str(value)) for key, value in settings.items()]
            self._client.log_batch(self.id, params=params)  # once, because MLflow parameters cannot be changed
        else:
            self.id = id
            self._client.update_run(id, status="RUNNING")

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        if id := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedcir")
        if (experiment := self._client.get_experiment_by_name(name)) is not None:
            return str(experiment.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:
            if (experiment := self._client.get_experiment_by_name(name)) is None:
                raise
            return str(experiment.experiment_id)  # another run has just created it

    def log(self, round: int, values: Values) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self.id, [Metric(_clean_name(key), value, now, round) for key, value in values.items()])

    finish = log

    def close(self, done: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if done else "KILLED")


def hide_passwords(text: str) -> str:
    """Remove user names and passwords from URLs: http://me:secret@host becomes http://host."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def _clean_name(name: str) -> str:
    """Replace characters that MLflow does not accept in a name."""
    return re.sub(r"[^\w./ -]", "_", name)


TrackerClass = Callable[[Path, str, FlatSettings, str | None, Metric], Tracker]
TRACKERS: dict[str, TrackerClass] = {"mlflow": MLflow, "tensorboard": TensorBoard, "wandb": WandB}
PACKAGES = {"mlflow": ("mlflow", "sqlalchemy", "alembic", "cryptography")}
"""Packages of trackers that need more than the package of their name."""


def check_tracker(name: str | None) -> None:
    """Refuse an unknown tracker, or one whose package is missing, before the run starts."""
    if name is None:
        return
    if name not in TRACKERS:
        raise InputError(f"track cannot be {name!r}; {suggest_name(name, TRACKERS)}")
    for package in PACKAGES.get(name, (name,)):
        spec = find_spec(package)
        if spec is None or spec.origin is None:  # without an origin it is only a folder of that name, such as ./wandb
            raise InputError(f"track {name} needs {package}: pip install 'fedcir[{name}]'")


class RunTracker:
    """Sends the run in a folder to a tracker and saves what was sent; without a name it does nothing."""

    def __init__(self, name: str | None, out: Path, on_note: Callable[[str], None]) -> None:
        self._name, self._folder, self._on_note = name, RunFolder(out), on_note
        self._tracker: Tracker | None = None
        self._file = out / "track" / f"{name}.json"
        self._sent: dict[str, Any] = {"id": None, "round": 0, "final": 0}

    @property
    def location(self) -> str | None:
        """Location of the tracker, once it is open."""
        return None if self._tracker is None else self._tracker.location

    def update(self) -> None:
        """Send the rounds that the tracker lacks; open it first, unless it has the whole run."""
        self._attempt(self._update)

    def close(self, done: bool) -> None:
        if done:
            self._attempt(self._update)
            self._attempt(self._finish)
        if self._tracker is not None:
            self._attempt(self._tracker.close, done)

    def _update(self) -> None:
        if self._tracker is None:
            if self._file.exists():
                self._sent = json.loads(self._file.read_text(encoding="utf-8"))
            if self._folder.finished and self._sent["final"] == len(self._folder.records()):
                return
            settings, name = flatten_settings(self._folder.config()), self._folder.path.resolve().name
            self._file.parent.mkdir(exist_ok=True)
            metric = load_run(self._folder.path).task.primary
            self._tracker = TRACKERS[str(self._name)](self._file.parent, name, settings, self._sent["id"], metric)
            self._save_sent(id=self._tracker.id)
        # A round that is repeated after a kill has the same numbers and is not sent again.
        for record in self._folder.records(after=self._sent["round"]):
            self._tracker.log(record.round, flatten_record(record))
            self._save_sent(round=record.round)

    def _finish(self) -> None:
        if self._tracker is not None:
            summary = self._folder.summary()
            numbers = _flatten_numbers({name: summary[name] for name in ("final", "best", "cost")})
            self._tracker.finish(summary["rounds"], numbers)
            self._save_sent(final=summary["rounds"])

    def _save_sent(self, **values: Any) -> None:
        self._sent |= values
        write_file(self._file, json.dumps(self._sent) + "\n")

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        if self._name is None:
            return
        try:
            action(*arguments)
        except Exception as error:  # of any kind, because training must continue
            reason = hide_passwords(" ".join(str(error).split()))[:200] or type(error).__name__
            rest = f"resume the run with track {self._name} to send the rest"
            self._on_note(f"{self._name} failed, and the run goes on without it: {reason}; {rest}")
            self._name = self._tracker = None


@contextmanager
def open_tracker(name: str | None, out: Path, on_note: Callable[[str], None]) -> Iterator[RunTracker]:
    """Open the tracker of a run, whose folder may not exist yet; `on_note` is called if the tracker fails."""
    check_tracker(name)
    track, done = RunTracker(name, out, on_note), False
    try:
        yield track
        done = True
    finally:
        track.close(done and RunFolder(out).finished)


def flatten_settings(config: Config) -> FlatSettings:
    """Return the settings by `section.field`, without paths."""
    tables = config_to_tables(config)
    tables["algorithm"]["name"] = Path(config.algorithm.name).stem
    flat = {f"{section}.{name}": value for section, table in tables.items() for name, value in table.items()}
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in flat.items()
        if name not in PATH_SETTINGS
    }


def flatten_record(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a record by name."""
    return _flatten_numbers(
        {
            "loss": record.losses,
            **{name: value for name, value in record.to_values().items() if name not in ("round", "losses", "metric")},
            "seconds": record.seconds["total"],
            "dropped": len(record.dropped),
        }
    )


def _flatten_numbers(values: Mapping[str, Any], before: str = "") -> dict[str, float]:
    """Flatten nested numbers to `name/name`; other values are left out."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            numbers |= _flatten_numbers(value, f"{before}{name}/")
        elif isinstance(value, int | float):
            numbers[f"{before}{name}"] = value
    return numbers
