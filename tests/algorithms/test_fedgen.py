"""FedGen: a generator that weighs each head by its share of the class, and what clients distil from it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcir import InputError
from fedcir.algorithms import make_algorithm
from fedcir.algorithms.fedgen import FedGen
from fedcir.config import AlgorithmConfig
from fedcir.models.builder import NetworkBuilder
from fedcir.models.classifier import Generator
from fedcir.types import ClientReply, LocalContext, Modules, ServerContext, ServerState

Kind = Literal["gaussian", "uniform"]
Setting = tuple[Modules, ServerState, ServerContext]

SMALL = {"hidden": 8, "noise": 4}
X, Y = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
COUNTS = [[6.0, 0.0, 1.0], [2.0, 0.0, 3.0]]
SHARES = torch.tensor([[0.75, 0.0, 0.25], [0.25, 0.0, 0.75]])


def setting(algorithm: FedGen, builder: NetworkBuilder) -> Setting:
    ctx = ServerContext(1, 4, 3, 6, "uniform", "average", torch.Generator().manual_seed(0))
    modules = algorithm.build(builder)
    return modules, algorithm.start(modules, ctx), ctx


def replies(state: ServerState, counts: list[list[float]], heads: tuple[int, ...] = (1, 2)) -> list[ClientReply]:
    """A reply for each row of counts, its head moved by a draw from the seed."""
    made = []
    for client, (row, seed) in enumerate(zip(counts, heads, strict=True)):
        model = {name: tensor.clone() for name, tensor in state.shared["model"].items()}
        model["head.weight"] += torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))
        made.append(ClientReply(client, 10, {"model": model, "label_counts": {"counts": torch.tensor(row)}}, {}))
    return made


def after(
    algorithm: FedGen, builder: NetworkBuilder, counts: list[list[float]], heads: tuple[int, ...] = (1, 2)
) -> ServerState:
    modules, state, ctx = setting(algorithm, builder)
    return algorithm.server_step(state, replies(state, counts, heads), modules, ctx)


def gradient(builder: NetworkBuilder, counts: list[list[float]], heads: tuple[int, ...]) -> Tensor:
    """The gradient of the server's first step: Adam's first moment is a tenth of it."""
    state = after(FedGen(generator_steps=1, **SMALL), builder, counts, heads)
    moments = [tensor for name, tensor in state.private["optimizer"].items() if name.endswith(".exp_avg")]
    return torch.cat([10 * moment.flatten() for moment in moments])


def local_context(state: ServerState) -> LocalContext:
    return LocalContext(state.round + 1, 4, 3, 6, state.shared, torch.Generator().manual_seed(0))


def test_the_generator_changes_when_the_head_of_one_client_does(builder: NetworkBuilder) -> None:
    states = [after(FedGen(**SMALL), builder, COUNTS, heads) for heads in ((1, 2), (1, 3), (4, 2))]
    outer = [state.shared["generator"]["outer.weight"] for state in states]
    assert not torch.allclose(outer[0], outer[1])
    assert not torch.allclose(outer[0], outer[2])


def test_shares_change_nothing_when_heads_are_equal(builder: NetworkBuilder) -> None:
    even = gradient(builder, [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], (1, 1))
    skewed = gradient(builder, [[9.0, 0.0, 2.0], [1.0, 5.0, 3.0]], (1, 1))
    torch.testing.assert_close(even, skewed, rtol=1e-4, atol=1e-6)
    assert even.abs().max() > 1e-3


def test_shares_matter_when_heads_differ(builder: NetworkBuilder) -> None:
    even = gradient(builder, [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], (1, 2))
    skewed = gradient(builder, [[9.0, 0.0, 2.0], [1.0, 5.0, 3.0]], (1, 2))
    assert not torch.allclose(even, skewed, rtol=1e-2, atol=1e-4)


def test_only_the_share_of_a_count_matters_not_its_size(builder: NetworkBuilder) -> None:
    few = gradient(builder, [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], (1, 2))
    many = gradient(builder, [[10.0, 20.0, 30.0], [30.0, 20.0, 10.0]], (1, 2))
    torch.testing.assert_close(few, many, rtol=1e-4, atol=1e-6)


def test_a_client_without_samples_of_any_drawn_class_teaches_nothing(builder: NetworkBuilder) -> None:
    alone = gradient(builder, [[4.0, 4.0, 4.0], [0.0, 0.0, 0.0]], (1, 2))
    other = gradient(builder, [[4.0, 4.0, 4.0], [0.0, 0.0, 0.0]], (1, 3))
    torch.testing.assert_close(alone, other)


@pytest.mark.parametrize(("kind", "draw"), [("gaussian", torch.randn), ("uniform", torch.rand)])
def test_the_first_server_step_is_one_of_adam_on_the_weighted_heads(
    builder: NetworkBuilder, kind: Kind, draw: Callable[..., Tensor]
) -> None:
    algorithm = FedGen(generator_steps=1, diversity_weight=0.7, noise_kind=kind, **SMALL)
    _, state, _ = setting(algorithm, builder)
    generator = algorithm.build(builder)["generator"]
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (6,), generator=rng)
    noise = draw(6, 4, generator=rng)
    z = generator(noise, labels, "update")
    loss = torch.zeros(())
    for share, reply in zip(SHARES, replies(state, COUNTS), strict=True):  # sum_k mean_b w_{y,k} CE(h_k(z), y)
        logits = F.linear(z, reply.tensors["model"]["head.weight"], reply.tensors["model"]["head.bias"])
        loss = loss + (share[labels] * F.cross_entropy(logits, labels, reduction="none")).mean()
    apart = [((noise[i] - noise[j]) ** 2).mean() * (z[i] - z[j]).abs().mean() for i in range(6) for j in range(6)]
    optimizer = torch.optim.Adam(generator.parameters(), lr=algorithm.generator_lr)
    (loss + 0.7 * torch.exp(-torch.stack(apart).mean())).backward()
    optimizer.step()
    got = after(algorithm, builder, COUNTS)
    for name, tensor in generator.state_dict().items():
        assert torch.equal(got.shared["generator"][name], got.private["generator"][name])
        torch.testing.assert_close(got.private["generator"][name], tensor, rtol=1e-4, atol=1e-5)


def test_uniform_noise_lies_between_0_and_1_and_gaussian_noise_does_not(builder: NetworkBuilder) -> None:
    generator, rng = FedGen(**SMALL).build(builder)["generator"], torch.Generator().manual_seed(0)
    uniform, gaussian = generator.draw(500, rng, "uniform"), generator.draw(500, rng, "gaussian")
    assert uniform.min() >= 0
    assert uniform.max() <= 1
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.02)
    assert gaussian.min() < -1
    assert float(gaussian.std()) == pytest.approx(1.0, abs=0.05)


def test_the_state_of_the_generators_optimiser_lives_across_rounds(builder: NetworkBuilder) -> None:
    algorithm = FedGen(**SMALL)
    modules, state, ctx = setting(algorithm, builder)
    once = algorithm.server_step(state, replies(state, COUNTS), modules, ctx)
    twice = algorithm.server_step(once, replies(once, COUNTS), modules, replace(ctx, round=2))
    steps = [int(item.private["optimizer"]["0.step"]) for item in (once, twice)]
    assert steps == [algorithm.generator_steps, 2 * algorithm.generator_steps]


def test_the_model_is_the_plain_mean_whatever_the_counts(builder: NetworkBuilder) -> None:
    _, state, _ = setting(FedGen(**SMALL), builder)
    heads = [reply.tensors["model"]["head.weight"].double() for reply in replies(state, COUNTS)]
    got = after(FedGen(**SMALL), builder, COUNTS).shared["model"]["head.weight"]
    assert torch.equal(got, ((heads[0] + heads[1]) / 2).float())


@pytest.mark.parametrize(("size", "counts"), [(7, [3, 2, 2]), (2, [1, 1, 0]), (300, [100, 100, 100])])
def test_a_client_uploads_its_model_and_how_often_it_has_each_class(
    opened: Callable[..., Any], size: int, counts: list[int]
) -> None:
    session, transport = opened(FedGen(**SMALL), sizes=(size, 5))
    (reply,) = transport.train(session.state, [0])
    assert reply.tensors.keys() == {"model", "label_counts"}
    assert reply.tensors["label_counts"].keys() == {"counts"}
    assert reply.tensors["label_counts"]["counts"].tolist() == counts


def test_the_generator_is_off_in_round_1_and_on_from_round_2(trained: Callable[..., Any]) -> None:
    first, *others = trained(FedGen(**SMALL)).records
    assert first.losses.keys() == {"ce", "total"}
    assert [record.losses.keys() for record in others] == [{"ce", "reg", "kd", "total"}] * 2


def test_the_server_sends_no_generator_before_it_was_trained(builder: NetworkBuilder) -> None:
    _, state, _ = setting(FedGen(**SMALL), builder)
    assert state.shared.keys() == {"model"}
    assert after(FedGen(**SMALL), builder, COUNTS).shared.keys() == {"model", "generator"}


@pytest.mark.parametrize(("kind", "draw"), [("gaussian", torch.randn), ("uniform", torch.rand)])
@pytest.mark.parametrize("statistics", ["running", "batch"])
def test_the_terms_of_a_client_and_their_weighted_total(
    builder: NetworkBuilder, statistics: Literal["batch", "running"], kind: Kind, draw: Callable[..., Tensor]
) -> None:
    algorithm = FedGen(0.7, 0.3, noise_kind=kind, generator_statistics=statistics, **SMALL)
    state, modules = after(algorithm, builder, COUNTS), algorithm.build(builder)
    modules["generator"].load_state_dict(state.shared["generator"])
    losses = algorithm.local_loss(modules, X, Y, local_context(state))
    rng, head = torch.Generator().manual_seed(0), modules["model"].head
    labels = torch.randint(3, (6,), generator=rng)
    any_class, same_class = (
        modules["generator"](draw(6, 4, generator=rng), y, statistics).detach() for y in (labels, Y)
    )
    logits = modules["model"](X)
    target, prediction = head(same_class).softmax(-1), logits.softmax(-1)
    wanted = {
        "ce": F.cross_entropy(logits, Y),
        "reg": F.cross_entropy(head(any_class), labels),
        "kd": (target * (target / prediction).log()).sum(-1).mean(),  # KL(p(.|G(y)) || p(.|x))
    }
    assert losses.terms.keys() == wanted.keys()
    for name, want in wanted.items():
        torch.testing.assert_close(losses.terms[name], want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses.total, wanted["ce"] + 0.3 * wanted["reg"] + 0.7 * wanted["kd"])


def test_no_gradient_reaches_the_target_of_the_distillation(builder: NetworkBuilder) -> None:
    algorithm = FedGen(**SMALL)
    state, modules = after(algorithm, builder, COUNTS), algorithm.build(builder)
    modules["generator"].load_state_dict(state.shared["generator"])
    modules["generator"].zero_grad()
    algorithm.local_loss(modules, X, Y, local_context(state)).terms["kd"].backward()
    rng = torch.Generator().manual_seed(0)
    torch.randint(3, (6,), generator=rng), torch.randn(6, 4, generator=rng)
    with torch.no_grad():
        target = modules["model"].head(modules["generator"](torch.randn(6, 4, generator=rng), Y, "running")).softmax(-1)
        prediction = modules["model"](X).softmax(-1)
    # With the target held, the gradient of KL(target || softmax(logits)) in the logits is prediction - target.
    torch.testing.assert_close(modules["model"].head.bias.grad, (prediction - target).mean(0), rtol=1e-4, atol=1e-6)
    assert all(p.grad is None for p in modules["generator"].parameters())
    assert modules["model"].encoder[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_a_client_never_writes_into_the_generator(
    builder: NetworkBuilder, statistics: Literal["batch", "running"]
) -> None:
    algorithm = FedGen(generator_statistics=statistics, **SMALL)
    state, modules = after(algorithm, builder, COUNTS), algorithm.build(builder)
    modules["generator"].load_state_dict(state.shared["generator"])
    algorithm.local_loss(modules, X, Y, local_context(state)).total.backward()
    for name, tensor in modules["generator"].state_dict().items():
        assert torch.equal(tensor, state.shared["generator"][name])


def test_both_weights_of_a_client_decay_from_round_to_round(builder: NetworkBuilder) -> None:
    algorithm = FedGen(0.7, 0.3, lambda_decay=0.98, **SMALL)
    state, modules = after(algorithm, builder, COUNTS), algorithm.build(builder)
    modules["generator"].load_state_dict(state.shared["generator"])
    losses = algorithm.local_loss(modules, X, Y, replace(local_context(state), round=3))
    ce, reg, kd = (losses.terms[name] for name in ("ce", "reg", "kd"))
    torch.testing.assert_close(losses.total, ce + 0.98**2 * (0.3 * reg + 0.7 * kd))


def test_the_generators_rate_decays_from_round_to_round_and_its_weights_decay(builder: NetworkBuilder) -> None:
    algorithm = FedGen(generator_steps=1, generator_lr_decay=0.5, generator_weight_decay=0.1, **SMALL)
    plain = FedGen(generator_steps=1, **SMALL)
    (modules, state, ctx), before = setting(algorithm, builder), algorithm.build(builder)["generator"].state_dict()
    ctx = replace(ctx, round=3)
    moved = algorithm.server_step(state, replies(state, COUNTS), modules, ctx).private
    ctx = replace(ctx, rng=torch.Generator().manual_seed(0))
    other = plain.server_step(state, replies(state, COUNTS), modules, ctx).private
    name, gradient = "outer.weight", 10 * other["optimizer"]["3.exp_avg"]
    decayed = 10 * moved["optimizer"]["3.exp_avg"]
    torch.testing.assert_close(decayed, gradient + 0.1 * before[name])
    # Adam's first step is the learning rate along the sign of each gradient: 0.01, and a quarter of it in round 3.
    large = (gradient.abs() > 1e-3) & (decayed.abs() > 1e-3)
    assert large.any()
    for private, rate in ((other, 0.01), (moved, 0.0025)):
        step = (private["generator"][name] - before[name]).abs()[large]
        torch.testing.assert_close(step, torch.full_like(step, rate), rtol=1e-3, atol=1e-6)


def test_the_server_may_draw_only_labels_that_clients_of_the_round_have(
    builder: NetworkBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[set[int]] = []
    plain = Generator.forward

    def watched(self: Generator, noise: Tensor, labels: Tensor, statistics: Any = "running") -> Tensor:
        drawn.append(set(labels.tolist()))
        return plain(self, noise, labels, statistics)

    monkeypatch.setattr(Generator, "forward", watched)
    after(FedGen(generator_steps=20, generator_labels="active", **SMALL), builder, COUNTS)
    assert set.union(*drawn) == {0, 2}  # nobody has class 1
    drawn.clear()
    after(FedGen(generator_steps=20, **SMALL), builder, COUNTS)
    assert set.union(*drawn) == {0, 1, 2}


def test_a_client_may_count_the_labels_of_its_batches_instead(opened: Callable[..., Any]) -> None:
    session, transport = opened(FedGen(label_counts="batches", **SMALL), sizes=(7, 5))
    steps, batch = session.config.local.steps, session.config.local.batch_size
    for _ in range(2):  # the counts of one round are not those of two
        (reply,) = transport.train(session.state, [0])
        assert reply.tensors.keys() == {"model", "label_counts"}
        assert reply.tensors["label_counts"]["counts"].sum() == steps * batch


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lambda_kd": -1.0}, r"algorithm\.lambda_kd must be at least 0"),
        ({"diversity_weight": float("nan")}, r"algorithm\.diversity_weight must be at least 0"),
        ({"generator_steps": 0}, r"algorithm\.generator_steps must be at least 1"),
        ({"generator_lr": 0.0}, r"algorithm\.generator_lr must be a number above 0"),
        ({"noise_kind": "laplace"}, r"algorithm\.noise_kind cannot be 'laplace'"),
    ],
)
def test_a_field_out_of_range_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_algorithm(AlgorithmConfig("fedgen", fields))
