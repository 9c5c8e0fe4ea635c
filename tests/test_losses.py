import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence

from fedcir.losses import (
    balanced_cross_entropy,
    class_gaussians,
    distillation_kl,
    diversity,
    gaussian_kl,
    l2_norm,
    mixture_nll,
    prototype_contrast,
    proximal,
    teacher_loss,
)


def close(value: torch.Tensor, expected: float) -> bool:
    assert value.shape == ()
    return value.item() == pytest.approx(expected, rel=1e-6, abs=1e-7)


def log(*rows: list[float]) -> torch.Tensor:
    """Logits whose softmax is these probabilities."""
    return torch.tensor(rows).log()


def test_gaussian_kl_is_summed_over_z_by_hand() -> None:
    # log 2 + (1 + 1) / 8 - 1/2, and -log 2 + (4 + 1) / 2 - 1/2: together 1.75.
    mu, sigma = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 2.0]])
    mu_ref, sigma_ref = torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 1.0]])
    assert gaussian_kl(mu, sigma, mu_ref, sigma_ref).tolist() == pytest.approx([1.75])


def test_gaussian_kl_agrees_with_torch_distributions() -> None:
    rng = torch.Generator().manual_seed(0)
    mu, mu_ref = torch.randn(2, 6, 9, generator=rng)
    sigma, sigma_ref = torch.rand(2, 6, 9, generator=rng) + 0.05
    expected = kl_divergence(Normal(mu, sigma), Normal(mu_ref, sigma_ref)).sum(-1)
    torch.testing.assert_close(gaussian_kl(mu, sigma, mu_ref, sigma_ref), expected)


def test_gaussian_kl_of_a_gaussian_to_itself_is_zero() -> None:
    mu, sigma = torch.tensor([[0.3, -2.0]]), torch.tensor([[0.1, 5.0]])
    assert gaussian_kl(mu, sigma, mu, sigma).tolist() == [0.0]


def test_mixture_nll_is_the_log_of_mean_probabilities() -> None:
    logits = torch.stack([log([0.9, 0.1]), log([0.5, 0.5])])  # (K, 1, C)
    assert close(mixture_nll(logits, torch.tensor([0])), -math.log(0.7))


def test_mixture_nll_is_neither_mean_cross_entropy_nor_that_of_mean_logits() -> None:
    logits, y = torch.stack([log([0.9, 0.1]), log([0.5, 0.5])]), torch.tensor([0])
    mean_of_losses = torch.stack([F.cross_entropy(each, y) for each in logits]).mean()
    loss_of_mean = F.cross_entropy(logits.mean(0), y)
    assert close(mean_of_losses, -math.log(math.sqrt(0.45)))
    assert close(loss_of_mean, -math.log(0.75))  # odds of 9 and 1 have the geometric mean 3
    assert mean_of_losses > mixture_nll(logits, y) > loss_of_mean


@pytest.mark.parametrize("weights", [None, [0.2, 0.5, 0.3]])
def test_mixture_nll_agrees_with_numpy(weights: list[float] | None) -> None:
    rng = np.random.default_rng(0)
    logits, y = rng.normal(size=(3, 5, 4)), rng.integers(4, size=5)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.average(p[:, np.arange(5), y], axis=0, weights=weights)).mean()
    prior = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    assert close(mixture_nll(torch.from_numpy(logits), torch.from_numpy(y), prior), expected)


def test_mixture_nll_and_its_gradient_stay_finite_where_a_head_is_sure_and_wrong() -> None:
    logits = torch.tensor([[[-1000.0, 1000.0]], [[0.0, 0.0]]], requires_grad=True)
    loss = mixture_nll(logits, torch.tensor([0]))
    loss.backward()
    assert close(loss, -math.log(0.25))
    assert torch.isfinite(logits.grad).all()


def test_balanced_cross_entropy_weighs_each_odds_by_its_class_count() -> None:
    # Odds of 1 and 3, of which the client has 6 and 2 samples: 6 to 6.
    assert close(balanced_cross_entropy(log([0.25, 0.75]), torch.tensor([0]), torch.tensor([6, 2])), math.log(2))


def test_balanced_cross_entropy_needs_shares_or_counts_and_even_ones_change_nothing() -> None:
    logits, y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2, 1, 2, 0])
    counts = torch.tensor([2, 1, 5])
    torch.testing.assert_close(
        balanced_cross_entropy(logits, y, counts), balanced_cross_entropy(logits, y, counts / counts.sum())
    )
    torch.testing.assert_close(balanced_cross_entropy(logits, y, torch.ones(3)), F.cross_entropy(logits, y))


def test_a_class_without_samples_gets_no_gradient_and_the_others_that_of_a_softmax_without_it() -> None:
    logits = torch.tensor([[1.0, 50.0, -1.0], [0.5, -2.0, 0.5]], requires_grad=True)
    y = torch.tensor([0, 2])
    loss = balanced_cross_entropy(logits, y, torch.tensor([4, 0, 4]))
    loss.backward()
    assert close(loss, F.cross_entropy(logits.detach()[:, [0, 2]], torch.tensor([0, 1])).item())
    assert logits.grad.isfinite().all()
    assert logits.grad[:, 1].tolist() == [0.0, 0.0]


def test_class_gaussians_are_maximum_likelihood_per_class() -> None:
    z = np.random.default_rng(0).normal(size=(3, 50, 2))
    mean, std = class_gaussians(torch.from_numpy(z))
    np.testing.assert_allclose(mean, z.mean(1))
    np.testing.assert_allclose(std, z.std(1, ddof=0))


def test_collapsed_class_gaussians_are_floored_so_that_the_kl_is_finite() -> None:
    mean, std = class_gaussians(torch.full((2, 8, 3), 1.5), floor=0.05)
    assert (std == 0.05).all()
    kl = gaussian_kl(torch.zeros(2, 3), torch.ones(2, 3), mean, std)
    # per dimension log 0.05 + (1 + 1.5^2) / (2 * 0.05^2) - 1/2
    assert kl.tolist() == pytest.approx([3 * (math.log(0.05) + 3.25 / 0.005 - 0.5)] * 2)


def test_proximal_is_half_the_squared_distance() -> None:
    params = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]
    anchor = [torch.tensor([0.0, 0.0]), torch.tensor([[1.0]])]
    assert close(proximal(params, anchor), 4.5)  # (1 + 4 + 4) / 2


def test_proximal_pulls_by_the_difference() -> None:
    param = torch.tensor([1.0, -2.0], requires_grad=True)
    proximal([param], [torch.tensor([0.5, 1.0])]).backward()
    assert param.grad.tolist() == [0.5, -3.0]


def test_proximal_refuses_lists_of_different_lengths() -> None:
    with pytest.raises(ValueError, match="shorter"):
        proximal([torch.ones(1), torch.ones(1)], [torch.ones(1)])


def test_prototype_contrast_by_hand() -> None:
    features, prototypes = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 5.0], [2.0, 0.0]])
    # cosines 0 and 1, label 1: -log(e / (1 + e))
    assert close(prototype_contrast(features, torch.tensor([1]), prototypes), math.log(1 + 1 / math.e))


def test_prototype_contrast_does_not_depend_on_any_length() -> None:
    rng = torch.Generator().manual_seed(0)
    features, prototypes = torch.randn(4, 5, generator=rng), torch.randn(3, 5, generator=rng)
    y = torch.tensor([0, 2, 1, 1])
    scaled = prototype_contrast(features * torch.tensor([[1.0], [9.0], [0.1], [4.0]]), y, 7 * prototypes)
    torch.testing.assert_close(scaled, prototype_contrast(features, y, prototypes))


def test_teacher_loss_weighs_each_client_by_its_share_of_the_class() -> None:
    # -log2 of what each client gives to the labels 0, 0, 1: client 0 has 1, 1, 2 and client 1 has 2, 2, 1.
    logits = torch.stack(
        [log([0.5, 0.5], [0.5, 0.5], [0.75, 0.25]), log([0.25, 0.75], [0.25, 0.75], [0.5, 0.5])]
    )  # (K, B, C)
    share = torch.tensor([[0.75, 0.5], [0.25, 0.5]])
    # (.75 + .75 + 1) / 3 and (.5 + .5 + .5) / 3, in units of log 2
    assert close(teacher_loss(logits, torch.tensor([0, 0, 1]), share), math.log(2) * 4 / 3)


def test_teacher_loss_ignores_a_client_without_the_class() -> None:
    logits = torch.stack([log([0.5, 0.5]), log([0.001, 0.999])])
    assert close(teacher_loss(logits, torch.tensor([0]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])), math.log(2))


def test_diversity_by_hand() -> None:
    # The pair is 2 apart in noise (mean of squares) and 3 in z: 6 off the diagonal, 3 on average.
    noise, z = torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([[0.0, 1.0], [3.0, 4.0]])
    assert close(diversity(noise, z), math.exp(-3))


def test_diversity_of_a_collapsed_generator_is_one() -> None:
    assert diversity(torch.randn(5, 2, generator=torch.Generator().manual_seed(0)), torch.ones(5, 3)).item() == 1.0


def test_distillation_kl_is_of_the_target_to_the_prediction_by_hand() -> None:
    prediction, target = log([0.75, 0.25], [0.4, 0.6]), log([0.5, 0.5], [0.4, 0.6])
    # .5 log(.5/.75) + .5 log(.5/.25) = .5 log(4/3) in the first row and 0 in the second
    assert close(distillation_kl(prediction, target), 0.25 * math.log(4 / 3))


def test_distillation_kl_of_equal_logits_is_zero() -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5]])
    assert close(distillation_kl(logits, logits + 3), 0.0)  # softmax does not see a shift


def test_distillation_kl_gives_no_gradient_to_the_target() -> None:
    logits, target = log([0.75, 0.25]).requires_grad_(), log([0.5, 0.5]).requires_grad_()
    distillation_kl(logits, target).backward()
    assert target.grad is None
    assert logits.grad[0].tolist() == pytest.approx([0.25, -0.25])  # p - target


@pytest.mark.parametrize(("squared", "expected"), [(False, 2.5), (True, 12.5)])
def test_l2_norm_is_the_mean_length_or_its_square(squared: bool, expected: float) -> None:
    assert close(l2_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), squared), expected)
