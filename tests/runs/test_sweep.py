"""Many runs: one that fails does not stop the others, and none is done twice."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedcir.config import Config
from fedcir.engine.folder import RunFolder
from fedcir.runs.sweep import Job, sweep

Tiny = Callable[..., Config]


def test_a_run_that_fails_does_not_stop_the_others(tiny: Tiny, tmp_path: Path) -> None:
    bad = replace(tiny("fedavg"), data=replace(tiny("fedavg").data, root=str(tmp_path / "nowhere")))
    jobs = [Job(bad, tmp_path / "bad"), Job(tiny("fedavg"), tmp_path / "good")]
    events = [(step.job.out.name, step.event, step.said) for step in sweep(jobs, 1, resume=False)]
    assert ("good", "ended", "") in events
    (failed,) = [said for name, event, said in events if event == "failed"]
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
    assert "was started with local.lr=0.01, not 0.5" in steps[-1].said


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
    assert "cannot read line 1 of" in ended["bad"].said
