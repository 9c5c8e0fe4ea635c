"""Where the time went, and the options that trade bits for speed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcir.client.cost import Profiler
from fedcir.config import Config
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.simulation import open_run

Tiny = Callable[..., Config]
Train = Callable[..., Path]


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_profile_shows_phases_and_operations_and_changes_nothing(
    rounds: int, tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    config = tiny("fedavg", f"server.rounds={rounds}", "run.workers=1")
    whole = train(config, tmp_path / "whole")
    watched = Profiler()
    with open_run(config, tmp_path / "run") as (session, records):
        assert len(list(watched.watch(records, rounds))) == rounds
    assert session.finished
    assert (tmp_path / "run/model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    rows = watched.rows()
    assert [name for name, _ in rows[:5]] == ["train", "server", "evaluate", "load", "write"]
    assert sum(share for _, share in rows[:5]) == pytest.approx(1, abs=0.05)
    assert len(rows) == 9
    assert 0 < sum(share for _, share in rows[5:]) <= 1


def test_the_command_says_where_the_time_went_in_ten_lines(
    fedcir: Callable[..., tuple[int, str, str]], options: list[str], tmp_path: Path
) -> None:
    code, out, _ = fedcir("run", *options, "--profile", "--out", tmp_path / "run")
    assert code == 0
    shares = [line for line in out.splitlines() if line.strip().partition("%")[0].replace(".", "").isdigit()]
    assert 6 <= len(shares) <= 10


def can_bfloat16() -> bool:
    """Whether torch can at all: some virtual machines name instructions (AMX) that they do not let anybody use."""
    tried = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"
    return subprocess.run([sys.executable, "-c", tried], check=False, stderr=subprocess.DEVNULL).returncode == 0


@pytest.mark.slow
def test_half_precision_trains_and_gives_other_bits(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    if not can_bfloat16():
        pytest.skip("torch itself dies of an illegal instruction in bfloat16 on this machine")
    full = RunFolder(train(tiny("fedcir"), tmp_path / "full")).records()
    half = RunFolder(train(tiny("fedcir", "run.precision=bfloat16"), tmp_path / "half")).records()
    assert half[-1].losses != full[-1].losses
    assert half[-1].losses["total"] == pytest.approx(full[-1].losses["total"], rel=0.1)
    summary = json.loads((tmp_path / "half/summary.json").read_text())
    assert summary["cost"]["peak_memory"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler's own
def test_a_compiled_encoder_trains_to_nearly_the_same(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    settings = ("server.rounds=2", "run.workers=1", "run.layout=contiguous")
    plain = RunFolder(train(tiny("fedavg", *settings), tmp_path / "plain"))
    compiled = RunFolder(train(tiny("fedavg", *settings, "run.compile=true"), tmp_path / "compiled"))
    assert compiled.records()[-1].losses["ce"] == pytest.approx(plain.records()[-1].losses["ce"], rel=1e-3)
