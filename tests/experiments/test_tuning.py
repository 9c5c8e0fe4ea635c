"""A search rests on validation images, goes on where it was left, and says what it tried."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcir.algorithms import find_algorithm, list_algorithms, resolve_config
from fedcir.config import Config, ConfigRequest, NumberRange
from fedcir.errors import InputError, RunError
from fedcir.experiments.tuning import (
    Tuning,
    current_settings,
    list_combinations,
    open_journal,
    parse_space,
    prepare_trial,
    suggest_settings,
    tune,
)
from fedcir.runtime.simulation import open_run
from fedcir.types import ACCURACY

optuna = pytest.importorskip("optuna")

TINY: dict[str, Any] = {"dataset": "arrays", "algorithm": "fedprox", "rounds": 2, "local_steps": 2, "batch_size": 8}
SET = {"data.val_fraction": 0.4, "model.width": 2, "run.device": "cpu"}
SPACE = {"local.lr": "0.01..0.3", "algorithm.mu": "0.1,0.5"}
STOP = """
import os, signal
from pathlib import Path
import fedcir

class Stop(fedcir.FedAvg):
    def local_loss(self, *arguments):
        if Path({best!r}).exists():
            os.kill(os.getpid(), signal.SIGINT)
        return super().local_loss(*arguments)
"""


def tuned(root: Path, out: Path, **more: Any) -> Tuning:
    return tune(
        **{**TINY, "data_root": root, "out": out, "set": SET, "space": SPACE, "trials": 3, "workers": 1, **more}
    )


@pytest.fixture(scope="module")
def found(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    return tuned(data_root, tmp_path_factory.mktemp("tune") / "out")


def test_other_test_images_change_nothing(data_root: Path, found: Tuning, tmp_path: Path) -> None:
    for path in data_root.iterdir():
        arrays = dict(np.load(path))
        arrays["x_test"] = np.random.default_rng(7).integers(0, 256, arrays["x_test"].shape).astype(np.uint8)
        np.savez(tmp_path / path.name, **arrays)
    assert tuned(tmp_path, tmp_path / "out").to_rows() == found.to_rows()


def test_the_first_trial_has_the_users_settings_and_all_lie_in_the_space(found: Tuning) -> None:
    assert found.trials[0].settings == {"local.lr": 0.01, "algorithm.mu": 0.1}
    for trial in found.trials:
        assert all(trial.settings[path] in values for path, values in found.space.items())


def test_the_best_settings_repeat_the_trial_to_the_bit(found: Tuning) -> None:
    config = resolve_config(ConfigRequest(file=found.out / "best.toml"))
    with open_run(config) as (session, rounds):
        validation = [record.validation for record in rounds][-1]
    assert found.best is not None
    assert validation is not None
    assert sum(validation.values()) / 3 == found.best.score
    assert session.config.local.lr == found.best.settings["local.lr"]


def test_a_search_leaves_a_picture_and_a_line_a_trial(found: Tuning) -> None:
    assert (found.out / "trials.png").read_bytes().startswith(b"\x89PNG")
    lines = (found.out / "trials.jsonl").read_text().splitlines()
    assert [json.loads(line)["accuracy"] for line in lines] == [trial.accuracy for trial in found.trials]


def test_a_longer_search_goes_on_from_a_shorter_one(data_root: Path, found: Tuning, tmp_path: Path) -> None:
    tuned(data_root, tmp_path / "out", trials=1)
    assert tune(out=tmp_path / "out", resume=True, trials=3).trials == found.trials
    with pytest.raises(InputError, match=r"started with local.steps=2, not 3: choose"):
        tune(out=tmp_path / "out", resume=True, local_steps=3)
    with pytest.raises(InputError, match=r"started with the space local.lr=0.01..0.3, not 0.1..1: choose"):
        tune(out=tmp_path / "out", resume=True, space=["local.lr=0.1..1"])
    with pytest.raises(InputError, match="already holds trials: resume them"):
        tuned(data_root, tmp_path / "out")


@pytest.mark.slow
def test_a_search_that_was_killed_ends_as_if_it_had_not_been(data_root: Path, found: Tuning, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = {"dataset": "arrays", "algorithm": "fedprox", "rounds": 2, "local-steps": 2, "batch-size": 8}
    command = [sys.executable, "-m", "fedcir", "tune", "--data-root", data_root, "--out", out, "--workers", 1]
    command += [part for name, value in {**options, "trials": 3}.items() for part in (f"--{name}", value)]
    command += [part for name, value in SET.items() for part in ("--set", f"{name}={value}")]
    command += [part for name, value in SPACE.items() for part in ("--space", f"{name}={value}")]
    with subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL) as process:
        while not (out / "trials.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    with open(out / "study.journal", "ab") as file:
        file.write(b'{"op_code":4,"work')  # as a kill in the middle of a line leaves it
    assert tune(out=out, resume=True, trials=3).trials == found.trials


def test_a_search_of_an_earlier_version_is_refused_in_a_line(data_root: Path, tmp_path: Path) -> None:
    tuned(data_root, tmp_path / "out", trials=1, rounds=1)
    (tmp_path / "out" / "study.journal").unlink()
    with pytest.raises(InputError, match="holds trials of an earlier version, which cannot go on: start a new"):
        tune(out=tmp_path / "out", resume=True)


def test_ctrl_c_keeps_finished_trials_and_says_how_to_go_on(
    data_root: Path, tmp_path: Path, fedcir: Callable[..., Any]
) -> None:
    """A file's algorithm sends the signal in a step of the second trial: it cannot meet a file as it is opened."""
    out, algorithm = tmp_path / "out", tmp_path / "stop.py"
    algorithm.write_text(STOP.format(best=str(out / "best.toml")))
    settings = ["--dataset", "arrays", "--data-root", data_root, "--rounds", 2, "--local-steps", 2, "--batch-size", 8]
    more = ["--set", "model.width=2", "--trials", 500, "--workers", 1, "--out", out]
    output = fedcir("tune", *settings, "--algorithm", algorithm, *more)
    assert output.code == 130
    assert "finished trials are saved; continue with the same command and --resume" in output.err
    assert len((out / "trials.jsonl").read_text().splitlines()) == 1


def test_every_combination_is_tried_once_and_then_the_search_ends(data_root: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    space = {"local.lr": "0.01,0.1", "algorithm.mu": "0.1"}
    tuning = tuned(data_root, tmp_path / "out", space=space, trials=9, rounds=1, on_note=notes.append)
    assert sorted(trial.settings["local.lr"] for trial in tuning.trials) == [0.01, 0.1]
    assert notes[-1] == "all 2 combinations have been tried"


def test_a_trial_that_diverges_is_recorded_and_the_search_goes_on(data_root: Path, tmp_path: Path) -> None:
    space = {"local.lr": "0.01,1000", "algorithm.mu": "0.1"}
    tuning = tuned(data_root, tmp_path / "out", space=space, trials=2)
    assert [trial.state for trial in tuning.trials] == ["done", "failed"]
    assert "not finite" in tuning.trials[1].why
    assert tuning.best is tuning.trials[0]
    with pytest.raises(RunError, match=r"no trial came to an end: .*not finite"):
        tuned(data_root, tmp_path / "none", space={"local.lr": "1000", "algorithm.mu": "0.1"}, trials=1)


@pytest.fixture
def tuning(data_root: Path, tmp_path: Path) -> Tuning:
    """An empty search of eight rounds."""
    config = _config(data_root)
    config = replace(config, server=replace(config.server, rounds=8))
    return Tuning(tmp_path, config, parse_space(config, SPACE), open_journal(tmp_path, ACCURACY))


def add(tuning: Tuning, number: int, accuracy: list[float], mu: float = 0.1) -> None:
    """Add a finished trial."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning.study, "sampler", optuna.samplers.RandomSampler(seed=0))
        tuning.study.enqueue_trial({"local.lr": 0.02 * number, "algorithm.mu": mu})
        trial = tuning.study.ask()
        suggest_settings(trial, tuning.space)
        for round, value in enumerate(accuracy, start=1):
            trial.report(value, round)
        tuning.study.tell(trial, accuracy[-1])


def propose(tuning: Tuning) -> Any:
    """A trial that nobody finishes, and its settings."""
    assert prepare_trial(tuning.study, tuning.config, tuning.space)
    trial = tuning.study.ask()
    return trial, suggest_settings(trial, tuning.space)


def _config(root: Path, algorithm: str = "fedprox") -> Config:
    return resolve_config(ConfigRequest(options={"dataset": "arrays", "data_root": root, "algorithm": algorithm}))


def test_a_trial_below_the_median_is_pruned_after_a_quarter_of_the_rounds(tuning: Tuning) -> None:
    def pruned(accuracy: float) -> list[bool]:
        trial, _ = propose(tuning)
        answers = []
        for round in (1, 2, 3):
            trial.report(accuracy, round)
            answers.append(trial.should_prune())
        return answers

    for number in range(1, 5):
        add(tuning, number, [0.5, 0.6, 0.7, 0.8])
    assert pruned(0.0) == [False, False, False]  # too few trials
    add(tuning, 5, [0.5, 0.6, 0.7, 0.8])
    assert pruned(0.55) == [False, True, True]


def test_proposals_depend_on_the_finished_trials_and_the_seed_alone(tuning: Tuning) -> None:
    for number in range(1, 8):
        add(tuning, number, [0.1 * number])
    config = replace(tuning.config, run=replace(tuning.config.run, seed=1))

    def propose_anew(config: Config) -> Any:  # as a process that was killed leaves its trial
        return propose(replace(tuning, config=config, study=open_journal(tuning.out, ACCURACY)))[1]

    assert propose_anew(tuning.config) == propose_anew(tuning.config) != propose_anew(config)


def test_importances_are_those_of_the_settings_that_accuracy_follows(tuning: Tuning) -> None:
    for number in range(1, 8):
        add(tuning, number, [0.1 * number], mu=(0.1, 0.5)[number % 2])
    assert replace(tuning).importances == {}  # too few trials
    add(tuning, 8, [0.8])
    shares = replace(tuning).importances
    assert list(shares) == ["local.lr", "algorithm.mu"]
    assert shares["local.lr"] > 0.8
    tuning.draw()
    assert (tuning.out / "importances.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", list_algorithms())
def test_every_method_declares_ranges_that_it_can_take(name: str, data_root: Path) -> None:
    config = _config(data_root, name)
    space = parse_space(config)
    assert space["local.lr"] == NumberRange(0.001, 0.1)
    assert current_settings(config, space)["local.lr"] == 0.01
    assert find_algorithm(name).ranges.keys() >= {path.partition(".")[2] for path in space} - {"lr"}


def test_a_span_of_a_whole_setting_holds_whole_numbers(data_root: Path) -> None:
    assert parse_space(_config(data_root), ["local.steps=2..40"])["local.steps"] == NumberRange(2, 40, whole=True)


def test_combinations_come_in_an_order_of_the_seed(data_root: Path) -> None:
    space = parse_space(_config(data_root), {"local.lr": "0.1,0.2", "algorithm.mu": "0,1"})
    orders = [list_combinations(space, seed) for seed in range(9)]
    first = orders[0]
    assert first is not None
    assert sorted(map(str, first)) == sorted(map(str, orders[1] or []))
    assert any(order != first for order in orders)
    assert list_combinations(parse_space(_config(data_root)), 0) is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"trials": 0}, "trials must be at least 1, got 0"),
    ({"space": ["local.lr"]}, "space takes section.field=values"),
    ({"space": "local.lr=1,2"}, "space takes a dict or a list"),
    ({"space": ["local.lrr=1,2"]}, "no field 'lrr'; did you mean 'lr'?"),
    ({"space": ["algorithm.mu=-1,2"]}, "algorithm.mu must be at least 0, got -1"),
    ({"space": ["local.schedule=1..2"]}, "local.schedule cannot be"),
    ({"space": ["local.steps=1.5..3"]}, "local.steps takes whole numbers, got 1.5..3"),
    ({"space": ["locla.lr=1..3"]}, "no section [locla]; did you mean 'local'?"),
    ({"space": ["data.val_fraction=0.1,0.2"]}, "data.val_fraction cannot be tuned"),
    ({"space": ["algorithm.name=fedavg,fedcir"]}, "algorithm.name cannot be tuned"),
    ({"resume": True}, "holds no trials to continue"),
    ({"active": 9}, "server.active is 9, but there are 3 clients"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    data_root: Path, tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as refused:
        tuned(data_root, tmp_path / "out", **given)
    assert message in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_other_files_is_refused(data_root: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match="holds other files and no trials"):
        tuned(data_root, tmp_path)


def test_the_command_prints_trials_and_what_to_do_next(
    data_root: Path, tmp_path: Path, fedcir: Callable[..., Any]
) -> None:
    out = tmp_path / "out"
    options = ["--dataset", "arrays", "--data-root", data_root, "--rounds", 1, "--local-steps", 2, "--batch-size", 8]
    options += ["--set", "model.width=2", "--workers", 1, "--algorithm", "fedavg", "--trials", 2, "--out", out]
    output = fedcir("tune", *options)
    assert output.code == 0
    assert "accuracy on validation images (%), fedavg on arrays" in output.out
    assert f"Next: `fedcir run {out}/best.toml`." in output.out
    again = fedcir("tune", "--resume", "--out", out, "--json", "--quiet")
    assert [row["trial"] for row in json.loads(again.out)["trials"]] == [1, 2]
    refused = fedcir("tune", *options)
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
