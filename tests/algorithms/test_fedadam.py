"""FedAdam as Algorithm 2 of its paper has it, in numpy."""

from collections.abc import Callable

import numpy as np
import pytest

from fedcir import FedAdam
from fedcir.types import Tensors


def test_the_first_round_by_hand(after_rounds: Callable[..., list[Tensors]]) -> None:
    (end,) = after_rounds(FedAdam(server_lr=0.3, beta1=0.5, beta2=0.6, tau=2.0), [(2.0, 4.0)])
    # The clients move by 2 from 1: m = 1, v = 0.6 * 4 + 0.4 * 4 = 4.
    assert end["0.weight"].item() == pytest.approx(1 + 0.3 * 1 / (2 + 2))


def test_rounds_are_those_of_adam_without_bias_correction(after_rounds: Callable[..., list[Tensors]]) -> None:
    method = FedAdam(server_lr=0.2)
    replies = [(2.0, 4.0), (0.5, 1.0), (1.0, -3.0), (1.5, 1.25)]
    x, m, v, expected = 1.0, 0.0, 1e-6, []
    for pair in replies:
        change = np.mean(pair) - x
        m, v = 0.9 * m + 0.1 * change, 0.99 * v + 0.01 * change**2
        x += 0.2 * m / (np.sqrt(v) + 1e-3)
        expected.append(x)
    assert [end["0.weight"].item() for end in after_rounds(method, replies)] == pytest.approx(expected, rel=1e-5)


def test_batchnorm_statistics_are_the_mean_over_clients(after_rounds: Callable[..., list[Tensors]]) -> None:
    ends = after_rounds(FedAdam(), [(2.0, 4.0), (4.0, 6.0)])
    assert [end["1.running_mean"].item() for end in ends] == [3.0, 5.0]
    assert [end["1.num_batches_tracked"].item() for end in ends] == [4, 6]
