"""TensorBoard, Weights & Biases and MLflow, each behind the same three calls."""

import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

Settings = dict[str, bool | int | float | str]
Values = Mapping[str, float]


class Tracker(Protocol):
    """Made from the folder for its files, the run's name and settings, and the id that it had before, if any."""

    id: str
    place: str
    """Where a person finds it."""

    def log(self, round: int, values: Values) -> None: ...

    def finish(self, round: int, values: Values) -> None:
        """The final numbers."""
        ...

    def close(self, done: bool) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, name: str, settings: Settings, id: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self.id, self.place = name, str(folder / "tensorboard")
        make: Any = SummaryWriter  # torch gives it no types
        self._writer = make(self.place)
        shown = {"accuracy_mean": None, "accuracy_worst": None}  # columns of its page of hyper-parameters
        begun, started, self._ended = hparams(settings, shown)  # type: ignore[no-untyped-call]
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
    def __init__(self, folder: Path, name: str, settings: Settings, id: str | None) -> None:
        import wandb

        own: dict[str, Any] = {
            "project": "fedcir",
            "run_name": name,
            "silent": True,
            "console": "off",
            "x_disable_meta": True,  # it would hold the command line, and with it paths
            "finish_timeout": 120.0,  # or it waits without end for a server that is away
            "finish_timeout_raises": True,
        }
        given = {"run_name" if key == "WANDB_NAME" else key.removeprefix("WANDB_").lower() for key in os.environ}
        self._run = wandb.init(
            id=id,
            resume="allow",
            dir=folder,
            config=settings,
            reinit="create_new",
            settings={key: value for key, value in own.items() if key not in given},
        )
        self.id = self._run.id
        self.place = str(folder / "wandb") if self._run.offline else str(self._run.url)

    def log(self, round: int, values: Values) -> None:
        self._run.log(dict(values), step=round)

    def finish(self, round: int, values: Values) -> None:
        self._run.summary.update(dict(values))

    def close(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)


class MLflow:
    def __init__(self, folder: Path, name: str, settings: Settings, id: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow.store.db").setLevel(logging.CRITICAL)  # it tells of tables, and what it raises too
        local = (folder / "mlflow.db").resolve().as_posix().replace("%", "%25").replace("?", "%3F")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{local}"
        self.place = without_password(uri)
        self._client = MlflowClient(uri)
        if id is None:
            self.id = self._client.create_run(self._experiment(), run_name=name).info.run_id
            params = [Param(_plain(key), str(value)) for key, value in settings.items()]
            self._client.log_batch(self.id, params=params)  # once: MLflow lets none be changed
        else:
            self.id = id
            self._client.update_run(id, status="RUNNING")

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        if chosen := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return chosen
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedcir")
        if (found := self._client.get_experiment_by_name(name)) is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:
            if (found := self._client.get_experiment_by_name(name)) is None:
                raise
            return str(found.experiment_id)  # another run made it just now

    def log(self, round: int, values: Values) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self.id, [Metric(_plain(key), value, now, round) for key, value in values.items()])

    finish = log

    def close(self, done: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if done else "KILLED")


def without_password(text: str) -> str:
    """Addresses as they may be shown: http://me:secret@host is http://host."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def _plain(name: str) -> str:
    """A name as MLflow takes it: a domain may be called anything."""
    return re.sub(r"[^\w./ -]", "_", name)
