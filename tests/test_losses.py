import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence

from fedcir.losses import (
    EPSILON,
    balanced_cross_entropy,
    channel_statistics,
    class_gaussians,
    class_shares,
    class_weighted_cross_entropy,
    cluster_contrast,
    decay_value,
    distillation_kl,
    diversity,
    first_neighbours,
    gaussian_kl,
    l2_norm,
    log_mean_probability,
    mixture_nll,
    prototype_contrast,
    prototype_distance,
    proximal,
    replace_statistics,
    teacher_loss,
    widen_variance,
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
    mean_of_losses = torch.stack([F.cross_entropy(logit, y) for logit in logits]).mean()
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


def test_class_weighted_cross_entropy_is_the_mean_over_classes_of_a_batch_in_their_shares() -> None:
    logits, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 0, 2])
    each = F.cross_entropy(logits, y, reduction="none")
    loss = class_weighted_cross_entropy(logits, y, torch.tensor([3, 0, 1]))
    assert close(loss, ((each[0] + each[1] + each[2]) / 3 + each[3]).item() / 2)
    torch.testing.assert_close(class_weighted_cross_entropy(logits, y, torch.ones(3)), each.mean())


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


def test_class_shares_are_counts_over_the_total_of_a_class() -> None:
    counts = torch.tensor([[6.0, 0.0, 1.0], [2.0, 0.0, 3.0]])
    assert class_shares(counts).tolist() == [[0.75, 0.0, 0.25], [0.25, 0.0, 0.75]]
    assert class_shares(counts, extra=1)[:, 1].tolist() == [0.5, 0.5]  # 1 of 2
    assert class_shares(counts, extra=1)[:, 2].tolist() == pytest.approx([2 / 6, 4 / 6])


def test_a_decayed_value_is_whole_in_round_1() -> None:
    assert [decay_value(10.0, 0.5, round) for round in (1, 2, 4)] == [10.0, 5.0, 1.25]
    assert decay_value(0.7, 1.0, 300) == 0.7


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


def test_log_mean_probability_is_the_log_of_the_mean_over_samples_by_hand() -> None:
    logits = torch.tensor([[[0.0, math.log(3)]], [[math.log(9), 0.0]]])  # shares 1/4, 3/4 and 9/10, 1/10
    torch.testing.assert_close(log_mean_probability(logits).exp(), torch.tensor([[0.575, 0.425]]))


@pytest.mark.parametrize(("squared", "expected"), [(False, 2.5), (True, 12.5)])
def test_l2_norm_is_the_mean_length_or_its_square(squared: bool, expected: float) -> None:
    assert close(l2_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), squared), expected)


def test_prototype_distance_is_the_mean_of_squares_over_samples_and_dimensions_by_hand() -> None:
    features, prototypes = torch.tensor([[3.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    labels = torch.tensor([0, 1])
    # (9 + 0 + 0 + 4) / 4, and without class 0 (0 + 4) / 4
    assert close(prototype_distance(features, labels, prototypes, torch.tensor([True, True])), 13 / 4)
    assert close(prototype_distance(features, labels, prototypes, torch.tensor([False, True])), 1.0)


def test_cluster_contrast_by_hand() -> None:
    features, classes = torch.tensor([[2.0, 0.0]]), torch.tensor([0, 0, 1])
    prototypes = torch.tensor([[5.0, 0.0], [0.0, 1.0], [-3.0, 0.0]])
    # cosines 1, 0 and -1 at temperature 0.5: e^2, 1 and e^-2, of which the first two are of the own class
    share = (math.exp(2) + 1) / (math.exp(2) + 1 + math.exp(-2))
    assert close(cluster_contrast(features, torch.tensor([0]), prototypes, classes, 0.5), -math.log(share))


def test_cluster_contrast_of_one_prototype_a_class_is_fedprocs() -> None:
    rng = torch.Generator().manual_seed(0)
    features, prototypes, y = torch.randn(4, 5, generator=rng), torch.randn(3, 5, generator=rng), torch.arange(4) % 3
    contrast = cluster_contrast(features, y, prototypes, torch.arange(3), 1.0)
    torch.testing.assert_close(contrast, prototype_contrast(features, y, prototypes))


def test_cluster_contrast_and_its_gradient_are_zero_for_a_class_without_prototypes() -> None:
    features = torch.tensor([[2.0, 1.0]], requires_grad=True)
    loss = cluster_contrast(features, torch.tensor([2]), torch.eye(2), torch.tensor([0, 1]), 0.02)
    loss.backward()
    assert close(loss, 0.0)
    assert features.grad.abs().max() == 0


def test_first_neighbours_of_five_points_by_hand() -> None:
    # By angle: 0, 10, 25, 90 and 95 degrees. 0 and 25 are nearest to 10, and 90 and 95 to each other.
    angles = torch.tensor([0.0, 90.0, 10.0, 95.0, 25.0]).deg2rad()
    lengths = torch.tensor([[1.0], [9.0], [3.0], [0.2], [5.0]])
    clusters = first_neighbours(torch.stack([angles.cos(), angles.sin()], 1) * lengths).tolist()
    assert clusters[0] == clusters[2] == clusters[4] != clusters[1] == clusters[3]
    assert set(clusters) == {0, 1}


def test_first_neighbours_follow_a_chain_of_neighbours() -> None:
    # 0 -> 1, 1 -> 3, 3 -> 4, 4 -> 3 in degrees 0, 5, 9, 11: each is nearest to the next
    angles = torch.tensor([0.0, 5.0, 9.0, 11.0]).deg2rad()
    assert first_neighbours(torch.stack([angles.cos(), angles.sin()], 1)).tolist() == [0, 0, 0, 0]


def test_a_point_alone_is_a_cluster() -> None:
    assert first_neighbours(torch.tensor([[1.0, 2.0]])).tolist() == [0]


@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (3, 4)])
def test_channel_statistics_are_those_within_an_image(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    flat = x.reshape(3, 4, -1)
    mean, std = channel_statistics(torch.from_numpy(x))
    np.testing.assert_allclose(mean, flat.mean(-1), atol=1e-6)
    np.testing.assert_allclose(std, np.sqrt(flat.var(-1) + EPSILON), rtol=1e-5)


def test_widened_by_hand() -> None:
    # Variances 1 and 4 over the batch; 1 and 1/3 over clients give weights 1/2 and 1/4, so gamma is 4/3 and 2/3.
    statistic, over_clients = torch.tensor([[1.0, 1.0], [3.0, 5.0]]), torch.tensor([1.0, 1 / 3])
    assert widen_variance(statistic, over_clients).tolist() == pytest.approx([7 / 3, 4 * 5 / 3], rel=1e-5)
    assert widen_variance(statistic, None).tolist() == pytest.approx([2.0, 8.0], rel=1e-5)
    assert widen_variance(statistic, torch.zeros(2)).tolist() == pytest.approx(
        [2.0, 8.0], rel=1e-5
    )  # clients that agree


def test_restyled_features_have_the_new_statistics() -> None:
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    new_mean, new_std = torch.tensor([[1.0, 2.0, 3.0]] * 2), torch.tensor([[0.5, 1.0, 2.0]] * 2)
    mean, std = channel_statistics(replace_statistics(x, *channel_statistics(x), new_mean, new_std))
    torch.testing.assert_close(mean, new_mean)
    torch.testing.assert_close(std, new_std, rtol=1e-5, atol=1e-5)


def test_restyled_features_with_their_own_statistics_are_themselves() -> None:
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(replace_statistics(x, *channel_statistics(x), *channel_statistics(x)), x)
