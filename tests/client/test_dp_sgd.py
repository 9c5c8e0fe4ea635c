"""Steps that are private for each example, against a loop over examples in plain torch."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcir.algorithms import make_algorithm
from fedcir.client.uploads import sample_poisson_batch, set_private_gradients
from fedcir.config import Config, PrivacyConfig, config_from_tables
from fedcir.data.federation import open_federation
from fedcir.errors import InputError
from fedcir.models.networks import CNN
from fedcir.models.normalisation import InstanceNorm
from fedcir.runtime.rounds import SerialTransport, run_rounds
from fedcir.runtime.session import Session, make_trainer, open_session
from fedcir.runtime.simulation import check_run
from fedcir.server.accounting import Accountant
from fedcir.types import LocalContext

Tiny = Callable[..., Config]
ON = ("privacy.clip=1", "privacy.noise=1", "privacy.unit=example", "model.norm=group")


def context(batch_size: int) -> LocalContext:
    return LocalContext(1, 1, 3, batch_size, {}, torch.Generator())


def opened(config: Config) -> tuple[Session, SerialTransport]:
    algorithm, federation = make_algorithm(config.algorithm), open_federation(config)
    session = open_session(config, algorithm, federation)
    return session, SerialTransport(make_trainer(session.config, algorithm, federation.builder), federation.clients)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("norm", [torch.nn.GroupNorm(2, 4), InstanceNorm(4)])
def test_gradients_are_those_of_single_examples_each_scaled_to_the_clip(
    layout: torch.memory_format, norm: torch.nn.Module
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), norm, torch.nn.Flatten())
    model.append(torch.nn.Linear(4 * 36, 3)).to(memory_format=layout)  # type: ignore[call-overload]
    x, y = torch.randn(5, 3, 8, 8), torch.tensor([0, 1, 2, 1, 0])
    clip, expected = 0.8, {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    scales = []
    for image, label in zip(x, y, strict=True):
        model.zero_grad()
        F.cross_entropy(model(image[None]), label[None]).backward()  # type: ignore[no-untyped-call]
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
        scales.append(min(1.0, clip / norm))
        for name, p in model.named_parameters():
            assert p.grad is not None
            expected[name] += scales[-1] * p.grad / 4
    rng = np.random.default_rng(0)
    set_private_gradients(model, x, y, context(4), PrivacyConfig(clip=clip), rng)
    assert min(scales) < 1, "the clip does something"
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], atol=1e-6, rtol=1e-4)
        assert p.grad is not None
        assert p.grad.stride() == p.stride()


def test_without_any_example_there_is_noise_of_the_asked_for_size() -> None:
    model = torch.nn.Linear(200, 200)
    settings = PrivacyConfig(clip=2.0, noise=3.0, unit="example")
    nothing = torch.empty(0, 200), torch.empty(0, dtype=torch.int64)
    set_private_gradients(model, *nothing, context(10), settings, np.random.default_rng(0))
    assert model.weight.grad is not None
    assert model.weight.grad.std().item() == pytest.approx(2.0 * 3.0 / 10, rel=0.02)


def test_each_example_is_drawn_by_itself() -> None:
    rng = np.random.default_rng(0)
    drawn = [sample_poisson_batch(20, 5, rng) for _ in range(500)]
    assert np.mean([len(item) for item in drawn]) == pytest.approx(5, abs=0.3)
    assert np.var([len(item) for item in drawn]) == pytest.approx(20 * 0.25 * 0.75, abs=0.7)
    assert len(sample_poisson_batch(3, 8, rng)) == 3, "a client with fewer examples than a batch takes all"


def test_epsilon_is_that_of_the_example_with_the_highest_chance(tiny: Tiny) -> None:
    config = tiny("fedavg", *ON, "server.rounds=2", "partition.max_samples=20", "local.steps=3")
    session, transport = opened(config)
    records = list(run_rounds(session, transport))
    assert [record.epsilon for record in records] == [Accountant(1.0, 1e-5, 8 / 20).epsilon(3 * n) for n in (1, 2)]
    assert records[0].losses == {}
    assert records[0].flops > 0
    assert records[0].dropped == {}


def test_a_run_is_repeatable_and_another_at_a_site(tiny: Tiny) -> None:
    session, transport = opened(tiny("fedavg", *ON))
    one, two = (next(iter(transport.train(session.state, (0,)))).tensors["model"]["head.bias"] for _ in range(2))
    transport.trainer.deployed = True
    three = next(iter(transport.train(session.state, (0,)))).tensors["model"]["head.bias"]
    assert torch.equal(one, two)
    assert not torch.equal(one, three)


@pytest.mark.parametrize("norm", ["group", "invariant", "standardised"])
def test_every_norm_but_batchnorm_goes_with_it(norm: str) -> None:
    model = torch.nn.Sequential(CNN(3, 2, norm=norm), torch.nn.LazyLinear(3))
    x, y = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 1])
    model(x)
    set_private_gradients(model, x, y, context(4), PrivacyConfig(clip=1.0), np.random.default_rng(0))
    assert all(p.grad is not None for p in model.parameters())


def test_what_it_does_not_cover_is_refused_in_words(tiny: Tiny) -> None:
    for method in ("fedcir", "fedprox", "scaffold"):
        with pytest.raises(InputError, match=f"{method} does not minimise the plain loss of each example"):
            opened(tiny(method, *ON))
    pooling = tiny("centralized", *ON)
    with pytest.raises(InputError, match="centralized has all data in one place"):
        check_run(pooling, make_algorithm(pooling.algorithm), open_federation(pooling))
    with pytest.raises(InputError, match=r"set local\.prior=none"):
        opened(tiny("fedavg", *ON, "local.prior=client"))
    with pytest.raises(InputError, match=r"set model\.norm=group"):
        opened(tiny("fedavg", *ON, "model.norm=batch"))
    with pytest.raises(InputError, match=r"leave out privacy\.place and privacy\.adaptive"):
        config_from_tables({"privacy": {"clip": 1.0, "noise": 1.0, "unit": "example", "place": "client"}})
    opened(replace(tiny("fedavgm", *ON), server=replace(tiny().server, weighting="samples")))
