"""Every file in algorithms/ keeps every promise, and the suite notices one that does not."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from fedcir.algorithm import Algorithm
from fedcir.algorithms import algorithm_class, names
from fedcir.algorithms.fedavg import FedAvg
from fedcir.conformance import CHECKS, Failure, check_algorithm
from fedcir.types import ClientReply, Groups, LocalContext, Losses, Modules, ServerContext, ServerState


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("promise", CHECKS, ids=lambda check: check.__name__)
def test_every_algorithm_keeps(promise: Callable[[Algorithm], None], name: str) -> None:
    promise(algorithm_class(name)())


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


@pytest.mark.parametrize("broken", [Forgetful, Overwriting, FirstComeFirstServed, Idle])
def test_the_suite_notices(broken: type[Algorithm]) -> None:
    with pytest.raises(Failure):
        check_algorithm(broken())


def test_an_upload_that_is_not_declared_is_refused_on_the_client() -> None:
    with pytest.raises(TypeError, match="secrets"):
        check_algorithm(Undeclared())
