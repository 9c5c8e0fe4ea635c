"""FedDyn as Algorithm 1 of its paper has it, in numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedcir import FedDyn, FedProx
from fedcir.runtime.rounds import SerialTransport, run_rounds
from fedcir.types import Tensors

Opened = Callable[..., tuple[Any, SerialTransport]]


def test_feddyn_is_algorithm_1_of_its_paper(line: Callable[..., Any]) -> None:
    alpha = 0.2
    problem = line(FedDyn(alpha=alpha), rounds=4, steps=3, lr=0.5)
    theta = problem.start
    h, gradients = np.zeros_like(theta), np.zeros((3, *theta.shape))
    for round in range(1, 5):
        active, ends = problem.session.cohort(round), []
        for k in active:
            own = theta.copy()
            for _ in range(3):
                own -= 0.5 * (problem.slope(own, k) - gradients[k] + alpha * (own - theta))
            gradients[k] -= alpha * (own - theta)
            ends.append(own)
        h -= alpha / 3 * sum(own - theta for own in ends)
        theta = np.mean(ends, 0) - h / alpha
    list(run_rounds(problem.session, problem.transport))
    np.testing.assert_allclose(problem.of(problem.session.state.shared["model"]), theta, atol=1e-5)
    np.testing.assert_allclose(problem.of(problem.session.state.private["drift"]), -h / alpha, atol=1e-5)
    for k in range(3):
        np.testing.assert_allclose(problem.of(problem.transport.store.load(k, 9)["gradient"]), gradients[k], atol=1e-5)


def test_a_clients_first_round_is_that_of_fedprox(opened: Opened, same_model: Callable[[Any, Any], bool]) -> None:
    replies = []
    for method in (FedDyn(alpha=0.3), FedProx(mu=0.3)):
        session, transport = opened(method)
        replies.append(list(transport.train(session.state, session.roster.trainers)))
    for ours, theirs in zip(*replies, strict=True):
        assert same_model(ours.tensors["model"], theirs.tensors["model"])


def test_with_all_clients_the_server_goes_on_by_as_much_as_the_mean_moved(
    after_rounds: Callable[..., list[Tensors]],
) -> None:
    ends = after_rounds(FedDyn(), [(2.0, 4.0), (4.0, 6.0), (0.0, 2.0)])  # means 3, 5, 1; the start is 1
    assert [end["0.weight"].item() for end in ends] == [2 * 3 - 1, 2 * 5 - 3, 2 * 1 - 5]


def test_batchnorm_statistics_are_the_mean_over_clients(after_rounds: Callable[..., list[Tensors]]) -> None:
    ends = after_rounds(FedDyn(), [(2.0, 4.0), (4.0, 6.0)])
    assert [end["1.running_mean"].item() for end in ends] == [3.0, 5.0]
    assert [end["1.num_batches_tracked"].item() for end in ends] == [4, 6]


def test_what_a_client_keeps_is_its_gradient_where_it_came_to_rest(line: Callable[..., Any]) -> None:
    problem = line(FedDyn(alpha=1.0), rounds=1, steps=60, lr=0.5)
    for reply in problem.transport.train(problem.session.state, [0, 1, 2]):
        kept = problem.of(problem.transport.store.load(reply.client_id, 2)["gradient"])
        slope = problem.slope(problem.of(reply.tensors["model"]), reply.client_id)
        np.testing.assert_allclose(kept, slope, atol=1e-5)


def test_alpha_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.alpha must be a number above 0, got 0"):
        FedDyn(alpha=0.0)
