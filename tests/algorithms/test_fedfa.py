"""FedFA: what it adds to features by hand, what travels, and FedAvg where it is switched off."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcir import FedAvg, FedFA, InputError
from fedcir.losses import EPSILON
from fedcir.models.builder import NetworkBuilder, make_module_builder
from fedcir.models.networks import CNN
from fedcir.runtime.rounds import run_rounds
from fedcir.types import ClientReply, Groups, LocalContext, ServerContext

X = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3


@pytest.fixture(scope="module")
def images() -> NetworkBuilder:
    return make_module_builder(CNN(channels=1, width=2), X, 3, None, seed=0)


def context(received: Groups | None = None) -> LocalContext:
    return LocalContext(2, 4, 3, 6, received or {}, torch.Generator().manual_seed(7))


def test_with_probability_zero_it_is_fedavg_bit_for_bit(
    trained: Callable[..., Any], same_model: Callable[..., bool]
) -> None:
    off = trained(FedFA(probability=0.0))
    assert same_model(off, trained(FedAvg()))
    assert not same_model(off, trained(FedFA()))


def entering(part: nn.Module, steps: Callable[[], object]) -> list[Tensor]:
    """What enters a part of a network while these steps are taken."""
    seen: list[Tensor] = []
    with part.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach())):
        steps()
    return seen


def variances(**others: Tensor) -> Groups:
    ones = {f"{stage}.{name}": torch.ones(2 * 2**stage) for stage in range(3) for name in ("mean", "std")}
    return {"feature_variances": {**ones, **others}}


def test_features_get_the_drawn_statistics_as_numpy_has_them(images: NetworkBuilder) -> None:
    algorithm, over_clients = (
        FedFA(probability=1.0),
        {"mean": torch.tensor([0.1, 3.0]), "std": torch.tensor([2.0, 0.5])},
    )
    modules = algorithm.build(images)
    ctx = context(variances(**{f"0.{name}": tensor for name, tensor in over_clients.items()}))
    plain: list[Tensor] = []
    encoder = modules["model"].encoder
    (changed,) = entering(
        encoder.convs[1],
        lambda: plain.extend(entering(encoder.ends[0], lambda: algorithm.local_loss(modules, X, Y, ctx))),
    )
    x, rng = plain[0].double().numpy(), torch.Generator().manual_seed(7)
    torch.rand((), generator=rng)  # whether the stage changes anything
    statistics = {"mean": x.mean((2, 3)), "std": np.sqrt(x.var((2, 3)) + EPSILON)}
    new = {}
    for name, value in statistics.items():
        weight = 1 / (1 + 1 / over_clients[name].double().numpy())
        gamma = 2 * weight / weight.sum()
        new[name] = value + torch.randn(6, 2, generator=rng).numpy() * np.sqrt((1 + gamma) * value.var(0))
    old_mean, old_std, mean, std = (item[..., None, None] for item in (*statistics.values(), *new.values()))
    np.testing.assert_allclose(changed, (x - old_mean) / old_std * std + mean, rtol=1e-3, atol=1e-3)


def test_channels_in_which_clients_differ_vary_more(images: NetworkBuilder) -> None:
    algorithm = FedFA(probability=1.0)
    modules = algorithm.build(images)

    def spread(received: Groups) -> Tensor:
        contexts = [replace(context(received), rng=torch.Generator().manual_seed(seed)) for seed in range(30)]
        seen = entering(
            modules["model"].encoder.convs[1], lambda: [algorithm.local_loss(modules, X, Y, ctx) for ctx in contexts]
        )
        return torch.stack([x.mean((2, 3)) for x in seen]).std(0).mean(0)

    alike, uneven = spread(variances()), spread(variances(**{"0.mean": torch.tensor([1.0, 1e-9])}))
    assert uneven[0] > alike[0]
    assert uneven[1] < alike[1]


def test_evaluation_changes_nothing(images: NetworkBuilder) -> None:
    modules = FedFA(probability=1.0).build(images)
    model = modules["model"].eval()
    with torch.no_grad():
        assert torch.equal(FedFA().predict(modules, X, context()), FedAvg().predict({"model": model}, X, context()))


def test_a_client_keeps_its_running_statistics_and_sends_a_copy(opened: Callable[..., Any]) -> None:
    session, transport = opened(FedFA())
    first, second = (next(iter(transport.train(session.state, [0]))) for _ in range(2))
    assert first.tensors.keys() == {"model", "feature_statistics"}
    sent = first.tensors["feature_statistics"]
    assert {name: list(tensor.shape) for name, tensor in sent.items()} == {"0.mean": [6], "0.std": [6]}
    assert sent["0.mean"].abs().max() > 0
    assert torch.equal(sent["0.mean"], second.tensors["feature_statistics"]["0.mean"])  # the same round again
    kept = transport.store.load(0, 2)["statistics"]
    assert all(torch.equal(kept[name], sent[name]) for name in sent)


def test_the_next_round_goes_on_from_the_statistics_that_were_kept(opened: Callable[..., Any]) -> None:
    session, transport = opened(FedFA(probability=1.0, momentum=0.0), rounds=2)
    for _ in run_rounds(session, transport):
        pass
    latest = [transport.store.load(client, 3)["statistics"]["0.mean"] for client in (0, 1, 2)]
    expected = torch.stack(latest).var(0, correction=0)
    assert torch.equal(session.state.shared["feature_variances"]["0.mean"], expected)
    assert expected.min() < expected.max()


def test_the_server_shares_the_variance_of_each_channel_over_clients(builder: NetworkBuilder) -> None:
    algorithm = FedFA()
    modules = algorithm.build(builder)
    ctx = ServerContext(1, 4, 3, 6, "uniform", "average", torch.Generator())
    state = algorithm.start(modules, ctx)
    assert state.shared.keys() == {"model"}

    def reply(client: int, mean: list[float]) -> ClientReply:
        statistics = {"0.mean": torch.tensor(mean), "0.std": torch.ones(2)}
        return ClientReply(client, 5, {"model": state.shared["model"], "feature_statistics": statistics}, {})

    after = algorithm.server_step(state, iter([reply(0, [1.0, 5.0]), reply(1, [3.0, 5.0])]), modules, ctx)
    assert after.shared["feature_variances"]["0.mean"].tolist() == [1.0, 0.0]
    assert after.shared["feature_variances"]["0.std"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("fields", [{"probability": 1.5}, {"probability": float("nan")}, {"momentum": 1.0}])
def test_a_field_that_is_out_of_range_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(InputError, match=rf"algorithm\.{next(iter(fields))} must be"):
        FedFA(**fields)
