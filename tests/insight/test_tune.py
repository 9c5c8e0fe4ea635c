"""A search rests on validation images, goes on where it was left, and says what it tried."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcir.algorithms import algorithm_class, asked_config, names
from fedcir.config import Asked, Config, Span
from fedcir.engine.simulate import open_run
from fedcir.insight.attempts import Attempt
from fedcir.insight.search import importances, propose
from fedcir.insight.space import combinations, own_settings, space_of
from fedcir.insight.tune import tune
from fedcir.insight.tuned import Tuning
from fedcir.types import InputError, RunError

pytest.importorskip("optuna")

TINY: dict[str, Any] = {"dataset": "arrays", "algorithm": "fedprox", "rounds": 2, "local_steps": 2, "batch_size": 8}
SET = {"data.val_fraction": 0.4, "model.width": 2, "run.device": "cpu"}
SPACE = {"local.lr": "0.01..0.3", "algorithm.mu": "0.1,0.5"}


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
        assert all(trial.settings[place] in values for place, values in found.space.items())


def test_the_best_settings_repeat_the_trial_to_the_bit(found: Tuning) -> None:
    config = asked_config(Asked(file=found.out / "best.toml"))
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
    with open(out / "trials.jsonl", "ab") as file:
        file.write(b'{"number": 2, "sett')  # as a kill in the middle of a line leaves it
    assert tune(out=out, resume=True, trials=3).trials == found.trials


def test_ctrl_c_keeps_finished_trials_and_says_how_to_go_on(
    data_root: Path, tmp_path: Path, fedcir: Callable[..., Any]
) -> None:
    out = tmp_path / "out"

    def interrupt() -> None:
        while not (out / "best.toml").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    settings = ["--dataset", "arrays", "--data-root", data_root, "--rounds", 2, "--local-steps", 2, "--batch-size", 8]
    said = fedcir("tune", *settings, "--set", "model.width=2", "--trials", 500, "--workers", 1, "--out", out)
    assert said.code == 130
    assert "finished trials are saved; continue with the same command and --resume" in said.err
    assert len((out / "trials.jsonl").read_text().splitlines()) >= 1


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


def attempt(number: int, lr: float, accuracy: list[float], mu: float = 0.1) -> Attempt:
    rounds = list(range(1, len(accuracy) + 1))
    return Attempt(number, {"local.lr": lr, "algorithm.mu": mu}, "done", rounds, accuracy, min(accuracy))


@pytest.fixture
def space(data_root: Path) -> Any:
    return space_of(_config(data_root), SPACE)


def _config(root: Path, algorithm: str = "fedprox") -> Config:
    return asked_config(Asked(options={"dataset": "arrays", "data_root": root, "algorithm": algorithm}))


def test_a_trial_below_the_median_is_hopeless_after_a_quarter_of_the_rounds(space: Any) -> None:
    done = [attempt(number, 0.02 * number, [0.5, 0.6, 0.7, 0.8]) for number in range(1, 6)]
    proposal = propose(done, space, {}, seed=0, rounds=8)
    assert proposal is not None
    assert [proposal.hopeless(round, 0.55) for round in (1, 2, 3)] == [False, True, True]
    early = propose(done[:4], space, {}, seed=0, rounds=8)
    assert early is not None
    assert not early.hopeless(3, 0.0)


def test_proposals_depend_on_the_record_and_the_seed_alone(space: Any) -> None:
    done = [attempt(number, 0.02 * number, [0.1 * number]) for number in range(1, 8)]
    proposals = [propose(done, space, {}, seed, rounds=1) for seed in (0, 0, 1)]
    first, again, other = (each.settings for each in proposals if each is not None)
    assert first == again != other


def test_what_mattered_is_what_accuracy_follows(space: Any) -> None:
    done = [attempt(n, 0.03 * n, [0.1 * n], mu=(0.1, 0.5)[n % 2]) for n in range(1, 9)]
    shares = importances(done, space)
    assert list(shares) == ["local.lr", "algorithm.mu"]
    assert shares["local.lr"] > 0.8
    assert importances(done[:7], space) == {}
    assert importances([replace(each, accuracy=[0.5]) for each in done], space) == {}


@pytest.mark.parametrize("name", names())
def test_every_method_declares_ranges_that_it_can_take(name: str, data_root: Path) -> None:
    config = _config(data_root, name)
    space = space_of(config)
    assert space["local.lr"] == Span(0.001, 0.1)
    assert own_settings(config, space)["local.lr"] == 0.01
    assert algorithm_class(name).ranges.keys() >= {place.partition(".")[2] for place in space} - {"lr"}


def test_a_span_of_a_whole_setting_holds_whole_numbers(data_root: Path) -> None:
    assert space_of(_config(data_root), ["local.steps=2..40"])["local.steps"] == Span(2, 40, whole=True)


def test_combinations_come_in_an_order_of_the_seed(data_root: Path) -> None:
    space = space_of(_config(data_root), {"local.lr": "0.1,0.2", "algorithm.mu": "0,1"})
    orders = [combinations(space, seed) for seed in range(9)]
    first = orders[0]
    assert first is not None
    assert sorted(map(str, first)) == sorted(map(str, orders[1] or []))
    assert any(order != first for order in orders)
    assert combinations(space_of(_config(data_root)), 0) is None


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


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    data_root: Path, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as refused:
        tuned(data_root, tmp_path / "out", **given)
    assert said in str(refused.value)
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
    said = fedcir("tune", *options)
    assert said.code == 0
    assert "accuracy on validation images (%), fedavg on arrays" in said.out
    assert f"Next: `fedcir run {out}/best.toml`." in said.out
    again = fedcir("tune", "--resume", "--out", out, "--json", "--quiet")
    assert [row["trial"] for row in json.loads(again.out)["trials"]] == [1, 2]
    refused = fedcir("tune", *options)
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
