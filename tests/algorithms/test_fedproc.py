"""FedProc: prototypes by hand, the ramp by hand, and a first round that is FedAvg's."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcir import FedAvg, InputError
from fedcir.algorithms.fedproc import FedProc, merge_prototype_sums
from fedcir.models.builder import NetworkBuilder
from fedcir.runs.reader import load_run
from fedcir.runtime.rounds import run_rounds
from fedcir.types import ClientReply, LocalContext, ServerContext, ServerState, Tensors

X, Y = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
PROTOTYPES = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


def context(round: int, total: int = 4, broadcast: dict[str, Tensors] | None = None) -> LocalContext:
    return LocalContext(round, total, 3, 6, broadcast or {}, torch.Generator().manual_seed(0))


def summary(sums: list[list[float]], counts: list[float]) -> Tensors:
    return {"sums": torch.tensor(sums), "counts": torch.tensor(counts)}


def unit(rows: Any) -> Any:
    rows = np.asarray(rows, dtype=np.float64)
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)


def test_the_first_round_is_fedavgs_bit_for_bit(opened: Callable[..., Any], same_model: Callable[..., bool]) -> None:
    (one, real), (other, plain) = opened(FedProc()), opened(FedAvg())
    record, reference = next(run_rounds(one, real)), next(run_rounds(other, plain))
    assert record.losses == reference.losses
    assert same_model(one.state.shared["model"], other.state.shared["model"])
    assert one.state.shared.keys() == {"model", "prototypes"}


def test_the_contrast_is_on_from_round_2(trained: Callable[..., Any]) -> None:
    first, *others = trained(FedProc()).records
    assert first.losses.keys() == {"ce", "total"}
    assert [record.losses.keys() for record in others] == [{"ce", "contrast", "total"}] * 2


def test_the_contrast_is_the_cross_entropy_of_cosines_to_the_prototypes(builder: NetworkBuilder) -> None:
    modules = FedProc().build(builder)
    losses = FedProc().local_loss(modules, X, Y, context(2, broadcast={"prototypes": {"mean": PROTOTYPES}}))
    with torch.no_grad():
        cosines = unit(modules["model"].encoder(X)) @ unit(PROTOTYPES).T
    nll = np.log(np.exp(cosines).sum(-1)) - cosines[np.arange(6), Y.numpy()]
    assert losses.terms["contrast"].item() == pytest.approx(nll.mean(), rel=1e-5)


@pytest.mark.parametrize(("round", "weight"), [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)])
def test_the_weight_of_cross_entropy_is_the_share_of_rounds_done(
    builder: NetworkBuilder, round: int, weight: float
) -> None:
    losses = FedProc().local_loss(
        FedProc().build(builder), X, Y, context(round, broadcast={"prototypes": {"mean": PROTOTYPES}})
    )
    ce, contrast = losses.terms["ce"].item(), losses.terms["contrast"].item()
    assert losses.total.item() == pytest.approx(weight * ce + (1 - weight) * contrast, rel=1e-6)
    assert ce != pytest.approx(contrast, rel=1e-2)


@pytest.mark.parametrize("round", [1, 2, 4])
def test_a_constant_ramp_weighs_all_rounds_alike(builder: NetworkBuilder, round: int) -> None:
    algorithm = FedProc(ramp="constant", ce_weight=0.3)
    broadcast = {"prototypes": {"mean": PROTOTYPES}}
    losses = algorithm.local_loss(algorithm.build(builder), X, Y, context(round, broadcast=broadcast))
    want = 0.3 * losses.terms["ce"].item() + 0.7 * losses.terms["contrast"].item()
    assert losses.total.item() == pytest.approx(want, rel=1e-6)


def test_without_prototypes_the_loss_is_cross_entropy_whatever_the_ramp(builder: NetworkBuilder) -> None:
    for algorithm in (FedProc(), FedProc(ramp="constant", ce_weight=0.3)):
        losses = algorithm.local_loss(algorithm.build(builder), X, Y, context(1))
        assert losses.terms.keys() == {"ce"}
        assert torch.equal(losses.total, losses.terms["ce"])


@pytest.mark.parametrize("size", [7, 300])  # 300 is more than one batch of evaluation
def test_a_client_sums_normalised_features_in_evaluation_mode_over_all_its_data(
    opened: Callable[..., Any], vectors: Callable[..., Any], size: int
) -> None:
    session, transport = opened(FedProc(), sizes=(size, 5))
    (reply,) = transport.train(session.state, [0])
    model = session.modules["model"]
    model.load_state_dict(reply.tensors["model"])
    x, y = vectors(size, 0).tensors
    with torch.no_grad():
        features = unit(model.eval().encoder(x))
    sums = np.stack([features[y.numpy() == label].sum(0) for label in range(3)])
    got = reply.tensors["prototype_sums"]
    np.testing.assert_allclose(got["sums"], sums, rtol=1e-4, atol=1e-5)
    assert got["counts"].tolist() == [int((y == label).sum()) for label in range(3)]


def test_a_client_without_a_class_sends_a_zero_sum_and_count_for_it(opened: Callable[..., Any]) -> None:
    session, transport = opened(FedProc(), sizes=(2, 9))  # classes 0 and 1
    (reply,) = transport.train(session.state, [0])
    got = reply.tensors["prototype_sums"]
    assert got["counts"].tolist() == [1, 1, 0]
    assert got["sums"][2].tolist() == [0.0] * 6


def test_a_client_uploads_its_model_and_its_prototype_sums_and_nothing_else(opened: Callable[..., Any]) -> None:
    session, transport = opened(FedProc())
    for reply in transport.train(session.state, [0, 1, 2]):
        assert reply.tensors.keys() == {"model", "prototype_sums"}
        shapes = {name: list(tensor.shape) for name, tensor in reply.tensors["prototype_sums"].items()}
        assert shapes == {"sums": [3, 6], "counts": [3]}


A = summary([[3.0, 0.0], [1.0, 1.0], [0.0, 0.0]], [4, 2, 0])
B = summary([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]], [4, 0, 0])


def test_prototypes_are_total_sums_over_total_counts() -> None:
    got = merge_prototype_sums([A, B], torch.full((3, 2), 7.0))
    assert got.tolist() == [[0.5, 0.25], [0.5, 0.5], [7.0, 7.0]]


def test_the_total_is_not_the_mean_of_the_clients_own_prototypes() -> None:
    many, few = summary([[9.0, 0.0]], [9]), summary([[0.0, 1.0]], [1])
    assert merge_prototype_sums([many, few], None)[0].tolist() == pytest.approx([0.9, 0.1])


def test_a_class_that_nobody_has_keeps_its_old_prototype_or_is_zero_without_one() -> None:
    old = torch.tensor([[9.0, 9.0], [9.0, 9.0], [0.25, 0.75]])
    assert merge_prototype_sums([A, B], old)[2].tolist() == [0.25, 0.75]
    assert merge_prototype_sums([A, B], None)[2].tolist() == [0.0, 0.0]


def test_a_zero_prototype_gives_a_finite_loss_and_gradient(builder: NetworkBuilder) -> None:
    modules = FedProc().build(builder)
    losses = FedProc().local_loss(modules, X, Y, context(2, broadcast={"prototypes": {"mean": torch.zeros(3, 6)}}))
    losses.total.backward()
    assert losses.terms["contrast"].item() == pytest.approx(np.log(3), rel=1e-6)
    assert all(torch.isfinite(p.grad).all() for p in modules["model"].parameters())


def test_the_server_keeps_the_prototype_of_a_class_until_somebody_has_it_again(builder: NetworkBuilder) -> None:
    algorithm = FedProc()
    modules = algorithm.build(builder)
    ctx = ServerContext(1, 4, 3, 6, "uniform", "average", torch.Generator())
    state = algorithm.start(modules, ctx)
    assert state.shared.keys() == {"model"}

    def after(state: ServerState, sums: Tensor, counts: list[float]) -> ServerState:
        def replies() -> Iterator[ClientReply]:
            summary = {"sums": sums, "counts": torch.tensor(counts)}
            yield ClientReply(0, 5, {"model": state.shared["model"], "prototype_sums": summary}, {})

        return algorithm.server_step(state, replies(), modules, ctx)

    first = after(state, torch.ones(3, 6), [2.0, 4.0, 1.0])
    assert first.shared["prototypes"]["mean"][:, 0].tolist() == [0.5, 0.25, 1.0]
    second = after(first, torch.tensor([[3.0] * 6, [0.0] * 6, [0.0] * 6]), [3.0, 0.0, 0.0])
    assert second.shared["prototypes"]["mean"][:, 0].tolist() == [1.0, 0.25, 1.0]


def test_a_finished_run_cannot_be_extended_since_the_rounds_enter_the_loss(
    tiny: Callable[..., Any], train: Callable[..., Path], tmp_path: Path
) -> None:
    out = train(tiny("fedproc", "server.rounds=2"), tmp_path / "run")
    with pytest.raises(InputError, match="cannot be extended to 3 rounds, because fedproc depends on their number"):
        train(tiny("fedproc", "server.rounds=3"), out, resume=True)


def test_total_rounds_enter_the_second_round(opened: Callable[..., Any], same_model: Callable[..., bool]) -> None:
    models = []
    for total in (3, 6):
        session, transport = opened(FedProc(), rounds=total)
        rounds = run_rounds(session, transport)
        next(rounds), next(rounds)
        models.append(session.state.shared["model"])
    assert not same_model(*models)


@pytest.mark.parametrize("weight", [-0.1, 1.5, float("nan")])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    with pytest.raises(InputError, match=r"algorithm\.ce_weight must be"):
        FedProc(ramp="constant", ce_weight=weight)


def test_a_projection_head_of_two_layers_and_normalised_features_are_the_papers_network(
    builder: NetworkBuilder,
) -> None:
    plain = FedProc().build(builder)["model"]
    model = FedProc(projection=4, normalised_head=True).build(builder)["model"]
    assert [type(layer).__name__ for layer in model.encoder.encoder.projection] == ["Linear", "ReLU", "Linear"]
    with torch.no_grad():
        features = model.encoder.encoder.projection(plain.encoder(X))
        want = unit(features) @ model.head.weight.numpy().T + model.head.bias.numpy()
        np.testing.assert_allclose(model(X), want, rtol=1e-5, atol=1e-6)
    losses = FedProc(projection=4, normalised_head=True).local_loss(
        {"model": model}, X, Y, context(2, broadcast={"prototypes": {"mean": PROTOTYPES[:, :4]}})
    )
    cosines = unit(features) @ unit(PROTOTYPES[:, :4]).T
    nll = np.log(np.exp(cosines).sum(-1)) - cosines[np.arange(6), Y.numpy()]
    assert losses.terms["contrast"].item() == pytest.approx(nll.mean(), rel=1e-5)


def test_the_papers_network_can_be_trained_and_read_again(
    tiny: Callable[..., Any], train: Callable[..., Path], tmp_path: Path
) -> None:
    fields = "algorithm.projection=4", "algorithm.normalised_head=true"
    run = load_run(train(tiny("fedproc", "server.rounds=2", *fields), tmp_path / "run"))
    assert run.model().head.weight.shape == (3, 4)
