"""Our optimisers beside torch's own, bit for bit."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedcir.models.optimizers import SGD, Adam


def losses(parameters: list[nn.Parameter], begin: Callable[[], None], step: Callable[[], None], steps: int) -> None:
    for number in range(steps):
        begin()
        loss = (parameters[0] ** 4).sum() * (number + 1)
        if number % 2 == 0:  # the second parameter takes no part in every step
            loss = loss + (parameters[1] - 1).square().sum()
        loss.backward()
        step()


def fresh() -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]])), nn.Parameter(torch.tensor([0.3]))]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 5e-4])
def test_sgd_is_torchs_fused_sgd(momentum: float, weight_decay: float) -> None:
    mine, theirs = fresh(), fresh()
    ours = SGD(mine)
    reference = torch.optim.SGD(theirs, lr=0.01, momentum=momentum, weight_decay=weight_decay, fused=True)
    losses(mine, ours.zero_grad, lambda: ours.step(0.01, momentum, weight_decay), 6)
    losses(theirs, reference.zero_grad, reference.step, 6)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (5, 3, 3, 3), (8, 4, 1, 1)])
@pytest.mark.parametrize("weights", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("slopes", [torch.contiguous_format, torch.channels_last])
def test_sgd_is_right_in_every_memory_layout(
    shape: tuple[int, ...], weights: torch.memory_format, slopes: torch.memory_format
) -> None:
    rng = torch.Generator().manual_seed(0)
    first = torch.randn(shape, generator=rng)
    parameter = nn.Parameter(first.contiguous(memory_format=weights))
    optimizer, expected, velocity = SGD([parameter]), first.double(), torch.zeros(shape, dtype=torch.float64)
    for _ in range(4):
        gradient = torch.randn(shape, generator=rng)
        parameter.grad = gradient.contiguous(memory_format=slopes)
        optimizer.step(0.1, 0.9, 0.01)
        velocity = 0.9 * velocity + gradient.double() + 0.01 * expected
        expected = expected - 0.1 * velocity
    torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert parameter.is_contiguous(memory_format=weights)


def test_sgd_that_is_restarted_is_a_new_one() -> None:
    used, new = fresh(), fresh()
    optimizer = SGD(used)
    losses(used, optimizer.zero_grad, lambda: optimizer.step(0.01, 0.9, 0.0), 3)
    with torch.no_grad():
        for parameter, first in zip(used, fresh(), strict=True):
            parameter.copy_(first)
    optimizer.restart()
    other = SGD(new)
    losses(used, optimizer.zero_grad, lambda: optimizer.step(0.01, 0.9, 0.0), 3)
    losses(new, other.zero_grad, lambda: other.step(0.01, 0.9, 0.0), 3)
    assert all(torch.equal(a, b) for a, b in zip(used, new, strict=True))


def adam(steps: int, restart_after: int | None = None) -> Tensor:
    """A parameter after Adam's steps, the optimiser thrown away and made again from its state once on the way."""
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = Adam([parameter], 0.1, {})
    for step in range(steps):
        if step == restart_after:
            optimizer = Adam([parameter], 0.1, optimizer.state)
        optimizer.zero_grad()
        (parameter**4).sum().backward()
        optimizer.step()
    return parameter.detach()


def test_adam_is_torchs() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (parameter**4).sum().backward()
        optimizer.step()
    assert torch.equal(adam(5), parameter)


def test_adam_made_again_from_its_state_goes_on_as_if_it_had_never_stopped() -> None:
    assert torch.equal(adam(5, restart_after=2), adam(5))


def test_the_state_that_adam_is_given_is_not_written_to() -> None:
    parameter = nn.Parameter(torch.ones(2))
    given = Adam([parameter], 0.1, {}).state
    assert given.keys() == {"0.step", "0.exp_avg", "0.exp_avg_sq"}
    optimizer = Adam([parameter], 0.1, given)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert (given["0.step"].item(), optimizer.state["0.step"].item()) == (0, 1)


@pytest.mark.slow
def test_training_does_not_import_torchs_compiler() -> None:
    script = """
import sys, torch
from torch.utils.data import TensorDataset
import fedcir
site = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
encoder = torch.nn.Linear(4, 4)
fedcir.train([(site, site)] * 2, encoder=encoder, num_classes=2, rounds=2, workers=1, device="cpu")
assert "torch._dynamo" not in sys.modules
assert "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
