"""What breaks while a command runs: one line, no values of anybody's data, and the traceback for who asks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedcir.cli.application import describe_failure, name_options
from fedcir.runtime.run_folder import RunFolder

Command = Callable[..., Any]

BROKEN = """from dataclasses import dataclass

import torch

from fedcir import FedAvg


class Broken(FedAvg):
    def local_loss(self, modules, x, y, ctx):
        patient = "Jane Doe"
        return torch.zeros(2, 3) @ torch.zeros(2, 3)
"""
LOSS = "torch.zeros(2, 3) @ torch.zeros(2, 3)"
LINE = "./broken.py, line 11, in local_loss: RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    return tmp_path


@pytest.mark.parametrize("workers", [1, 3])
def test_an_exception_in_a_method_is_one_line_that_names_its_file_and_line(
    fedcir: Command, workspace: Path, options: list[str], workers: int
) -> None:
    output = fedcir("run", *options, "--algorithm", "./broken.py", "-o", "run", "--workers", workers)
    assert output == (1, "", f"fedcir: {LINE}\n")


def test_debug_shows_the_traceback_but_no_values(fork_fedcir: Command, workspace: Path, options: list[str]) -> None:
    ended = fork_fedcir("--debug", "run", *options, "--algorithm", "./broken.py", "-o", "run", "--workers", "1")
    *trace, last = ended.err.splitlines()
    assert (ended.code, last) == (1, f"fedcir: {LINE}")
    assert trace[0] == "Traceback (most recent call last):"
    assert not any("╭" in line or "locals" in line for line in trace)
    assert [line for line in trace if "Jane Doe" in line] == []


def test_a_comparison_tells_why_its_run_failed_and_with_debug_where(
    fedcir: Command, fork_fedcir: Command, workspace: Path, options: list[str]
) -> None:
    command = ["compare", *options, "--algorithms", "fedavg,./broken.py", "--rounds", "1", "-o", "both"]
    ended = fork_fedcir("--debug", *command)  # a process of its own, because it stays in debug mode
    last = f"fedcir: 1 of 2 runs failed, resume to try them again: broken-0: {LINE}"
    assert ended.err.splitlines()[-1] == last
    assert "Traceback (most recent call last):" in ended.err
    assert RunFolder(workspace / "both" / "fedavg-0").finished
    assert fedcir(*command, "--resume", "--quiet").err == f"{last}\n"


def test_what_a_method_gives_back_wrongly_names_the_method_and_the_check(
    fedcir: Command, workspace: Path, options: list[str]
) -> None:
    (workspace / "broken.py").write_text(BROKEN.replace(LOSS, "torch.zeros(2)"))
    output = fedcir("run", *options, "--algorithm", "./broken.py", "-o", "run", "--workers", 1)
    assert (output.code, output.err.count("\n")) == (1, 1)
    assert "AttributeError: 'Tensor' object has no attribute" in output.err
    assert "with ./broken.py: `fedcir algorithms ./broken.py --check`" in output.err


def test_a_line_that_takes_replies_is_not_blamed_for_what_clients_did(
    fedcir: Command, workspace: Path, options: list[str]
) -> None:
    step = "    def server_step(self, *given):\n        return super().server_step(*given)\n"
    (workspace / "broken.py").write_text(f"{BROKEN.replace(LOSS, 'torch.zeros(2)')}\n{step}")
    output = fedcir("run", *options, "--algorithm", "./broken.py", "-o", "run", "--workers", 1)
    assert output.err.startswith("fedcir: AttributeError: 'Tensor' object has no attribute")
    (workspace / "broken.py").write_text(f"{BROKEN}\n{step}")
    assert fedcir("run", *options, "--algorithm", "./broken.py", "-o", "other").err == f"fedcir: {LINE}\n"


@pytest.mark.usefixtures("no_user_modules")
def test_a_fault_of_ours_asks_for_a_report() -> None:
    with pytest.raises(TypeError) as raised:
        _ = RunFolder(3).exists  # type: ignore[arg-type]
    line, code = describe_failure(raised.value)
    assert code == 1
    assert line.startswith(
        "internal error: TypeError: unsupported operand type(s) for /: 'int' and 'str' (runtime/run_folder.py, line "
    )
    assert line.endswith("): run it again as `fedcir --debug ...` and report the traceback")


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")]
)
def test_too_little_memory_is_said_with_what_to_lower(error: Exception) -> None:
    assert describe_failure(error) == ("not enough memory: lower --workers, --batch-size or --image-size", 2)


def test_somebody_elses_long_message_is_cut() -> None:
    line, _ = describe_failure(RuntimeError("Error(s) in loading:\n\t" + "Missing key. " * 1000))
    assert "RuntimeError: Error(s) in loading: Missing key." in line
    assert len(line) < 600


def test_an_error_names_an_option_only_if_the_value_may_come_from_it() -> None:
    broken = "local.lr must be above 0, got -1"
    assert name_options(broken, ["run", "--lr", "-1"]) == f"{broken} (--lr)"
    assert name_options(broken, ["run"]) == f"{broken} (--lr)"  # nothing else can set it
    assert name_options(broken, ["run", "mine.toml", "--rounds", "3"]) == broken
    assert name_options(broken, ["run", "mine.toml", "--lr=-1"]) == f"{broken} (--lr)"
    missing = "data.root: there is no folder data"
    assert name_options(missing, ["run", "mine.toml"]) == missing
    assert name_options(missing, ["run", "--data-root", "data"]) == "--data-root: there is no folder data"
