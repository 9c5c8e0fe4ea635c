"""The loss-threshold attack by hand, and an image from the gradient of a step on it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcir.analysis.leakage import Membership, cosine, find_nearest, infer_membership, invert, psnr, total_variation
from fedcir.runs.statistics import Interval


def test_auc_and_advantage_by_hand() -> None:
    """Of the six pairs, four have the lower loss in training and one is even; the mean training loss is 2."""
    result = infer_membership("clinic", np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0]))
    assert result.auc.value == pytest.approx(4.5 / 6)
    assert result.advantage.value == pytest.approx(2 / 3 - 1 / 2)
    assert (result.trained, result.others) == (3, 2)


def test_a_model_that_remembers_is_found_out_and_one_that_does_not_is_at_chance() -> None:
    rng = np.random.default_rng(0)
    same = infer_membership("a", rng.exponential(size=300), rng.exponential(size=200))
    assert same.auc.low < 0.5 < same.auc.high
    assert same.advantage.low < 0 < same.advantage.high
    known = infer_membership("a", 0.1 * rng.exponential(size=300), rng.exponential(size=200))
    assert known.auc.low > 0.8
    assert known.advantage.low > 0.4


def test_a_domain_is_beyond_chance_if_either_interval_is() -> None:
    both, neither = Interval(0.6, 0.55, 0.65), Interval(0.52, 0.45, 0.59)
    above, around = Interval(0.08, 0.01, 0.14), Interval(0.02, -0.04, 0.08)
    cases = {(both, around): True, (neither, above): True, (both, above): True, (neither, around): False}
    for (auc, advantage), expected in cases.items():
        assert Membership("clinic", 9, 9, auc, advantage).is_beyond_chance is expected


def test_intervals_are_the_same_again() -> None:
    losses = np.random.default_rng(1).exponential(size=(2, 40))
    assert infer_membership("a", *losses) == infer_membership("a", *losses)


@pytest.mark.slow
def test_an_image_comes_back_from_the_gradient_of_a_step_on_it() -> None:
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 64, generator=rng).requires_grad_()
    image, label = torch.full((1, 1, 8, 8), -1.0), torch.tensor([1])
    image[..., 2:6, 3:5] = 1.0

    def gradient(x: Tensor) -> list[Tensor]:
        loss = F.cross_entropy(x.flatten(1) @ weight.T, label)
        return list(torch.autograd.grad(loss, [weight], create_graph=True))

    start = torch.randn(image.shape, generator=rng)
    sent = [part.detach() for part in gradient(image)]
    result = invert(gradient, sent, torch.tensor(-1.0), torch.tensor(1.0), 150, start)
    assert psnr((result + 1) / 2, (image + 1) / 2)[0] > 15 > psnr((start + 1) / 2, (image + 1) / 2)[0]
    assert find_nearest(result[0], torch.cat([start, -image, image])) == 2


def test_distances_by_hand() -> None:
    assert float(
        cosine([torch.tensor([3.0]), torch.tensor([[4.0]])], [torch.tensor([1.0]), torch.tensor([[0.0]])])
    ) == (pytest.approx(0.6))
    assert float(total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 3.0]]]]))) == pytest.approx(1.0 + 2.0)
    assert psnr(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.1)) == pytest.approx([20.0])
