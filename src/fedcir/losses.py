"""Every formula of the FedCiR paper and of its baselines, one pure function each.

FedCiR: Li et al., "FedCiR: Client-Invariant Representation Learning for Federated Non-IID Features",
https://arxiv.org/abs/2308.15786. The others name their paper where they stand.

Shapes: B samples, C classes, Z dimensions of the representation, K clients, S generated samples a class.
"""

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

    The log of the mixture of probabilities: neither the mean of cross-entropies nor that of mean logits.
    """
    clients, batch, _ = logits.shape
    log_likelihood = (
        logits.log_softmax(-1).gather(-1, labels.expand(clients, batch).unsqueeze(-1)).squeeze(-1)
    )  # (K, B)
    prior = logits.new_full((clients,), 1 / clients) if weights is None else weights
    return -(log_likelihood + prior.log().unsqueeze(-1)).logsumexp(0).mean()


def balanced_cross_entropy(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Cross-entropy of logits + log n_y, from samples by class (C,): the logits learn to do without the label shares.

    The gradient of a class without samples is zero. Balanced softmax, https://arxiv.org/abs/2007.10740
    """
    return F.cross_entropy(logits + counts.log(), labels)


def label_margins(counts: Tensor, tau: float) -> Tensor:
    """FedLC's margin of each class, tau n_y^(-1/4), from samples by class (C,). https://arxiv.org/abs/2209.00189

    A class without samples counts as 1e-8 of one, so that its margin is finite: 100 tau.
    """
    return tau * counts.float().clamp_min(1e-8) ** -0.25


def cross_entropy_to_others(logits: Tensor, labels: Tensor) -> Tensor:
    """mean_i -log( e^f_y / sum_{c != y} e^f_c ): FedLC's as its paper prints it. It has no lower bound."""
    own = labels.unsqueeze(-1)  # (B, 1)
    return (logits.scatter(-1, own, -torch.inf).logsumexp(-1) - logits.gather(-1, own).squeeze(-1)).mean()


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
    clients, batch, _ = logits.shape
    nll = -logits.log_softmax(-1).gather(-1, labels.expand(clients, batch).unsqueeze(-1)).squeeze(-1)  # (K, B)
    return (class_share[:, labels] * nll).mean(1).sum()


def diversity(noise: Tensor, z: Tensor) -> Tensor:
    """FedGen's term against collapse: exp(-mean_ij ||eps_i - eps_j||^2_mean |z_i - z_j|_mean)."""
    noise_distance = (noise[:, None] - noise[None]).square().mean(-1)  # (B, B)
    z_distance = (z[:, None] - z[None]).abs().mean(-1)
    return (-(noise_distance * z_distance).mean()).exp()


def distillation_kl(logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL( target || prediction ), the mean over the batch; no gradient reaches the target."""
    return F.kl_div(
        logits.log_softmax(-1), target_logits.detach().log_softmax(-1), reduction="batchmean", log_target=True
    )


def l2_norm(z: Tensor, squared: bool = False) -> Tensor:
    """FedSR's L2R: the mean length of z (the authors' code), or of its square (their paper). NeurIPS 2022."""
    return (z.square().sum(-1) if squared else z.norm(dim=-1)).mean()
