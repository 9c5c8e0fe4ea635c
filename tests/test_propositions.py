"""The two bounds behind FedCiR, on a mixture whose densities are known: integrals by quadrature on a fine grid."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcir.losses import gaussian_kl

CLIENTS, CLASSES, SAMPLES = 3, 4, 5
GRID = torch.linspace(-40, 40, 16001, dtype=torch.float64)
STEP = 80 / 16000

RNG = np.random.default_rng(0)
# Client k sees class y around 2y, moved by its own shift: feature shift with the same labels everywhere.
MU = torch.from_numpy(2.0 * np.arange(CLASSES) + RNG.normal(0, 1, (CLIENTS, CLASSES)))  # (K, C)
SIGMA = torch.from_numpy(RNG.uniform(0.3, 1.5, (CLIENTS, CLASSES)))
# The encoder-level version: p(z|x) of five samples for each client and class.
MU_X = MU[..., None] + torch.from_numpy(RNG.normal(0, 0.7, (CLIENTS, CLASSES, SAMPLES)))  # (K, C, N)
SIGMA_X = torch.from_numpy(RNG.uniform(0.2, 0.8, (CLIENTS, CLASSES, SAMPLES)))

REFERENCES = {
    "near": (2.0 * torch.arange(4.0), torch.ones(4)),
    "one for all classes": (torch.full((4,), 3.0), torch.full((4,), 3.0)),
    "far off": (torch.tensor([20.0, -20.0, 9.0, -30.0]), torch.tensor([0.5, 2.0, 10.0, 1.0])),
    "narrow": (2.0 * torch.arange(4.0), torch.full((4,), 0.05)),
    "wide": (torch.zeros(4), torch.full((4,), 100.0)),
}


def integral(values: Tensor) -> Tensor:
    return values.sum(-1) * STEP


def log_density(mu: Tensor, sigma: Tensor) -> Tensor:
    """log N(z; mu, sigma^2) on the grid, (..., G)."""
    return (
        -0.5 * ((GRID - mu[..., None]) / sigma[..., None]).square() - (sigma[..., None] * math.sqrt(2 * math.pi)).log()
    )


def mixed(log_p: Tensor, dim: int) -> Tensor:
    """The log of the uniform mixture over a dimension."""
    return log_p.logsumexp(dim) - math.log(log_p.shape[dim])


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return integral(log_p.exp() * (log_p - log_q))


def moment_matched() -> tuple[Tensor, Tensor]:
    """The Gaussian nearest to each p(z|y): the mixture's own mean and standard deviation."""
    mean = MU.mean(0)
    return mean, ((SIGMA.square() + MU.square()).mean(0) - mean.square()).sqrt()


def information_of_labels() -> float:
    """I(Y;Z) with uniform labels."""
    by_class = mixed(log_density(MU, SIGMA), 0)  # log p(z|y), (C, G)
    return kl(by_class, mixed(by_class, 0)).mean().item()


def regulariser(log_head: Tensor) -> float:
    """L_reg: E -log p(y|z) over uniform y and z ~ p(z|y), for a head's log-probabilities (C, G)."""
    by_class = mixed(log_density(MU, SIGMA), 0)
    return -integral(by_class.exp() * log_head).mean().item()


def test_the_grid_holds_all_the_mass() -> None:
    for mu, sigma in ((MU, SIGMA), (MU_X, SIGMA_X)):
        mass = integral(log_density(mu, sigma).exp())
        torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_regulariser_bounds_label_information_for_any_linear_head(scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    slope, bias = torch.from_numpy(scale * rng.normal(size=(2, CLASSES, 1)))
    log_head = (slope * GRID + bias).log_softmax(0)
    assert math.log(CLASSES) - information_of_labels() < regulariser(log_head)


def test_the_regulariser_is_tight_for_the_bayes_head() -> None:
    by_class = mixed(log_density(MU, SIGMA), 0)
    bayes = by_class.log_softmax(0)  # p(y|z) under uniform labels
    assert regulariser(bayes) == pytest.approx(math.log(CLASSES) - information_of_labels(), abs=1e-9)


def client_information(log_p: Tensor) -> float:
    """I(Z;K|Y) from log p(z|y,k), (K, C, G), with uniform clients and labels."""
    return kl(log_p, mixed(log_p, 0)).mean().item()


@pytest.mark.parametrize("name", REFERENCES)
def test_the_alignment_bounds_client_information_by_the_gap_of_the_reference(name: str) -> None:
    mu_ref, sigma_ref = (values.double() for values in REFERENCES[name])
    align = gaussian_kl(MU[..., None], SIGMA[..., None], mu_ref[:, None], sigma_ref[:, None]).mean().item()
    log_p = log_density(MU, SIGMA)
    information = client_information(log_p)
    gap = kl(mixed(log_p, 0), log_density(mu_ref, sigma_ref)).mean().item()  # KL(p(z|y) || q(z|y))
    assert align > information > 0
    assert align == pytest.approx(information + gap)


def test_the_moment_matched_reference_gives_the_smallest_alignment() -> None:
    def align(mu: Tensor, sigma: Tensor) -> float:
        return gaussian_kl(MU[..., None], SIGMA[..., None], mu[:, None], sigma[:, None]).mean().item()

    mean, std = moment_matched()
    best = align(mean, std)
    assert best >= client_information(log_density(MU, SIGMA))
    for move, stretch in ((0.1, 1.0), (-0.1, 1.0), (0.0, 1.1), (0.0, 0.9)):
        assert align(mean + move, std * stretch) > best


def test_alike_clients_have_no_client_information_and_no_alignment_to_their_own_gaussian() -> None:
    mu, sigma = MU[:1].expand(CLIENTS, -1), SIGMA[:1].expand(CLIENTS, -1)
    assert client_information(log_density(mu, sigma)) == pytest.approx(0, abs=1e-12)
    assert gaussian_kl(mu[..., None], sigma[..., None], MU[0, :, None], SIGMA[0, :, None]).abs().max() < 1e-12


@pytest.mark.parametrize("name", REFERENCES)
def test_the_alignment_of_single_samples_bounds_client_information_too(name: str) -> None:
    mu_ref, sigma_ref = (values.double() for values in REFERENCES[name])
    align = gaussian_kl(MU_X[..., None], SIGMA_X[..., None], mu_ref[:, None, None], sigma_ref[:, None, None])
    log_x = log_density(MU_X, SIGMA_X)  # log p(z|x), (K, C, N, G)
    log_p = mixed(log_x, 2)  # log p(z|y,k)
    by_class = mixed(log_p, 0)
    information = client_information(log_p)
    within = kl(log_x, log_p[:, :, None]).mean().item()  # I(Z;X|Y,K), which the encoder adds
    gap = kl(by_class, log_density(mu_ref, sigma_ref)).mean().item()
    assert align.mean().item() > information > 0
    assert align.mean().item() == pytest.approx(information + within + gap)
