"""Many runs: one that fails does not stop the others, and none is done twice."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedcir.config import Config
from fedcir.experiments.sweep import Job, longest_first, sweep
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.simulation import open_run

Tiny = Callable[..., Config]

pytestmark = pytest.mark.usefixtures("fast_processes")


def test_a_run_that_fails_does_not_stop_the_others(tiny: Tiny, tmp_path: Path) -> None:
    bad = replace(tiny("fedavg"), data=replace(tiny("fedavg").data, root=str(tmp_path / "nowhere")))
    jobs = [Job(bad, tmp_path / "bad"), Job(tiny("fedavg"), tmp_path / "good")]
    events = [(step.job.out.name, step.event, step.error) for step in sweep(jobs, 1, resume=False)]
    assert ("good", "ended", "") in events
    (failed,) = [message for name, event, message in events if event == "failed"]
    assert "nowhere" in failed
    assert RunFolder(tmp_path / "good").finished


def test_a_run_that_is_done_is_not_started_again_unless_it_was_asked_otherwise(tiny: Tiny, tmp_path: Path) -> None:
    job = Job(tiny("fedavg", "server.rounds=1"), tmp_path / "run")
    assert [step.event for step in sweep([job], 1, resume=True)] == ["begun", "round", "ended"]
    model = (tmp_path / "run" / "model.safetensors").stat()
    assert [step.event for step in sweep([job], 1, resume=True)] == ["ended"]
    assert (tmp_path / "run" / "model.safetensors").stat() == model
    other = replace(job, config=tiny("fedavg", "server.rounds=1", "local.lr=0.5"))
    steps = list(sweep([other], 1, resume=True))
    assert steps[-1].event == "failed"
    assert "was started with local.lr=0.01, not 0.5" in steps[-1].error


def test_how_many_workers_a_run_gets_does_not_make_it_another(tiny: Tiny, tmp_path: Path) -> None:
    list(sweep([Job(tiny("fedavg", "server.rounds=1"), tmp_path / "run")], 1, resume=True))
    again = Job(tiny("fedavg", "server.rounds=1", "run.workers=2"), tmp_path / "run")
    assert [step.event for step in sweep([again], 2, resume=True)] == ["ended"]


def test_a_run_whose_rounds_are_damaged_fails_alone(tiny: Tiny, tmp_path: Path) -> None:
    jobs = [Job(tiny("fedavg", "server.rounds=1"), tmp_path / name) for name in ("bad", "good")]
    list(sweep(jobs[:1], 1, resume=False))
    (tmp_path / "bad" / "summary.json").unlink()
    (tmp_path / "bad" / "rounds.jsonl").write_text('{"round": "one"}\n')
    ended = {step.job.out.name: step for step in sweep(jobs, 2, resume=True)}
    assert {name: step.event for name, step in ended.items()} == {"bad": "failed", "good": "ended"}
    assert "cannot read line 1 of" in ended["bad"].error


def test_data_that_cannot_be_opened_fail_only_the_runs_on_them(tiny: Tiny, tmp_path: Path) -> None:
    good, bad = tiny("fedavg", "server.rounds=1"), tiny("fedavg", "server.rounds=1", f"data.root={tmp_path / 'none'}")
    jobs = [Job(bad if "bad" in name else good, tmp_path / name) for name in ("bad-1", "good-1", "bad-2", "good-2")]
    last = {step.job.out.name: step for step in sweep(jobs, 1, resume=False)}
    assert {name: step.event for name, step in last.items()} == {
        "bad-1": "failed",
        "bad-2": "failed",
        "good-1": "ended",
        "good-2": "ended",
    }
    assert last["bad-1"].error == last["bad-2"].error == f"data.root: there is no folder {tmp_path / 'none'}"


def test_the_longest_run_comes_first_and_of_equal_ones_those_that_pool_data(tiny: Tiny, tmp_path: Path) -> None:
    settings = {
        "short": tiny("fedavg", "server.rounds=1"),
        "long": tiny("fedavg", "server.rounds=2"),
        "other": tiny("fedprox", "server.rounds=2", "run.seed=1"),
        "pooled": tiny("centralized", "server.rounds=2"),
    }
    jobs = [Job(config, tmp_path / name) for name, config in settings.items()]
    assert [job.out.name for job in longest_first(jobs)] == ["pooled", "long", "other", "short"]


def _alone(config: Config, out: Path) -> bytes:
    """The model of the same run, with one worker in this process."""
    with open_run(replace(config, run=replace(config.run, workers=1)), out) as (_, rounds):
        deque(rounds, 0)
    return (out / "model.safetensors").read_bytes()
