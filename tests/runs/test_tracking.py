"""What TensorBoard, Weights & Biases and MLflow are told, read back by their own readers."""

import json
import re
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fedcir.config import Config, config_from_tables
from fedcir.errors import InputError
from fedcir.runs.tracking import TRACKERS, flatten_record, open_tracker
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.simulation import open_run
from kinds import mark_others_slow

Command = Callable[..., Any]
Numbers = dict[str, dict[int, list[float]]]
"""By name and round, all that was told."""

# mlflow's tables use what SQLAlchemy 2.1 no longer likes
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """No server, whatever the environment of the tests says."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "WANDB_NAME"):
            patch.delenv(name, raising=False)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()  # its process: other tests count those that this one has started


class Told(NamedTuple):
    numbers: Numbers
    settings: dict[str, str]
    final: dict[str, float]


def read_tensorboard(folder: Path) -> Told:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    numbers: Numbers = defaultdict(lambda: defaultdict(list))
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            numbers[tag][event.step].append(event.value)
    final = {tag: values.popitem()[1][0] for tag, values in numbers.items() if re.match("final/|best/|cost/", tag)}
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    given = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    settings = {name: value.string_value or f"{value.number_value:g}" for name, value in given.items()}
    return Told({tag: values for tag, values in numbers.items() if tag not in final}, settings, final)


def read_wandb(folder: Path) -> Told:
    from wandb.proto.wandb_internal_pb2 import Record

    numbers: Numbers = defaultdict(lambda: defaultdict(list))
    settings, final = {}, {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for content in wandb_records(path.read_bytes()):
            record = Record.FromString(content)
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    numbers[name][record.history.step.num].append(json.loads(item.value_json))
            for item in record.run.config.update:
                settings[item.key or ".".join(item.nested_key)] = str(json.loads(item.value_json))
            for item in record.summary.update:
                name = item.key or "/".join(item.nested_key)
                if re.match("final/|best/|cost/", name):
                    final[name] = json.loads(item.value_json)
    return Told(numbers, settings, final)


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after seven bytes of its own."""
    assert data.startswith(b":W&B")
    folder, parts = 7, b""
    while folder + 7 <= len(data):
        if 2**15 - folder % 2**15 < 7:  # the rest of a block holds no header
            folder += 2**15 - folder % 2**15
        _, length, kind = struct.unpack("<IHB", data[folder : folder + 7])
        parts += data[folder + 7 : folder + 7 + length]
        folder += 7 + length
        if kind in {1, 4}:  # whole, or the last part
            yield parts
            parts = b""


def read_mlflow(folder: Path) -> Told:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fedcir")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    numbers: Numbers = defaultdict(lambda: defaultdict(list))
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            numbers[name][metric.step].append(metric.value)
    final = {name: values.popitem()[1][0] for name, values in numbers.items() if re.match("final/|best/|cost/", name)}
    return Told({name: values for name, values in numbers.items() if name not in final}, run.data.params, final)


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


def train(config: Config, out: Path, name: str, resume: bool = False, until: int | None = None) -> list[str]:
    """Train with a tracker, to the end or until so many rounds are done; gives what it noted."""
    notes: list[str] = []
    with open_run(config, out, resume) as (session, rounds), open_tracker(name, out, notes.append) as track:
        track.update()
        while session.state.round != until and next(rounds, None) is not None:
            track.update()
    return notes


@pytest.fixture(scope="module", params=mark_others_slow(sorted(TRACKERS), ["tensorboard"]))  # imports of others last
def resumed(
    request: pytest.FixtureRequest, tiny: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """Four rounds, of which the second was done and told, lost with its checkpoint, and done again."""
    config = tiny("fedcir", "server.rounds=4", "server.eval_every=2", "server.checkpoint_every=1", "run.workers=1")
    out = tmp_path_factory.mktemp("runs") / "a run, 100 %"
    assert train(config, out, request.param, until=2) == []
    (out / "checkpoint" / "round-000002.safetensors").unlink()
    for folder in out.glob("track/wandb/offline-run-*"):  # W&B names it by the second, so the next one may be its own
        folder.rename(folder.with_name(f"offline-run-0-{folder.name}"))
    assert train(config, out, request.param, resume=True) == []
    return request.param, out


def test_the_mean_over_domains_that_nobody_trains_on_is_tracked(tiny: Callable[..., Config]) -> None:
    with open_run(tiny("fedavg", "server.rounds=1", "partition.hold_out=pen")) as (_, rounds):
        (record,) = rounds
    values = flatten_record(record)
    assert values["accuracy_unseen"] == values["accuracy/pen"] == record.accuracy_unseen
    assert "unseen" not in values


def test_a_resumed_run_is_told_once_and_as_it_is_on_record(resumed: tuple[str, Path]) -> None:
    name, out = resumed
    numbers = READERS[name](out / "track").numbers
    expected: dict[str, dict[int, float]] = defaultdict(dict)
    for line in (out / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        values = {f"loss/{term}": value for term, value in record["losses"].items()}
        for kind in ("accuracy", "risk"):
            values |= {f"{kind}/{domain}": value for domain, value in (record.get(kind) or {}).items()}
        for kind in ("accuracy_mean", "accuracy_weighted", "accuracy_worst", "bytes_down", "bytes_up", "flops"):
            if record[kind] is not None:
                values[kind] = record[kind]
        values |= {"seconds": record["seconds"]["total"], "dropped": 0}
        for item, value in values.items():
            expected[item][record["round"]] = value
    expected["seconds"][2] = numbers["seconds"][2][0]  # it took another time when it was done again
    assert expected.keys() >= {"loss/reg", "loss/total", "accuracy/ink", "accuracy_worst", "risk/wax", "flops"}
    assert list(expected["accuracy_mean"]) == [2, 4]
    exact = np.float32 if name == "tensorboard" else float  # its scalars have single precision
    assert numbers == {
        item: {step: [exact(value)] for step, value in steps.items()} for item, steps in expected.items()
    }


def test_the_settings_are_told_without_paths(resumed: tuple[str, Path], data_root: Path) -> None:
    name, out = resumed
    settings = READERS[name](out / "track").settings
    assert settings["algorithm.name"] == "fedcir"
    assert settings["local.steps"] == "2"
    assert settings["server.eval_every"] == "2"
    assert "data.root" not in settings
    assert not [
        path for path in out.glob("track/**/*") if path.is_file() and str(data_root).encode() in path.read_bytes()
    ]


def test_the_final_numbers_are_those_of_the_summary(resumed: tuple[str, Path]) -> None:
    name, out = resumed
    final, summary = READERS[name](out / "track").final, json.loads((out / "summary.json").read_text())
    for part in ("final", "best"):
        assert final[f"{part}/round"] == summary[part]["round"]
        assert final[f"{part}/accuracy_mean"] == pytest.approx(summary[part]["accuracy_mean"])
        assert final[f"{part}/accuracy/pen"] == pytest.approx(summary[part]["accuracy"]["pen"])
    assert final["cost/bytes_up"] == pytest.approx(summary["cost"]["bytes_up"])


def test_its_files_lie_in_the_run_folder(resumed: tuple[str, Path]) -> None:
    name, out = resumed
    own = "mlflow.db" if name == "mlflow" else name
    assert sorted(path.name for path in (out / "track").iterdir()) == sorted([own, f"{name}.json"])
    message = json.loads((out / "track" / f"{name}.json").read_text())
    assert (message["round"], message["final"]) == (4, 4)
    if name == "wandb":
        ids = {path.stem.removeprefix("run-") for path in out.glob("track/wandb/offline-run-*/*.wandb")}
        assert ids == {message["id"]}


def test_a_run_that_was_told_whole_is_left_alone(resumed: tuple[str, Path]) -> None:
    name, out = resumed

    def list_times() -> dict[Path, int]:
        """Times of all files but logs, which the process of wandb may still write when its run has ended."""
        return {path: path.stat().st_mtime_ns for path in out.glob("track/**/*") if path.suffix != ".log"}

    before = list_times()
    assert len(before) > 0
    assert train(RunFolder(out).config(), out, name, resume=True) == []
    assert list_times() == before


def test_a_finished_run_is_told_later_and_a_longer_one_goes_on(
    fedcir: Command, options: list[str], tmp_path: Path
) -> None:
    command = ["run", *options, "--algorithm", "fedavg", "--workers", "1", "--out", tmp_path / "run"]
    assert fedcir(*command).code == 0
    assert not (tmp_path / "run" / "track").exists()
    output = fedcir(*command, "--resume", "--track", "tensorboard")
    assert output.code == 0
    assert f"note: tracked in {tmp_path / 'run' / 'track' / 'tensorboard'}\n" in output.err
    assert list(read_tensorboard(tmp_path / "run" / "track").numbers["flops"]) == [1, 2, 3]
    assert fedcir(*command, "--resume", "--track", "tensorboard", "--rounds", "5", "--quiet") == (0, "", "")
    message = read_tensorboard(tmp_path / "run" / "track")
    assert {step: len(values) for step, values in message.numbers["flops"].items()} == dict.fromkeys(range(1, 6), 1)
    assert message.final["final/round"] == 5


def test_compare_tells_of_each_of_its_runs_and_notes_what_could_not_be_told(
    fedcir: Command, options: list[str], tmp_path: Path
) -> None:
    command = [*options, "--workers", "1", "--quiet"]
    assert fedcir("run", *command, "--algorithm", "fedavg", "--out", tmp_path / "fedavg-0").code == 0
    (tmp_path / "fedavg-0" / "track").mkdir()
    (tmp_path / "fedavg-0" / "track" / "tensorboard").write_text("in the way")
    more = ["--algorithms", "fedavg,fedprox", "--resume", "--track", "tensorboard"]
    output = fedcir("compare", *command, *more, "--out", tmp_path)
    assert (output.code, output.out) == (0, "")
    assert re.fullmatch(
        r"note: fedavg-0: tensorboard failed, and the run goes on without it: .*File exists.*\n", output.err
    )
    assert list(read_tensorboard(tmp_path / "fedprox-0" / "track").numbers["bytes_up"]) == [1, 2, 3]


COMMANDS = [("run",), ("compare",), ("deploy", "local")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("name", "hint"),
    [("wandbb", "'wandbb'; did you mean 'wandb'?"), ("neptune", "'neptune'; choose from mlflow, tensorboard, wandb")],
)
def test_an_unknown_tracker_is_refused_before_anything_starts(
    fedcir: Command, options: list[str], tmp_path: Path, command: tuple[str, ...], name: str, hint: str
) -> None:
    output = fedcir(*command, *options, "--out", tmp_path / "run", "--track", name)
    assert output == (2, "", f"fedcir: track cannot be {hint}\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("name", "package"),
    [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow"), ("mlflow", "sqlalchemy")],
)
def test_a_missing_package_is_named_with_its_extra_before_anything_starts(
    fedcir: Command,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    name: str,
    package: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    output = fedcir(*command, *options, "--out", tmp_path / "run", "--track", name)
    assert output == (2, "", f"fedcir: track {name} needs {package}: pip install 'fedcir[{name}]'\n")
    assert not (tmp_path / "run").exists()


def test_a_folder_of_the_packages_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorboard").mkdir()
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(InputError, match="needs tensorboard"), open_tracker("tensorboard", tmp_path, print):
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard writes in a thread
def test_a_tracker_that_fails_midway_is_noted_once_and_told_the_rest_by_a_resume(
    tiny: Callable[..., Config], tmp_path: Path
) -> None:
    """TensorBoard's folder is taken away after round 1, and put back once the run is finished."""
    config, out = tiny("fedavg", "run.workers=1"), tmp_path / "run"
    folder, away = out / "track" / "tensorboard", tmp_path / "away"
    notes: list[str] = []
    with open_run(config, out) as (_, rounds), open_tracker("tensorboard", out, notes.append) as track:
        for record in rounds:
            track.update()
            if record.round == 1:
                folder.rename(away)
    assert RunFolder(out).finished
    (note,) = notes
    assert re.fullmatch("tensorboard failed, and the run goes on without it: .*No such file or directory.*", note)
    assert json.loads((out / "track" / "tensorboard.json").read_text())["round"] == 1
    away.rename(folder)
    assert train(config, out, "tensorboard", resume=True) == []
    message = read_tensorboard(out / "track")
    assert {step: len(values) for step, values in message.numbers["flops"].items()} == {1: 1, 2: 1, 3: 1}
    assert message.final["final/round"] == 3


def test_a_server_that_is_away_does_not_keep_a_run_from_training(
    fedcir: Command, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somebody:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    command = ["run", *options, "--algorithm", "fedavg", "--workers", "1", "--quiet", "--track", "mlflow"]
    output = fedcir(*command, "--out", tmp_path / "run")
    assert output.code == 0
    assert re.fullmatch(r"note: mlflow failed, and the run goes on without it: .*http://127\.0\.0\.1.*\n", output.err)
    assert "secret" not in output.err
    assert RunFolder(tmp_path / "run").finished


def test_a_run_that_was_refused_is_not_told_of(fedcir: Command, options: list[str], tmp_path: Path) -> None:
    assert fedcir("run", *options, "--algorithm", "fedavg", "--out", tmp_path / "run", "--quiet").code == 0
    for command in (["run"], ["deploy", "local"]):
        output = fedcir(*command, *options, "--out", tmp_path / "run", "--track", "tensorboard")
        assert output.code == 2
        assert not (tmp_path / "run" / "track").exists()


def test_tensorboard_lists_the_metric_of_the_task_beside_the_settings(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    (tmp_path / "sites").mkdir()
    for site in ("north", "south"):
        rows = [f"{age},{2 * age + 0.5}" for age in range(20)]
        (tmp_path / "sites" / f"{site}.csv").write_text("\n".join(["age,score", *rows]) + "\n")
    tables = {"data": {"name": "csv", "root": str(tmp_path / "sites"), "target": "score"}, "server": {"rounds": 1}}
    run = {"model": {"name": "mlp"}, "algorithm": {"name": "fedavg"}, "run": {"device": "cpu", "workers": 1}}
    assert train(config_from_tables({**tables, **run}), tmp_path / "run", "tensorboard") == []
    events = EventAccumulator(str(tmp_path / "run" / "track" / "tensorboard"))
    events.Reload()
    content = events.SummaryMetadata("_hparams_/experiment").plugin_data.content
    listed = plugin_data_pb2.HParamsPluginData.FromString(content).experiment.metric_infos
    assert [info.name.tag for info in listed] == ["rmse_mean", "rmse_worst"]
    assert events.Scalars("rmse_mean")[0].value > 0
