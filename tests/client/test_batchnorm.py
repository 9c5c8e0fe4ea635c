"""BatchNorm as declared: running statistics are averaged with the weights, pooled, or each site's own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcir.algorithms import make_algorithm
from fedcir.algorithms.fedavg import FedAvg
from fedcir.client.client_requests import evaluate_client
from fedcir.config import AlgorithmConfig, Config, LocalConfig, ModelConfig, PartitionConfig, ServerConfig
from fedcir.data.federation import Client, open_federation
from fedcir.errors import InputError
from fedcir.models.tensors import average, from_second_moments, is_statistic, to_second_moments
from fedcir.runtime.rounds import SerialTransport, run_rounds
from fedcir.runtime.session import Session, open_session
from fedcir.runtime.simulation import open_run
from fedcir.types import ClientReply, ServerContext, ServerState, Tensors

Tiny = Callable[..., Config]


def final_accuracy(config: Config) -> float:
    with open_run(config) as (_, rounds):
        *_, last = rounds
    assert last.accuracy_mean is not None
    return last.accuracy_mean


def config(scheme: str, norm: str = "batch") -> Config:
    return Config(
        partition=PartitionConfig(scheme=scheme),
        model=ModelConfig(width=8, norm=norm),
        local=LocalConfig(steps=10, lr=0.05),
        server=ServerConfig(rounds=6, eval_every=6),
        algorithm=AlgorithmConfig("fedavg"),
    )


@pytest.mark.slow
def test_iid_clients_converge_with_averaged_statistics() -> None:
    assert final_accuracy(config("iid")) > 0.75


def test_running_statistics_are_the_mean_over_clients() -> None:
    with open_run(config("domain")) as (session, rounds):
        replies = []
        server_step = session.algorithm.server_step

        class Spy(type(session.algorithm)):
            def server_step(self, state, given, modules, ctx):  # type: ignore[no-untyped-def]
                replies.extend(given)
                return server_step(state, replies, modules, ctx)

        session.algorithm = Spy()
        next(rounds)
        names = [n for n in session.state.shared["model"] if n.endswith(("running_mean", "running_var"))]
        assert names
        for name in names:
            want = torch.stack([reply.tensors["model"][name].double() for reply in replies]).mean(0).float()
            assert torch.equal(session.state.shared["model"][name], want)


def statistics(sample: Any, batches: int = 3) -> Tensors:
    """A bag as a BatchNorm would have it after seeing all of a sample (N, C)."""
    return {
        "norm.weight": torch.ones(sample.shape[1]),
        "norm.running_mean": torch.tensor(sample.mean(0), dtype=torch.float32),
        "norm.running_var": torch.tensor(sample.var(0), dtype=torch.float32),
        "norm.num_batches_tracked": torch.tensor(batches),
    }


def opened(config: Config) -> tuple[Session, SerialTransport]:
    algorithm, federation = make_algorithm(config.algorithm), open_federation(config)
    session = open_session(config, algorithm, federation)
    return session, SerialTransport(session.make_trainer(), federation.clients)


def everything(client: Client) -> tuple[torch.Tensor, torch.Tensor]:
    """All training data of a client as one batch."""
    assert client.train is not None
    return client.train.batch(np.arange(len(client.train)), torch.device("cpu"), torch.channels_last)


def test_pooled_variance_is_that_of_all_samples_together() -> None:
    rng = np.random.default_rng(0)
    samples = [rng.normal(center, spread, (50, 4)) for center, spread in ((-2, 0.5), (0, 1), (3, 2))]
    together = np.concatenate(samples)
    bag = from_second_moments(average([to_second_moments(statistics(sample)) for sample in samples]))
    np.testing.assert_allclose(bag["norm.running_mean"], together.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bag["norm.running_var"], together.var(0), rtol=1e-5)
    assert bag["norm.running_var"].dtype == torch.float32
    averaged = average([statistics(sample) for sample in samples])
    assert (averaged["norm.running_var"] < bag["norm.running_var"]).all()


def test_pooled_variance_by_hand() -> None:
    bags = [
        {"running_mean": torch.tensor([1.0]), "running_var": torch.tensor([2.0])},
        {"running_mean": torch.tensor([5.0]), "running_var": torch.tensor([4.0])},
    ]
    got = from_second_moments(average(map(to_second_moments, bags)))
    assert got["running_mean"].tolist() == [3.0]
    assert got["running_var"].tolist() == [7.0]  # ((2 + 1) + (4 + 25)) / 2 - 9


def test_pooling_weighs_sites_by_their_samples_where_the_mean_does() -> None:
    rng = np.random.default_rng(1)
    samples = [rng.normal(0, 1, (10, 3)), rng.normal(4, 2, (70, 3))]
    replies = [ClientReply(i, len(s), {"model": statistics(s)}, {}) for i, s in enumerate(samples)]
    ctx = ServerContext(1, 1, 3, 8, "samples", "pooled", torch.Generator())
    got = FedAvg().server_step(ServerState(0, {}), replies, {}, ctx).shared["model"]
    np.testing.assert_allclose(got["norm.running_mean"], np.concatenate(samples).mean(0), rtol=1e-5)
    np.testing.assert_allclose(got["norm.running_var"], np.concatenate(samples).var(0), rtol=1e-5)


def test_pooled_counters_take_the_maximum_and_weights_the_mean() -> None:
    sample = np.random.default_rng(2).normal(size=(5, 2))
    bags = [statistics(sample, batches) for batches in (3, 9, 4)]
    bags[0]["norm.weight"] += 3.0
    got = from_second_moments(average(map(to_second_moments, bags)))
    assert int(got["norm.num_batches_tracked"]) == 9
    assert got["norm.num_batches_tracked"].dtype == torch.int64
    assert got["norm.weight"].tolist() == [2.0, 2.0]


def test_pooling_equal_statistics_gives_them_back_and_never_a_negative_variance() -> None:
    bag = {"running_mean": torch.tensor([1e4, 0.3, 0.0]), "running_var": torch.tensor([1e-6, 0.25, 0.0])}
    got = from_second_moments(average([to_second_moments(bag)] * 7))
    torch.testing.assert_close(got["running_var"], bag["running_var"], rtol=1e-2, atol=1e-7)
    assert (got["running_var"] >= 0).all()


def test_pooled_variance_is_right_where_it_is_small_beside_the_mean() -> None:
    means = (99.9994049, 99.9993286, 99.9993057)
    bags = [{"running_mean": torch.tensor([m]), "running_var": torch.tensor([1e-4])} for m in means]
    got = from_second_moments(average(map(to_second_moments, bags)))
    spread = np.var([bag["running_mean"].item() for bag in bags])
    assert got["running_var"].item() == pytest.approx(1e-4 + spread, rel=1e-3)


def test_a_pooled_run_pools_what_its_clients_upload(tiny: Tiny) -> None:
    session, transport = opened(tiny("fedavg", "model.batchnorm=pooled", "server.rounds=1"))
    bags = [reply.tensors["model"] for reply in transport.train(session.state, [0, 1, 2])]
    next(run_rounds(session, transport))
    shared = session.state.shared["model"]
    for name in (n for n in shared if n.endswith("running_var")):
        of_mean = name.replace("running_var", "running_mean")
        means, variances = (np.stack([bag[n].double().numpy() for bag in bags]) for n in (of_mean, name))
        np.testing.assert_allclose(shared[name], variances.mean(0) + means.var(0), rtol=1e-4)
        np.testing.assert_allclose(shared[of_mean], means.mean(0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedcir", "fedsr", "fedproc"])
def test_local_statistics_are_in_no_upload_and_not_shared_but_in_the_clients_store(tiny: Tiny, algorithm: str) -> None:
    session, transport = opened(tiny(algorithm, "model.batchnorm=local", "server.rounds=2"))
    names = {name for name in session.modules["model"].state_dict() if is_statistic(name)}
    assert names
    for reply in transport.train(session.state, [0, 1, 2]):
        assert not any(is_statistic(name) for bag in reply.tensors.values() for name in bag)
        assert reply.tensors["model"].keys() == session.modules["model"].state_dict().keys() - names
    for record in run_rounds(session, transport):
        assert record.dropped == {}
        assert not any(is_statistic(name) for name in session.state.shared["model"])
        for client in range(3):
            kept = transport.store.load(client, record.round + 1)["batchnorm"]
            assert kept.keys() == names
            assert {int(t) for n, t in kept.items() if n.endswith("num_batches_tracked")} == {2 * record.round}


def test_a_site_goes_on_with_its_own_statistics_in_its_next_round(tiny: Tiny) -> None:
    """Equal to averaging in everything but the statistics: training mode never reads them."""
    config = tiny("fedavg", "model.batchnorm=local", "server.rounds=2")
    session, transport = opened(config)
    for _ in run_rounds(session, transport):
        pass
    reference, plain = opened(tiny("fedavg", "server.rounds=2"))
    for _ in run_rounds(reference, plain):
        pass
    for name, tensor in session.state.shared["model"].items():
        assert torch.equal(tensor, reference.state.shared["model"][name])


def test_a_site_is_tested_with_its_own_statistics(tiny: Tiny) -> None:
    session, transport = opened(tiny("fedavg", "model.batchnorm=local", "server.rounds=1", "local.lr=0.1"))
    for _ in run_rounds(session, transport):
        pass
    worker, clients = transport.trainer, transport.clients
    kept = [transport.store.load(client, 2) for client in range(3)]
    model = session.modules["model"].eval()
    for client in clients:
        got = evaluate_client(worker, client, session.state.shared, kept[client.id], 1).metrics
        model.load_state_dict({**session.state.shared["model"], **kept[client.id]["batchnorm"]})
        x, y = client.test.batch(np.arange(len(client.test)), torch.device("cpu"), torch.channels_last)
        with torch.no_grad():
            logits = model(x)
        assert got["correct"] == int((logits.argmax(-1) == y).sum())
        assert got["loss"] == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-4)
    own, others = (evaluate_client(worker, clients[2], session.state.shared, kept[site], 1).metrics for site in (2, 0))
    assert own["loss"] != pytest.approx(others["loss"], rel=1e-4)  # domains differ in brightness


def test_a_site_that_has_not_trained_takes_statistics_from_its_own_data(tiny: Tiny) -> None:
    steps = ("local.steps=60", "local.batch_size=24", "server.rounds=1")  # every batch is all of a site's data
    session, transport = opened(tiny("fedavg", "model.batchnorm=local", *steps))
    means = []
    for client in transport.clients:
        evaluate_client(transport.trainer, client, session.state.shared, {}, 0)
        got = transport.trainer.modules["model"].state_dict()["encoder.norms.0.running_mean"]
        x, _ = everything(client)
        with torch.no_grad():
            want = session.modules["model"].encoder.convs[0](x).mean((0, 2, 3))
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
        means.append(got.clone())
    assert not torch.allclose(means[0], means[2], rtol=0.05)


def test_testing_a_site_that_has_not_trained_keeps_nothing_and_changes_no_weight(tiny: Tiny) -> None:
    session, transport = opened(tiny("fedavg", "model.batchnorm=local"))
    list(transport.evaluate(session.state, [0, 1, 2]))
    assert [transport.store.load(client, 9) for client in range(3)] == [{}] * 3
    got = transport.trainer.modules["model"].state_dict()
    assert all(torch.equal(got[name], tensor) for name, tensor in session.state.shared["model"].items())


def test_sites_that_sit_out_a_round_are_tested_all_the_same(tiny: Tiny) -> None:
    session, transport = opened(tiny("fedavg", "model.batchnorm=local", "server.active=1"))
    for record in run_rounds(session, transport):
        assert list(record.accuracy or {}) == ["ink", "pen", "wax"]


def test_local_statistics_do_not_go_with_a_held_out_domain(tiny: Tiny) -> None:
    config = tiny("fedavg", "model.batchnorm=local", "partition.hold_out=pen")
    with pytest.raises(InputError, match="batchnorm=local needs training data at every client"), open_run(config):
        pass


@pytest.mark.parametrize("algorithm", ["fedavg", "fedcir"])
def test_group_norm_has_no_statistics_and_all_policies_coincide(tiny: Tiny, algorithm: str) -> None:
    models, accuracies = [], []
    for policy in ("average", "pooled", "local"):
        session, transport = opened(tiny(algorithm, "model.norm=group", f"model.batchnorm={policy}"))
        for _ in run_rounds(session, transport):
            pass
        models.append(session.state.shared["model"])
        accuracies.append([record.accuracy for record in session.records])
    assert not any(is_statistic(name) for name in models[0])
    assert accuracies[0] == accuracies[1] == accuracies[2]
    for other in models[1:]:
        assert other.keys() == models[0].keys()
        assert all(torch.equal(other[name], models[0][name]) for name in other)
