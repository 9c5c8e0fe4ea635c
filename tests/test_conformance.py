"""Every file in algorithms/ keeps every guarantee, and the checks notice one that does not."""

import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedcir
from fedcir.algorithms import find_algorithm, list_algorithms
from fedcir.algorithms.algorithm import Algorithm
from fedcir.algorithms.fedavg import FedAvg
from fedcir.conformance import (
    CHECKS,
    Check,
    Failure,
    Subject,
    a_reply_carries_what_is_declared,
    a_resumed_run_gives_equal_bits,
    check_algorithm,
    equal_seeds_give_equal_bits,
    find_fault,
    it_learns,
    it_trains_on_any_task_or_needs_classes,
    state_is_a_value,
)
from fedcir.types import ClientReply, Groups, LocalContext, Losses, Modules, RoundRecord, ServerContext, ServerState


@pytest.mark.parametrize("name", list_algorithms())
def test_every_algorithm_keeps_every_guarantee(name: str) -> None:
    check_algorithm(find_algorithm(name)())


@dataclass(frozen=True)
class Forgetful(FedAvg):
    """Keeps state outside its state: resume cannot bring it back."""

    seen: ClassVar[list[int]] = []

    def server_step(
        self, state: ServerState, replies: Iterable[ClientReply], modules: Modules, ctx: ServerContext
    ) -> ServerState:
        self.seen.append(1)
        after = super().server_step(state, replies, modules, ctx)
        after.shared["model"]["head.bias"] += len(self.seen)
        return after


@dataclass(frozen=True)
class Overwriting(FedAvg):
    """Writes into the state that it was given."""

    def server_step(
        self, state: ServerState, replies: Iterable[ClientReply], modules: Modules, ctx: ServerContext
    ) -> ServerState:
        state.shared["model"]["head.bias"] += 1
        return super().server_step(state, replies, modules, ctx)


@dataclass(frozen=True)
class FirstComeFirstServed(FedAvg):
    """Its local loss depends on who came before."""

    calls: ClassVar[list[int]] = []

    def local_loss(self, modules: Modules, x: torch.Tensor, y: torch.Tensor, ctx: LocalContext) -> Losses:
        self.calls.append(1)
        losses = super().local_loss(modules, x, y, ctx)
        return replace(losses, total=losses.total * (1 + 0.1 * (len(self.calls) % 7)))


@dataclass(frozen=True)
class Idle(FedAvg):
    """Learns nothing."""

    def local_loss(self, modules: Modules, x: torch.Tensor, y: torch.Tensor, ctx: LocalContext) -> Losses:
        losses = super().local_loss(modules, x, y, ctx)
        return replace(losses, total=losses.total * 0)


@dataclass(frozen=True)
class Undeclared(FedAvg):
    """Uploads more than it says."""

    def local_summary(self, modules: Modules, data: object, ctx: LocalContext) -> Groups:
        return {"secrets": {"x": torch.zeros(1)}}


@dataclass(frozen=True)
class Scribbling(FedAvg):
    """Writes into what a client had kept."""

    remembers: ClassVar[tuple[str, ...]] = ("count",)

    def local_finish(self, modules: Modules, data: object, ctx: LocalContext) -> Groups:
        kept = ctx.client_state.get("count", {"rounds": torch.zeros(())})
        kept["rounds"] += 1
        return {"count": kept}


@dataclass(frozen=True)
class HardWired(FedAvg):
    """Takes all targets for classes from the second round on."""

    def local_loss(self, modules: Modules, x: torch.Tensor, y: torch.Tensor, ctx: LocalContext) -> Losses:
        if ctx.round == 1:
            return super().local_loss(modules, x, y, ctx)
        loss = nn.functional.cross_entropy(modules["model"](x), y)
        return Losses(loss, {"ce": loss})


@dataclass(frozen=True)
class Momentum(FedAvg):
    """The server's momentum, which it adds to the mean where that lies."""

    beta: float = 0.5

    def server_step(
        self, state: ServerState, replies: Iterable[ClientReply], modules: Modules, ctx: ServerContext
    ) -> ServerState:
        means, _ = self.merge(replies, ctx, keep=lambda reply: None)
        velocity = dict(state.private.get("velocity", {}))
        for name, _ in modules["model"].named_parameters():
            mean, before = means["model"][name], state.shared["model"][name]
            velocity[name] = mean - before + self.beta * velocity.get(name, torch.zeros_like(mean))
            mean.copy_(before + velocity[name])
        return ServerState(ctx.round, means, {"velocity": velocity})


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (Forgetful, equal_seeds_give_equal_bits),
        (Overwriting, state_is_a_value),
        (FirstComeFirstServed, equal_seeds_give_equal_bits),
        (Idle, it_learns),
        (Scribbling, state_is_a_value),
        (HardWired, it_trains_on_any_task_or_needs_classes),
    ],
)
def test_a_check_notices(broken: type[Algorithm], check: Check) -> None:
    assert check in CHECKS
    with pytest.raises(Failure):
        check(Subject(broken()))


def test_a_method_that_edits_the_mean_in_place_keeps_the_guarantees() -> None:
    check_algorithm(Momentum())


@pytest.mark.parametrize("workers", [1, 2])
def test_accuracies_are_those_of_the_model_the_round_came_to_even_if_the_mean_is_edited_in_place(workers: int) -> None:
    labels = torch.arange(40) % 4
    inputs = torch.eye(4)[labels] + torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    tests = {str(i): (inputs + i, labels) for i in range(3)}
    sites = {name: (TensorDataset(x, y),) * 2 for name, (x, y) in tests.items()}
    rounds: list[RoundRecord] = []
    for count in (1, 2, 3):  # what a run of so many rounds ends with is what it tested last
        settings = {"rounds": count, "local_steps": 4, "lr": 0.5, "workers": workers, "device": "cpu"}
        result = fedcir.train(sites, encoder=nn.Flatten(), num_classes=4, algorithm=Momentum(beta=2.0), **settings)
        rounds = result.records
        model = result.model.eval()
        actual = {name: (model(x).argmax(-1) == y).float().mean().item() for name, (x, y) in tests.items()}
        assert rounds[-1].accuracy == pytest.approx(actual)
    assert len(rounds) == 3


def test_an_upload_that_is_not_declared_is_refused_on_the_client() -> None:
    with pytest.raises(TypeError, match="secrets"):
        check_algorithm(Undeclared())


@pytest.mark.slow
def test_the_guarantees_hold_where_nobody_has_set_the_number_of_threads(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "fedcir", "algorithms", "fedavg", "--check"]
    output = subprocess.run(command, cwd=tmp_path, env=env, check=False, capture_output=True, text=True)
    assert output.returncode == 0, output.stdout + output.stderr
    assert output.stdout.count("ok ") == len(CHECKS)


def test_the_checks_run_with_the_threads_of_every_run() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        a_resumed_run_gives_equal_bits(Subject(FedAvg()))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


HEADER = "from dataclasses import dataclass\nfrom fedcir import Algorithm\n\n@dataclass(frozen=True)\n"


def written(path: Path, body: str) -> Path:
    """A method's file; its class begins in line 5."""
    path.write_text(HEADER + body, encoding="utf-8")
    return path


def test_an_exception_breaks_a_guarantee_and_is_told_with_its_file_and_line(
    tmp_path: Path, fedcir: Callable[..., Any]
) -> None:
    body = """class Mine(Algorithm):
    def local_loss(self, modules, x, y, ctx):
        if ctx.round == 2:
            return modules['modle'](x)
        return super().local_loss(modules, x, y, ctx)
"""
    output = fedcir("algorithms", written(tmp_path / "mine.py", body), "--check")
    messages = output.out.splitlines()
    assert len(messages) == len(CHECKS)
    assert "ok      a_reply_carries_what_is_declared" in messages
    assert "FAILED  it_learns: mine.py, line 8: KeyError: 'modle'" in messages
    assert output.code == 2
    assert output.err.endswith("mine.py breaks 10 of 13 guarantees\n")


@pytest.mark.slow
def test_a_terminal_shows_which_guarantee_is_being_checked(tmp_path: Path) -> None:
    body = """class Mine(Algorithm):
    pass

from fedcir.cli.progress import Meter

Meter.DELAY = 0.0  # so that every check takes long
"""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fedcir", "algorithms", str(written(tmp_path / "mine.py", body)), "--check"]
    shown = b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # by which a terminal says that nobody writes any more
            while some := os.read(ours, 4096):
                shown += some
        os.close(ours)
        assert process.stdout is not None
        assert process.stdout.read().splitlines() == [f"ok      {check.__name__}" for check in CHECKS]
    assert b"checking it_learns" in shown


def test_an_error_that_comes_through_no_line_of_the_method_is_told_without_a_place() -> None:
    message = find_fault(a_reply_carries_what_is_declared, Subject(Undeclared()))
    assert message is not None
    assert message.startswith("TypeError: Undeclared.local_summary returned ['secrets']")


def test_a_field_without_a_default_is_named(tmp_path: Path, fedcir: Callable[..., Any]) -> None:
    output = fedcir("algorithms", written(tmp_path / "mine.py", "class Mine(Algorithm):\n    mu: float\n"), "--check")
    assert output.code == 2
    assert "mine.py: give every field of class Mine a default; mu has none" in output.err
