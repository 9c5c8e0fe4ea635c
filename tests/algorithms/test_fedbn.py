"""FedBN: BatchNorm layers stay with the client, in training, in testing and in no upload."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fedcir
from fedcir import FedAvg, FedBN
from fedcir.client.client_requests import evaluate_client
from fedcir.client.local_update import train_client
from fedcir.errors import InputError
from fedcir.models.tensors import batchnorm_names
from fedcir.runtime.rounds import SerialTransport, run_rounds

Opened = Callable[..., tuple[Any, SerialTransport]]

LAYER = {f"encoder.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


def test_batchnorm_is_in_no_upload_and_not_shared_but_in_the_clients_store(opened: Opened) -> None:
    session, transport = opened(FedBN(), rounds=2)
    assert batchnorm_names(session.modules["model"]) == LAYER
    others = session.modules["model"].state_dict().keys() - LAYER
    for reply in transport.train(session.state, [0, 1, 2]):
        assert reply.tensors["model"].keys() == others
    for record in run_rounds(session, transport):
        assert record.dropped == {}
        assert session.state.shared["model"].keys() == others
        kept = [transport.store.load(client, record.round + 1)["batchnorm"] for client in range(3)]
        assert all(layer.keys() == LAYER for layer in kept)
        assert not torch.equal(kept[0]["encoder.1.weight"], kept[1]["encoder.1.weight"])


def test_a_client_trains_and_tests_as_fedavgs_does_with_the_layers_that_it_kept(
    opened: Opened, same_model: Callable[[Any, Any], bool]
) -> None:
    session, transport = opened(FedBN(), rounds=2, lr=0.1)
    next(run_rounds(session, transport))
    trainer = opened(FedAvg(), rounds=2, lr=0.1)[1].trainer
    for client in transport.clients:
        kept, shared = transport.store.load(client.id, 2), session.state.shared
        whole = {"model": {**shared["model"], **kept["batchnorm"]}}
        (ours, after), (theirs, _) = (
            train_client(transport.trainer, client, shared, kept, 2),
            train_client(trainer, client, whole, {}, 2),
        )
        assert same_model({**ours.tensors["model"], **after["batchnorm"]}, theirs.tensors["model"])
        tested = evaluate_client(transport.trainer, client, shared, kept, 1).metrics
        assert tested == evaluate_client(trainer, client, whole, {}, 1).metrics


def test_the_other_layers_are_the_mean_over_clients(opened: Opened) -> None:
    session, transport = opened(FedBN(), rounds=1)
    bags = [reply.tensors["model"] for reply in transport.train(session.state, [0, 1, 2])]
    next(run_rounds(session, transport))
    for name, tensor in session.state.shared["model"].items():
        assert torch.equal(tensor, torch.stack([bag[name].double() for bag in bags]).mean(0).float())


def test_with_one_client_it_is_fedavg(opened: Opened, same_model: Callable[[Any, Any], bool]) -> None:
    ends = []
    for method in (FedBN(), FedAvg()):
        session, transport = opened(method, sizes=(12,))
        records = list(run_rounds(session, transport))
        ends.append({**session.state.shared["model"], **transport.store.load(0, 9).get("batchnorm", {})})
    assert same_model(*ends)
    assert records[-1].accuracy is not None


def test_a_network_without_batchnorm_is_told_to_use_fedavg(opened: Opened) -> None:
    session, _ = opened(FedBN())
    builder = replace(session.roster.builder, make_encoder=lambda: nn.Linear(5, 6))
    with pytest.raises(InputError, match="this network has none: use fedavg"):
        FedBN().build(builder)


def test_a_domain_without_training_data_is_refused(vectors: Callable[..., Any], encoder: Callable[..., Any]) -> None:
    sites = {"here": (vectors(9, 0), vectors(6, 0)), "there": (None, vectors(6, 1))}
    with pytest.raises(InputError, match=r"fedbn needs training data at every client, but 'there' has none"):
        fedcir.train(sites, encoder=encoder(), num_classes=3, algorithm="fedbn", rounds=1)
