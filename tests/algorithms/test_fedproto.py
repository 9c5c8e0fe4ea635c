"""FedProto: prototypes by hand, models that stay with their clients, and prediction by the nearest prototype."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcir import FedAvg, FedProto, InputError, load_run
from fedcir.algorithms.fedproto import merge_prototypes
from fedcir.models.builder import NetworkBuilder
from fedcir.runtime.rounds import run_rounds
from fedcir.types import ClientReply, LocalContext, ServerContext, Tensors

X, Y = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
CONTEXT = LocalContext(2, 4, 3, 6, {}, torch.Generator())


def client(mean: list[list[float]], count: list[float]) -> Tensors:
    return {"mean": torch.tensor(mean), "count": torch.tensor(count)}


A = client([[1.0, 0.0], [4.0, 4.0], [0.0, 0.0]], [3, 2, 0])
B = client([[5.0, 2.0], [0.0, 0.0], [0.0, 0.0]], [1, 0, 0])


@pytest.mark.parametrize(("by_samples", "first"), [(False, [3.0, 1.0]), (True, [2.0, 0.5])])
def test_a_prototype_is_the_mean_over_the_clients_that_hold_the_class(by_samples: bool, first: list[float]) -> None:
    merged = merge_prototypes([A, B], by_samples)
    assert merged["mean"].tolist() == [first, [4.0, 4.0], [0.0, 0.0]]
    assert merged["count"].tolist() == [4, 2, 0]


def test_a_class_that_nobody_held_in_a_round_keeps_its_prototype(builder: NetworkBuilder) -> None:
    algorithm = FedProto()
    modules = algorithm.build(builder)
    ctx = ServerContext(1, 4, 3, 6, "uniform", "average", torch.Generator())
    state = algorithm.start(modules, ctx)
    wide = [{"mean": item["mean"].repeat(1, 3), "count": item["count"]} for item in (A, B)]
    for local in wide:
        state = algorithm.server_step(state, [ClientReply(0, 4, {"prototypes": local}, {})], modules, ctx)
    assert state.shared.keys() == {"prototypes"}
    assert state.shared["prototypes"]["mean"][:, 0].tolist() == [5.0, 4.0, 0.0]
    assert state.shared["prototypes"]["count"].tolist() == [1, 2, 0]


def test_the_distance_is_to_the_prototype_of_the_own_class(builder: NetworkBuilder) -> None:
    algorithm = FedProto(lambda_proto=0.5)
    modules = algorithm.build(builder)
    mean = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    modules["prototypes"].load_state_dict({"mean": mean, "count": torch.tensor([1.0, 1.0, 0.0])})
    losses = algorithm.local_loss(modules, X, Y, CONTEXT)
    features = modules["model"].encoder(X).detach().numpy()
    squares = (features - mean[Y].numpy())[Y.numpy() < 2] ** 2  # class 2 has none
    assert losses.terms["distance"].item() == pytest.approx(squares.sum() / (6 * 6), rel=1e-5)
    assert losses.total.item() == pytest.approx((losses.terms["ce"] + 0.5 * losses.terms["distance"]).item())


def test_prototypes_travel_and_models_do_not(opened: Callable[..., Any]) -> None:
    session, transport = opened(FedProto(), rounds=2)
    records = list(run_rounds(session, transport))
    for reply in transport.train(session.state, [0, 1, 2]):
        assert {group: sorted(bag) for group, bag in reply.tensors.items()} == {"prototypes": ["count", "mean"]}
    assert session.state.shared.keys() == {"prototypes"}
    assert (
        [record.bytes_down for record in records] == [record.bytes_up for record in records] == [3 * 4 * (18 + 3)] * 2
    )
    assert [sorted(record.losses) for record in records] == [["ce", "total"], ["ce", "distance", "total"]]


def test_the_first_round_of_a_client_is_fedavgs(opened: Callable[..., Any], same_model: Callable[..., bool]) -> None:
    (one, kept), (other, plain) = opened(FedProto()), opened(FedAvg())
    list(kept.train(one.state, [1]))
    (reply,) = plain.train(other.state, [1])
    assert same_model(kept.store.load(1, 2)["model"], reply.tensors["model"])


def test_without_its_weight_every_client_trains_alone(
    opened: Callable[..., Any], same_model: Callable[..., bool]
) -> None:
    models = []
    for sizes in ((12, 9, 7), (12,)):
        session, transport = opened(FedProto(lambda_proto=0.0), sizes=sizes, rounds=3)
        list(run_rounds(session, transport))
        models.append(transport.store.load(0, 4)["model"])
    assert same_model(*models)
    session, transport = opened(FedProto(), rounds=3)
    list(run_rounds(session, transport))
    assert not same_model(models[0], transport.store.load(0, 4)["model"])


def test_the_nearest_known_prototype_predicts(builder: NetworkBuilder) -> None:
    algorithm = FedProto()
    modules = {name: module.eval() for name, module in algorithm.build(builder).items()}
    with torch.no_grad():
        features = modules["model"].encoder(X[:3])
        before = algorithm.predict(modules, X, CONTEXT)
        mean = torch.stack([features[1], features[2], features[0]])  # class 2 where the first sample lies
        modules["prototypes"].load_state_dict({"mean": mean, "count": torch.ones(3)})
        assert algorithm.predict(modules, X[:3], CONTEXT).argmax(-1).tolist() == [2, 0, 1]
        modules["prototypes"].load_state_dict({"mean": mean, "count": torch.tensor([1.0, 1.0, 0.0])})
        logits = algorithm.predict(modules, X[:3], CONTEXT)
        assert torch.isfinite(logits).all()
        assert 2 not in logits.argmax(-1)
        own = FedProto(inference="classifier").predict(modules, X, CONTEXT)
        assert torch.equal(own, modules["model"](X))
        assert torch.equal(before, own)  # as long as there are no prototypes


def test_a_run_says_that_there_is_no_model_for_all(trained: Callable[..., Any], encoder: Any, tmp_path: Path) -> None:
    result = trained(FedProto(), out=tmp_path / "run", rounds=1)
    assert result.records[-1].accuracy_mean is not None
    with pytest.raises(InputError, match=r"no model for all clients: .* model_of\('client-0'\)"):
        _ = result.model
    run = load_run(tmp_path / "run")
    with pytest.raises(InputError, match=r"no model for all clients: .* run\.model\(domain='client-0'\)"):
        run.model(encoder=encoder())
    first, other = (run.model(encoder=encoder(), domain=name).state_dict() for name in ("client-0", "client-1"))
    for name, tensor in result.model_of("client-1").state_dict().items():
        assert torch.equal(tensor, other[name])
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_a_domain_without_training_data_is_refused(
    tiny: Callable[..., Any], train: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"^fedproto needs training data at every client, but 'pen' has none"):
        train(tiny("fedproto", "partition.hold_out=pen"), tmp_path / "run")


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(InputError, match=r"algorithm\.lambda_proto must be"):
        FedProto(lambda_proto=-1.0)
