"""FPL: clusters by hand, the terms of its loss by numpy, and a first round that is FedAvg's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedcir import FPL, FedAvg, InputError
from fedcir.algorithms.fpl import cluster_prototypes
from fedcir.models.builder import NetworkBuilder
from fedcir.runtime.rounds import run_rounds
from fedcir.types import LocalContext, Tensors

X, Y = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
CLUSTERS = {
    "prototypes": torch.randn(4, 6, generator=torch.Generator().manual_seed(1)),
    "classes": torch.tensor([0, 1, 1, 2]),
}


def context(clusters: Tensors | None) -> LocalContext:
    received = {} if clusters is None else {"clusters": clusters}
    return LocalContext(2, 4, 3, 6, received, torch.Generator().manual_seed(0))


def client(*prototypes: list[float] | None) -> Tensors:
    """One with these prototypes; None stands for a class that it does not hold."""
    means = torch.tensor([[0.0, 0.0] if prototype is None else prototype for prototype in prototypes])
    return {"means": means, "held": torch.tensor([prototype is not None for prototype in prototypes])}


def test_the_first_round_is_fedavgs_bit_for_bit(opened: Callable[..., Any], same_model: Callable[..., bool]) -> None:
    (one, real), (other, plain) = opened(FPL()), opened(FedAvg())
    assert next(run_rounds(one, real)).losses == next(run_rounds(other, plain)).losses
    assert same_model(one.state.shared["model"], other.state.shared["model"])
    assert one.state.shared.keys() == {"model", "clusters"}


def test_without_its_weights_it_is_fedavg_bit_for_bit(
    trained: Callable[..., Any], same_model: Callable[..., bool]
) -> None:
    off = trained(FPL(contrast_weight=0.0, consistency_weight=0.0))
    assert same_model(off, trained(FedAvg()))
    assert not same_model(off, trained(FPL()))


@pytest.mark.parametrize("summed", [False, True])
def test_the_terms_agree_with_numpy(builder: NetworkBuilder, summed: bool) -> None:
    algorithm = FPL(temperature=0.5, summed=summed)
    modules = algorithm.build(builder)
    losses = algorithm.local_loss(modules, X, Y, context(CLUSTERS))
    with torch.no_grad():
        z, c, classes = modules["model"].encoder(X).numpy(), CLUSTERS["prototypes"].numpy(), CLUSTERS["classes"].numpy()
    s = np.exp(z @ c.T / np.linalg.norm(z, axis=1)[:, None] / np.linalg.norm(c, axis=1) / 0.5)
    own = Y.numpy()[:, None] == classes
    assert losses.terms["contrast"].item() == pytest.approx(-np.log((s * own).sum(1) / s.sum(1)).mean(), rel=1e-5)
    unbiased = np.stack([c[classes == label].mean(0) for label in range(3)])
    squares = (z - unbiased[Y.numpy()]) ** 2
    expected = squares.sum(1).mean() if summed else squares.mean()
    assert losses.terms["consistency"].item() == pytest.approx(expected, rel=1e-5)
    assert losses.total.item() == pytest.approx(sum(term.item() for term in losses.terms.values()), rel=1e-6)


def test_clusters_are_found_and_averaged_class_by_class() -> None:
    # Class 0: the first two point right, the last two up. Class 1: one client alone. Class 2: nobody.
    right, right2 = client([1.0, 0.0], [2.0, 3.0], None), client([3.0, 0.3], None, None)
    up, up2 = client([0.0, 4.0], None, None), client([0.1, 2.0], None, None)
    got = cluster_prototypes([right, up, right2, up2])
    assert got["classes"].tolist() == [0, 0, 1]
    first, second, alone = (pytest.approx(row) for row in ([2.0, 0.15], [0.05, 3.0], [2.0, 3.0]))
    assert sorted(got["prototypes"][:2].tolist(), reverse=True) == [first, second]
    assert got["prototypes"][2].tolist() == alone


def test_a_client_sends_means_and_which_classes_it_holds_but_no_counts(
    opened: Callable[..., Any], vectors: Callable[..., Any]
) -> None:
    session, transport = opened(FPL(), sizes=(2, 9))  # the first client holds classes 0 and 1
    (reply,) = transport.train(session.state, [0])
    assert reply.tensors.keys() == {"model", "prototypes"}
    got = reply.tensors["prototypes"]
    assert got.keys() == {"means", "held"}
    assert got["held"].tolist() == [True, True, False]
    model = session.modules["model"]
    model.load_state_dict(reply.tensors["model"])
    with torch.no_grad():
        features = model.eval().encoder(vectors(2, 0).tensors[0])
    torch.testing.assert_close(got["means"], torch.cat([features, torch.zeros(1, 6)]))


def test_samples_of_a_class_without_prototypes_add_nothing(builder: NetworkBuilder) -> None:
    algorithm = FPL()
    modules = algorithm.build(builder)
    few = {"prototypes": CLUSTERS["prototypes"][1:3], "classes": torch.tensor([1, 1])}  # classes 0 and 2 have none
    losses = algorithm.local_loss(modules, X, Y, context(few))
    losses.total.backward()
    assert losses.terms["contrast"].item() == pytest.approx(0.0, abs=1e-6)  # and class 1 has nothing to be told from
    assert all(torch.isfinite(p.grad).all() for p in modules["model"].parameters())


@pytest.mark.parametrize("field", ["temperature", "contrast_weight", "consistency_weight"])
def test_a_field_that_is_out_of_range_is_refused(field: str) -> None:
    with pytest.raises(InputError, match=rf"algorithm\.{field} must be"):
        FPL(**{field: -1.0})
