"""However a run was stopped, its continuation ends in the same bits."""

import json
import os
import shutil
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
import torch
from seven import snapshot

from fedcir.analysis.diagnosis import diagnose_run
from fedcir.config import Config
from fedcir.errors import InputError
from fedcir.reporting.evaluation_report import evaluate
from fedcir.runs.reader import load_run
from fedcir.runtime.run_folder import RunFolder
from kinds import KINDS, mark_others_slow
from warm_process import WarmProcess

Tiny = Callable[..., Config]
Train = Callable[..., Path]
References = Callable[..., Path]

HURRY = 300
"""Seconds that a process may take before a test gives up on it."""


def model(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def rounds(run: Path) -> list[dict[str, Any]]:
    """The records without their times."""
    records = [json.loads(line) for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


@pytest.fixture(scope="module")
def reference(tiny: Tiny, train: Train, tmp_path_factory: pytest.TempPathFactory) -> References:
    """The uninterrupted run of a config, trained once."""
    folder = tmp_path_factory.mktemp("references")

    def run(*config: str) -> Path:
        out = folder / " ".join(config).replace("/", "-")
        return out if out.exists() else train(tiny(*config), out)

    return run


PARTIAL = ("server.active=2", "server.rounds=4", "partition.scheme=dirichlet", "partition.clients=5")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("server.rounds=4",), marks=pytest.mark.slow, id="all active"),
        pytest.param(PARTIAL, id="some active"),
    ],
)
@pytest.mark.parametrize("algorithm", mark_others_slow(KINDS, ["fedcir", "scaffold"]))
def test_a_run_stopped_after_every_round_ends_as_if_it_had_not_been(
    tiny: Tiny, train: Train, reference: References, tmp_path: Path, algorithm: str, settings: tuple[str, ...]
) -> None:
    whole, out = reference(algorithm, *settings), tmp_path / "run"
    for stop in (0, 1, 2, 3, 4, None):
        assert not RunFolder(out).finished
        train(tiny(algorithm, *settings), out, resume=True, until=stop)
    assert model(out) == model(whole)
    assert rounds(out) == rounds(whole)


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_stopped_once_after_any_round_ends_as_if_it_had_not_been(
    tiny: Tiny, train: Train, reference: References, tmp_path: Path, stop: int
) -> None:
    out = train(tiny("fedcir", *PARTIAL), tmp_path / "run", until=stop)
    train(tiny("fedcir", *PARTIAL), out, resume=True)
    whole = reference("fedcir", *PARTIAL)
    assert model(out) == model(whole)
    assert rounds(out) == rounds(whole)


def start(
    options: list[str], out: Path, *more: str, env: dict[str, str] | None = None, python: str = sys.executable
) -> subprocess.Popen[str]:
    command = [python, "-m", "fedcir", "run", *options, "--algorithm", "fedcir", *more]
    command += ["--set", "algorithm.hidden=8"]
    command += ["--out", str(out), *(["--resume"] if RunFolder(out).exists else [])]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)


def wait_for_rounds(process: subprocess.Popen[str], out: Path, count: int) -> None:
    deadline = time.monotonic() + HURRY
    while not (out / "rounds.jsonl").exists() or (out / "rounds.jsonl").read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
def test_a_run_killed_at_any_moment_ends_in_the_same_bytes(
    tiny: Tiny, train: Train, options: list[str], tmp_path: Path, signalling: Callable[..., dict[str, str]]
) -> None:
    """One run is killed three times. Checkpoints are three rounds apart, so that rounds are done again."""
    settings = ("server.rounds=20", "server.checkpoint_every=3")
    out = tmp_path / "killed"
    more = [*(part for setting in settings for part in ("--set", setting)), "--quiet"]
    for file, done in (("round-000003.safetensors", 2), ("round-000012.safetensors", 11), ("model.safetensors", 20)):
        dies = signalling("fedcir run", "os.rename", file, signal.SIGKILL)  # written, but not yet in its place
        process = start(options, out, *more, env=dies)
        process.communicate(timeout=HURRY)
        assert process.returncode == -signal.SIGKILL
        assert (out / "rounds.jsonl").read_bytes().count(b"\n") == done
        assert not RunFolder(out).finished
    train(tiny("fedcir", *settings), out, resume=True)
    whole = train(tiny("fedcir", *settings), tmp_path / "whole")
    assert model(out) == model(whole)
    assert rounds(out) == rounds(whole)


def test_ctrl_c_and_sigterm_save_the_last_round_and_say_how_to_go_on(
    tiny: Tiny, train: Train, options: list[str], tmp_path: Path, warm_process: WarmProcess
) -> None:
    """The second signal meets the continuation of the run that the first one stopped."""
    settings, out = ("server.rounds=2000", "server.checkpoint_every=500"), tmp_path / "run"
    for number, count in ((signal.SIGINT, 2), (signal.SIGTERM, 6)):
        more = [*(part for setting in settings for part in ("--set", setting)), "--quiet"]
        process = start(options, out, *more, python=str(warm_process.python))
        wait_for_rounds(process, out, count)
        process.send_signal(number)
        _, message = process.communicate(timeout=HURRY)
        done = len(RunFolder(out).records())
        assert done >= count
        assert process.returncode == 130
        assert message == f"fedcir: round {done} is saved; continue with: fedcir run --resume --out {out}\n"
        state = RunFolder(out).load_checkpoint()
        assert state is not None
        assert state.round == done
    whole = train(tiny("fedcir", *settings), tmp_path / "whole", until=done)
    assert rounds(out) == rounds(whole)
    assert [path.read_bytes() for path in sorted((out / "checkpoint").iterdir())][-1] == (
        whole / "checkpoint" / f"round-{done:06d}.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("there", ["no folder", "an empty folder"])
def test_resume_with_nothing_there_starts(
    tiny: Tiny, train: Train, reference: References, tmp_path: Path, there: str
) -> None:
    out = tmp_path / "run"
    if there == "an empty folder":
        out.mkdir()
    assert model(train(tiny("fedavg"), out, resume=True)) == model(reference("fedavg"))


def test_resume_with_nothing_saved_yet_starts(tiny: Tiny, train: Train, reference: References, tmp_path: Path) -> None:
    out = train(tiny("fedavg"), tmp_path / "run", until=0)
    assert not (out / "rounds.jsonl").exists()
    assert model(train(tiny("fedavg"), out, resume=True)) == model(reference("fedavg"))


def test_resume_of_a_finished_run_says_so_and_changes_nothing(
    fedcir: Callable[..., Any], options: list[str], tmp_path: Path
) -> None:
    command = ["run", *options, "--algorithm", "fedavg", "--out", tmp_path / "run"]
    assert fedcir(*command).code == 0
    before = snapshot(tmp_path / "run")
    again = fedcir(*command, "--resume")
    assert again.code == 0
    assert again.err == f"{tmp_path / 'run'} is already finished, after round 3\n"
    assert "last round, 3" in again.out
    assert snapshot(tmp_path / "run") == before


def test_a_folder_with_a_run_is_refused_without_resume(
    fedcir: Callable[..., Any], options: list[str], tmp_path: Path, reference: References
) -> None:
    out = tmp_path / "run"
    shutil.copytree(reference("fedavg"), out)
    before = snapshot(out)
    refused = fedcir("run", *options, "--algorithm", "fedavg", "--out", out)
    assert refused.code == 2
    assert refused.err == f"fedcir: {out} already holds a run: resume it, or choose another folder\n"
    assert snapshot(out) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("local.lr=0.02", "local.lr=0.01, not 0.02"),
        ("local.batch_size=4", "local.batch_size=8, not 4"),
        ("run.seed=1", "run.seed=0, not 1"),
        ("algorithm.lambda_reg=0.25", "algorithm.lambda_reg=0.5, not 0.25"),
        ("server.active=2", "server.active=3, not 2"),
        ("partition.hold_out=ink", "partition.hold_out=None, not ink"),
        ("model.width=3", "model.width=2, not 3"),
    ],
)
def test_another_config_is_refused_by_the_name_of_the_setting(
    tiny: Tiny, train: Train, reference: References, tmp_path: Path, change: str, named: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(reference("fedcir"), out)
    before = snapshot(out)
    with pytest.raises(InputError) as refused:
        train(tiny("fedcir", change), out, resume=True)
    assert named in str(refused.value)
    assert str(refused.value).endswith("choose another folder")
    assert "\n" not in str(refused.value)
    assert snapshot(out) == before


def test_another_algorithm_is_refused_by_its_name(
    tiny: Tiny, train: Train, reference: References, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(reference("fedcir"), out)
    with pytest.raises(InputError, match=r"was started with algorithm\.name=fedcir, not fedreg: choose another folder"):
        train(tiny("fedreg"), out, resume=True)


@pytest.mark.parametrize("part", ["x_train", "y_train", "x_test"])
def test_changed_data_are_refused(tiny: Tiny, train: Train, data_root: Path, tmp_path: Path, part: str) -> None:
    root = tmp_path / "data"
    shutil.copytree(data_root, root)
    config = tiny("fedavg", f"data.root='{root}'")
    out = train(config, tmp_path / "run", until=1)
    with np.load(root / "pen.npz") as file:
        arrays = dict(file)
    arrays[part] = arrays[part][::-1]
    np.savez(root / "pen.npz", **arrays)
    before = snapshot(out)
    with pytest.raises(InputError, match="was started on other data than arrays holds now: choose another folder"):
        train(config, out, resume=True)
    assert snapshot(out) == before


def test_the_same_data_in_another_place_are_accepted(
    tiny: Tiny, train: Train, data_root: Path, reference: References, tmp_path: Path
) -> None:
    out = train(tiny("fedavg"), tmp_path / "run", until=1)
    shutil.copytree(data_root, tmp_path / "moved")
    train(tiny("fedavg", f"data.root='{tmp_path / 'moved'}'"), out, resume=True)
    assert model(out) == model(reference("fedavg"))


@pytest.mark.parametrize(
    "algorithm", mark_others_slow([name for name in KINDS if name != "fedproc"], ["fedcir", "fedbn"])
)
def test_more_rounds_extend_a_finished_run_to_the_bits_of_a_longer_one(
    tiny: Tiny, train: Train, reference: References, tmp_path: Path, algorithm: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(reference(algorithm), out)
    longer = reference(algorithm, "server.rounds=5")
    train(tiny(algorithm, "server.rounds=5"), out, resume=True)
    assert model(out) == model(longer)
    assert rounds(out) == rounds(longer)
    assert RunFolder(out).config().server.rounds == 5
    assert RunFolder(out).summary()["rounds"] == 5


def test_an_extension_that_was_stopped_is_no_finished_run(
    tiny: Tiny, train: Train, reference: References, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(reference("fedavg"), out)
    train(tiny("fedavg", "server.rounds=5"), out, resume=True, until=4)
    assert not RunFolder(out).finished
    train(tiny("fedavg", "server.rounds=5"), out, resume=True)
    assert model(out) == model(reference("fedavg", "server.rounds=5"))


def test_more_rounds_are_refused_where_their_number_enters_the_schedule(
    tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    out = train(tiny("fedavg", "local.schedule=cosine"), tmp_path / "run")
    before = snapshot(out)
    with pytest.raises(
        InputError, match="cannot be extended to 5 rounds, because the cosine schedule depends on their number"
    ):
        train(tiny("fedavg", "local.schedule=cosine", "server.rounds=5"), out, resume=True)
    assert snapshot(out) == before


def test_fewer_rounds_are_refused(tiny: Tiny, train: Train, reference: References, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(reference("fedavg"), out)
    before = snapshot(out)
    with pytest.raises(InputError, match="was started with 3 rounds, so it cannot end after 2: ask for more"):
        train(tiny("fedavg", "server.rounds=2"), out, resume=True)
    assert snapshot(out) == before


@pytest.mark.skipif(os.cpu_count() == 1, reason="threads need cores")
def test_a_run_puts_back_the_number_of_threads(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    import torch

    torch.set_num_threads(2)
    try:
        train(tiny("fedavg", "server.rounds=1"), tmp_path / "run")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def add_bias(run: Path) -> None:
    """Make the checkpoints those of the version whose generator had a bias before its BatchNorm."""
    folder = RunFolder(run)
    for state, kept in list(folder.checkpoints()):
        bias = {"inner.bias": torch.zeros(8)}
        changed = {
            kind: {name: {**bag, **bias} if name == "generator" else bag for name, bag in groups.items()}
            for kind, groups in (("shared", state.shared), ("private", state.private))
        }
        folder.save_checkpoint(replace(state, **changed), client_rounds=kept)


@pytest.mark.parametrize("algorithm", ["fedcir", "fedgen"])
def test_a_run_whose_generator_had_a_bias_is_refused_with_the_reason_and_the_fix(
    tiny: Tiny, train: Train, tmp_path: Path, algorithm: str
) -> None:
    out = train(tiny(algorithm), tmp_path / "run", until=2)
    add_bias(out)
    before = snapshot(out)
    with pytest.raises(InputError) as caught:
        train(tiny(algorithm), out, resume=True)
    assert str(caught.value) == (
        f"{out} was begun by another version of fedcir, which built its generator differently (generator/inner.bias is "
        "not expected): start anew in another folder, or resume it with that version"
    )
    assert snapshot(out) == before


def test_a_finished_run_whose_generator_had_a_bias_can_still_be_used(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    out = train(tiny("fedcir"), tmp_path / "run")
    before = load_run(out).final
    add_bias(out)
    assert load_run(out).final == before
    load_run(out).model()
    train(tiny("fedcir"), out, resume=True)  # there is nothing left to do
    assert diagnose_run(out).alignment is not None  # as in its report
    assert len(evaluate(out, device="cpu").domains) == 3


def test_a_run_from_before_a_method_had_a_field_takes_its_default(
    tiny: Tiny, train: Train, reference: References, tmp_path: Path
) -> None:
    out = train(tiny("fedproc"), tmp_path / "run", until=1)
    lines = (out / "config.toml").read_text(encoding="utf-8").splitlines()
    older = [line for line in lines if not line.startswith(("projection =", "normalised_head =", "checksum ="))]
    assert len(older) == len(lines) - 3
    (out / "config.toml").write_text("\n".join(older) + "\n", encoding="utf-8")
    assert load_run(out).config == load_run(reference("fedproc")).config
    train(tiny("fedproc"), out, resume=True)
    assert model(out) == model(reference("fedproc"))
