"""Every formula of the FedCiR paper and of its baselines, one pure function each.

FedCiR: Li et al., "FedCiR: Client-Invariant Representation Learning for Federated Non-IID Features",
https://arxiv.org/abs/2308.15786. The docstrings of the others name their papers.

Shapes: B samples, C classes, Z dimensions of the representation, K clients, S generated samples per class.
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor


def gaussian_kl(mu: Tensor, sigma: Tensor, mu_ref: Tensor, sigma_ref: Tensor) -> Tensor:
    """KL( N(mu, sigma^2) || N(mu_ref, sigma_ref^2) ) of diagonal Gaussians, summed over z -> (B,)."""
    ratio = sigma / sigma_ref
    distance = (mu - mu_ref) / sigma_ref
    return (0.5 * (ratio.square() + distance.square() - 1) - ratio.log()).sum(-1)


def mixture_nll(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """FedCiR's generator loss: mean_j -log sum_k p(k) p_k(y_j | z_j), from logits (K, B, C).

    This is the log of a mixture of probabilities, not a mean of cross-entropies or of logits.
    """
    prior = logits.new_full((len(logits),), 1 / len(logits)) if weights is None else weights
    return -(_log_likelihood(logits, labels) + prior.log().unsqueeze(-1)).logsumexp(0).mean()


def _log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of the labels (B,) under each client's logits (K, B, C) -> (K, B)."""
    index = labels.expand(logits.shape[:2]).unsqueeze(-1)
    return logits.log_softmax(-1).gather(-1, index).squeeze(-1)


def balanced_cross_entropy(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Cross-entropy of logits + log n_y, from samples by class (C,), so that logits do not include the label shares.

    The gradient of a class without samples is zero. Balanced softmax, https://arxiv.org/abs/2007.10740
    """
    return F.cross_entropy(logits + counts.log(), labels)


def class_weighted_cross_entropy(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Cross-entropy with sample weights 1 / n_y, from samples by class (C,), so that classes have equal weights.

    King and Zeng, 2001. https://doi.org/10.1093/oxfordjournals.pan.a004868
    """
    weights = 1 / counts[labels].float()  # (B,)
    return (weights * F.cross_entropy(logits, labels, reduction="none")).sum() / weights.sum()


def label_margins(counts: Tensor, tau: float) -> Tensor:
    """FedLC's margin of each class, tau n_y^(-1/4), from samples by class (C,). https://arxiv.org/abs/2209.00189

    A class without samples counts as 1e-8 of one, so that its margin is finite: 100 tau.
    """
    return tau * counts.float().clamp_min(1e-8) ** -0.25


def cross_entropy_to_others(logits: Tensor, labels: Tensor) -> Tensor:
    """mean_i -log( e^f_y / sum_{c != y} e^f_c ): FedLC's as its paper prints it. It has no lower bound."""
    index = labels.unsqueeze(-1)  # (B, 1)
    return (logits.scatter(-1, index, -torch.inf).logsumexp(-1) - logits.gather(-1, index).squeeze(-1)).mean()


def class_gaussians(z: Tensor, floor: float = 1e-2) -> tuple[Tensor, Tensor]:
    """Maximum-likelihood mean and floored standard deviation per class, from z (C, S, Z) -> two of (C, Z)."""
    return z.mean(1), z.std(1, correction=0).clamp_min(floor)


def proximal(params: Iterable[Tensor], anchor: Iterable[Tensor]) -> Tensor:
    """Half the squared distance to the received weights. FedProx, https://arxiv.org/abs/1812.06127"""
    return 0.5 * torch.stack([(p - a).square().sum() for p, a in zip(params, anchor, strict=True)]).sum()


def prototype_contrast(features: Tensor, labels: Tensor, prototypes: Tensor) -> Tensor:
    """Cross-entropy of cosine similarities to class prototypes (C, Z). FedProc, https://arxiv.org/abs/2109.12273"""
    return F.cross_entropy(F.normalize(features, dim=-1) @ F.normalize(prototypes, dim=-1).T, labels)


def teacher_loss(logits: Tensor, labels: Tensor, class_share: Tensor) -> Tensor:
    """FedGen's generator loss: sum_k mean_b w_{y_b,k} CE_k, from logits (K, B, C) and shares (K, C).

    https://arxiv.org/abs/2105.10056
    """
    return (class_share[:, labels] * -_log_likelihood(logits, labels)).mean(1).sum()


def class_shares(counts: Tensor, extra: int = 0) -> Tensor:
    """FedGen's w_{y,k}: each client's share of every class, from counts (K, C), each raised by `extra` first.

    Shares of a class without samples are zero.
    """
    raised = counts.clamp_min(0) + extra
    return raised / raised.sum(0).clamp_min(1)


def decay_value(value: float, factor: float, round: int) -> float:
    """Return a value that is multiplied by the factor in every round after the first."""
    return value * factor ** (round - 1)


def diversity(noise: Tensor, z: Tensor) -> Tensor:
    """FedGen's term against collapse: exp(-mean_ij ||eps_i - eps_j||^2_mean |z_i - z_j|_mean)."""
    noise_distance = (noise[:, None] - noise[None]).square().mean(-1)  # (B, B)
    z_distance = (z[:, None] - z[None]).abs().mean(-1)
    return (-(noise_distance * z_distance).mean()).exp()


def distillation_kl(logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL( target || prediction ), averaged over the batch; the target has no gradient."""
    target = target_logits.detach().log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), target, reduction="batchmean", log_target=True)


def log_mean_probability(logits: Tensor) -> Tensor:
    """Log of the class probabilities averaged over samples of z, from logits (S, B, C) -> (B, C)."""
    return logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))


def l2_norm(z: Tensor, squared: bool = False) -> Tensor:
    """FedSR's L2R: the mean norm of z (the authors' code), or of its square (their paper). NeurIPS 2022."""
    return (z.square().sum(-1) if squared else z.norm(dim=-1)).mean()


def prototype_distance(features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Mean squared difference to the prototype (C, Z) of the sample's class; zero if that is not `known` (C,).

    FedProto, https://arxiv.org/abs/2105.00243, and FPL's UPCR.
    """
    return ((features - prototypes[labels]).square().mean(-1) * known[labels]).mean()


def cluster_contrast(
    features: Tensor, labels: Tensor, prototypes: Tensor, classes: Tensor, temperature: float
) -> Tensor:
    """FPL's CPCL: mean_i -log of its class's share of sum_j exp(cos(z_i, c_j) / tau), prototypes c (J, Z).

    The term of a sample whose class is not among `classes` (J,) is zero. CVPR 2023, eq. 8.
    """
    similar = F.normalize(features, dim=-1) @ F.normalize(prototypes, dim=-1).T / temperature  # (B, J)
    same_class = labels.unsqueeze(-1) == classes
    same_class = same_class | ~same_class.any(-1, keepdim=True)  # a share of 1, whose log is 0
    return (similar.logsumexp(-1) - similar.masked_fill(~same_class, -torch.inf).logsumexp(-1)).mean()


def first_neighbours(points: Tensor) -> Tensor:
    """FINCH's first partition: points (N, Z) that are linked by their nearest neighbours in cosine share a number (N,).

    Sarfraz et al., https://arxiv.org/abs/1902.11266. Its third link, of points with the same neighbour, is implied.
    """
    directions = F.normalize(points.double(), dim=-1)
    nearest = (directions @ directions.T).fill_diagonal_(-torch.inf).argmax(-1)
    cluster = list(range(len(points)))
    for point, neighbour in enumerate(nearest.tolist()):
        old, new = cluster[point], cluster[neighbour]
        cluster = [new if number == old else number for number in cluster]
    numbers = sorted(set(cluster))
    return torch.tensor([numbers.index(number) for number in cluster])


EPSILON = 1e-6
"""FedFA's constant in every root and denominator."""


def channel_statistics(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel within an image, from (B, C, ...) -> two of (B, C)."""
    flat = features.float().reshape(*features.shape[:2], -1)
    return flat.mean(-1), (flat.var(-1, correction=0) + EPSILON).sqrt()


def widen_variance(statistic: Tensor, over_clients: Tensor | None) -> Tensor:
    """FedFA's variance (C,) of a statistic (B, C): its batch variance times 1 + gamma. https://arxiv.org/abs/2301.12995

    gamma is (1 + 1/v)^-1 of the variance v (C,) over clients, scaled to mean 1; it is 1 if that variance is unknown.
    """
    variance = statistic.var(0, correction=0) + EPSILON
    if over_clients is None:
        return 2 * variance
    weight = 1 / (1 + 1 / (over_clients + EPSILON))
    return (1 + weight / weight.mean()) * variance


def replace_statistics(features: Tensor, mean: Tensor, std: Tensor, new_mean: Tensor, new_std: Tensor) -> Tensor:
    """Replace the channel statistics of features (B, C, ...), each (B, C), by others."""
    flat = features.reshape(*features.shape[:2], -1)
    mean, std, new_mean, new_std = (value.unsqueeze(-1) for value in (mean, std, new_mean, new_std))
    return ((flat - mean) / std * new_std + new_mean).to(features.dtype).reshape(features.shape)
