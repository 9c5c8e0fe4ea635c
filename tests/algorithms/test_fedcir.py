"""FedCiR to the letter of the paper."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from fedcir import Algorithm, FedAlign, FedCiR, FedReg, Losses, train
from fedcir.algorithms.fedavg import FedAvg
from fedcir.losses import mixture_nll
from fedcir.models.builder import make_module_builder
from fedcir.models.networks import CNN
from fedcir.types import ClientReply, LocalContext, Modules, ServerContext, ServerState

SMALL = {"hidden": 8, "noise": 4, "gaussian_samples": 16}
CLASSES = 3


@dataclass(frozen=True)
class Probabilistic(FedAvg):
    """The plain probabilistic model, written on its own: cross-entropy on a sampled z."""

    def build(self, builder: Any) -> Modules:
        return {"model": builder.gaussian_classifier(FedCiR.sigma_init, FedCiR.sigma_floor)}

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        mu, sigma = modules["model"].encoder(x)
        loss = F.cross_entropy(modules["model"].head(mu + sigma * torch.randn(mu.shape, generator=ctx.rng)), y)
        return Losses(loss, {"ce": loss})


def trained(algorithm: Algorithm, rounds: int = 3) -> Any:
    torch.manual_seed(0)
    clients = []
    for client in range(3):
        rng = torch.Generator().manual_seed(client)
        images = torch.randn(18, 1, 8, 8, generator=rng) + client
        clients.append((TensorDataset(images, torch.arange(18) % CLASSES),) * 2)
    encoder = CNN(channels=1, width=2)
    return train(
        clients, encoder=encoder, num_classes=CLASSES, algorithm=algorithm, rounds=rounds, local_steps=3, batch_size=6
    )


def equal_models(a: Any, b: Any) -> bool:
    first, second = a.model.state_dict(), b.model.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def setting(algorithm: FedCiR, clients: int = 2) -> tuple[Modules, ServerState, list[ClientReply], ServerContext]:
    """Networks, the first state, and replies of clients whose heads differ."""
    modules = algorithm.build(
        make_module_builder(CNN(channels=1, width=2), torch.zeros(2, 1, 8, 8), CLASSES, 5, seed=0)
    )
    ctx = ServerContext(1, 4, CLASSES, 6, "uniform", "average", torch.Generator().manual_seed(0))
    state = algorithm.start(modules, ctx)
    replies = []
    for client in range(clients):
        model = {name: tensor.clone() for name, tensor in state.shared["model"].items()}
        model["head.weight"] += torch.randn(CLASSES, 5, generator=torch.Generator().manual_seed(client))
        replies.append(ClientReply(client, 10, {"model": model}, {}))
    return modules, state, replies, ctx


def local_context(state: ServerState) -> LocalContext:
    return LocalContext(state.round + 1, 4, CLASSES, 6, state.shared, torch.Generator().manual_seed(0))


def test_both_weights_at_zero_is_the_plain_probabilistic_model_bit_for_bit() -> None:
    assert equal_models(trained(FedCiR(lambda_reg=0.0, lambda_align=0.0, **SMALL)), trained(Probabilistic()))


def test_fedreg_is_fedcir_without_alignment_and_fedalign_without_regulariser() -> None:
    assert equal_models(trained(FedReg(lambda_reg=0.7, **SMALL)), trained(FedCiR(0.7, 0.0, **SMALL)))
    assert equal_models(trained(FedAlign(lambda_align=0.1, **SMALL)), trained(FedCiR(0.0, 0.1, **SMALL)))
    assert not equal_models(trained(FedReg(**SMALL)), trained(FedAlign(lambda_align=0.1, **SMALL)))


def test_the_ablations_do_not_take_the_weight_that_they_fix() -> None:
    with pytest.raises(TypeError):
        FedReg(lambda_align=0.1)
    with pytest.raises(TypeError):
        FedAlign(lambda_reg=0.1)


def test_the_regularisers_are_off_in_round_1_and_on_from_round_2() -> None:
    records = trained(FedCiR(lambda_align=0.1, **SMALL)).records
    assert records[0].losses.keys() == {"ce", "total"}
    assert records[1].losses.keys() == {"ce", "reg", "align", "total"}


def test_the_total_is_the_weighted_sum_of_the_terms() -> None:
    algorithm = FedCiR(lambda_reg=0.3, lambda_align=0.2, **SMALL)
    modules, state, replies, ctx = setting(algorithm)
    after = algorithm.server_step(state, replies, modules, ctx)
    losses = algorithm.local_loss(modules, torch.randn(6, 1, 8, 8), torch.arange(6) % 3, local_context(after))
    want = losses.terms["ce"] + 0.3 * losses.terms["reg"] + 0.2 * losses.terms["align"]
    torch.testing.assert_close(losses.total, want)


def reached_by(term: str) -> tuple[set[str], set[str]]:
    """The parameters that the gradient of one term reaches, and all of the model's."""
    algorithm = FedCiR(**SMALL)
    modules, state, replies, ctx = setting(algorithm)
    after = algorithm.server_step(state, replies, modules, ctx)
    for module in modules.values():
        module.zero_grad()
    losses = algorithm.local_loss(modules, torch.randn(6, 1, 8, 8), torch.arange(6) % 3, local_context(after))
    losses.terms[term].backward()
    reached = {f"{m}.{n}" for m in modules for n, p in modules[m].named_parameters() if p.grad is not None}
    return reached, {f"model.{n}" for n, _ in modules["model"].named_parameters()}


def test_the_gradient_of_the_regulariser_reaches_the_head_only() -> None:
    assert reached_by("reg")[0] == {"model.head.weight", "model.head.bias"}


def test_the_gradient_of_the_alignment_reaches_the_encoder_only() -> None:
    reached, everything = reached_by("align")
    assert reached == {name for name in everything if not name.startswith("model.head.")}


def test_a_client_uploads_its_model_and_nothing_else() -> None:
    for algorithm in (FedCiR, FedReg, FedAlign):
        assert (*algorithm.trains, *algorithm.sends) == ("model",)


def test_the_server_sends_only_what_the_regularisers_need() -> None:
    groups = {}
    for algorithm in (FedCiR(**SMALL), FedReg(**SMALL), FedAlign(**SMALL)):
        modules, state, replies, ctx = setting(algorithm)
        assert state.shared.keys() == {"model"}
        groups[type(algorithm)] = algorithm.server_step(state, replies, modules, ctx).shared.keys()
    assert groups[FedCiR] == {"model", "generator", "gaussians"}
    assert groups[FedReg] == {"model", "generator"}
    assert groups[FedAlign] == {"model", "gaussians"}


def test_the_first_server_step_is_one_of_adam_on_the_mixture_of_the_clients_heads() -> None:
    algorithm = FedCiR(generator_steps=1, **SMALL)
    modules, state, replies, ctx = setting(algorithm)
    generator = algorithm.build(make_module_builder(CNN(channels=1, width=2), torch.zeros(2, 1, 8, 8), CLASSES, 5, 0))[
        "generator"
    ]
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (6,), generator=rng)
    z = generator(torch.randn(6, 4, generator=rng), labels, "update")
    heads = [(r.tensors["model"]["head.weight"], r.tensors["model"]["head.bias"]) for r in replies]
    optimizer = torch.optim.Adam(generator.parameters(), lr=algorithm.generator_lr)
    mixture_nll(torch.stack([F.linear(z, weight, bias) for weight, bias in heads]), labels).backward()
    optimizer.step()
    after = algorithm.server_step(state, replies, modules, ctx).private["generator"]
    for name, tensor in generator.state_dict().items():
        torch.testing.assert_close(after[name], tensor)


def test_the_generator_depends_on_every_head_not_on_their_mean() -> None:
    algorithm = FedCiR(**SMALL)
    modules, state, replies, ctx = setting(algorithm)
    apart = algorithm.server_step(state, replies, modules, ctx)
    modules, state, replies, ctx = setting(algorithm)
    mean = {
        n: (replies[0].tensors["model"][n] + replies[1].tensors["model"][n]) / 2 for n in ("head.weight", "head.bias")
    }
    merged = [replace(reply, tensors={"model": {**reply.tensors["model"], **mean}}) for reply in replies]
    together = algorithm.server_step(state, merged, modules, ctx)
    assert torch.allclose(apart.shared["model"]["head.weight"], together.shared["model"]["head.weight"])
    assert not torch.allclose(apart.shared["generator"]["outer.weight"], together.shared["generator"]["outer.weight"])


def test_the_class_gaussians_are_those_of_one_batch_with_all_classes_equally() -> None:
    algorithm = FedCiR(gaussian_floor=1e-6, **SMALL)
    modules, state, replies, ctx = setting(algorithm)
    after = algorithm.server_step(state, replies, modules, ctx)
    rng = torch.Generator().manual_seed(0)
    for _ in range(algorithm.generator_steps):
        torch.randint(CLASSES, (6,), generator=rng)
        torch.randn(6, 4, generator=rng)
    noise = torch.randn(CLASSES * 16, 4, generator=rng)
    labels = torch.tensor([0] * 16 + [1] * 16 + [2] * 16)
    with torch.no_grad():
        z = modules["generator"](noise, labels, "batch").numpy().reshape(CLASSES, 16, 5)
    np.testing.assert_allclose(after.shared["gaussians"]["mean"], z.mean(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after.shared["gaussians"]["std"], z.std(1), rtol=1e-4, atol=1e-6)


def test_a_collapsed_generator_does_not_blow_up_the_alignment() -> None:
    algorithm = FedCiR(**SMALL)
    modules, state, replies, ctx = setting(algorithm)
    state.private["generator"]["outer.weight"].zero_()
    frozen = replace(algorithm, generator_lr=1e-30)
    after = frozen.server_step(state, replies, modules, ctx)
    assert (after.shared["gaussians"]["std"] == torch.tensor(algorithm.gaussian_floor)).all()
    losses = algorithm.local_loss(modules, torch.randn(6, 1, 8, 8), torch.arange(6) % 3, local_context(after))
    assert torch.isfinite(losses.terms["align"])


def test_the_state_of_the_generators_optimiser_lives_across_rounds() -> None:
    algorithm = FedCiR(**SMALL)
    modules, state, replies, ctx = setting(algorithm)
    once = algorithm.server_step(state, replies, modules, ctx)
    twice = algorithm.server_step(once, replies, modules, replace(ctx, round=2))
    assert int(once.private["optimizer"]["0.step"]) == algorithm.generator_steps
    assert int(twice.private["optimizer"]["0.step"]) == 2 * algorithm.generator_steps


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_a_client_never_writes_into_the_generator(statistics: str) -> None:
    algorithm = FedCiR(generator_statistics=statistics, **SMALL)
    modules, state, replies, ctx = setting(algorithm)
    after = algorithm.server_step(state, replies, modules, ctx)
    before = {name: tensor.clone() for name, tensor in modules["generator"].state_dict().items()}
    algorithm.local_loss(modules, torch.randn(6, 1, 8, 8), torch.arange(6) % 3, local_context(after)).total.backward()
    assert all(torch.equal(before[name], tensor) for name, tensor in modules["generator"].state_dict().items())


def test_inference_takes_the_mean_or_averages_the_probabilities_of_samples() -> None:
    algorithm = FedCiR(**SMALL)
    modules, state, _, _ = setting(algorithm)
    model, x = modules["model"].eval(), torch.randn(4, 1, 8, 8)
    with torch.no_grad():
        mu, sigma = model.encoder(x)
        assert torch.equal(algorithm.predict(modules, x, local_context(state)), model.head(mu))
        sampled = replace(algorithm, eval_samples=50).predict(modules, x, local_context(state))
        noise = torch.randn(50, 1, 5, generator=torch.Generator().manual_seed(0))  # the same for all images
        want = torch.stack([model.head(mu + sigma * eps).softmax(-1) for eps in noise]).mean(0)
    torch.testing.assert_close(sampled.exp(), want)
