"""AlgorithmStrategy in Flower's own loop, with the real local_update behind a grid in memory."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from grid import MemoryGrid, Node, context_of, run_of_flower  # noqa: F401
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedcir
from fedcir import Algorithm, FedCiR
from fedcir.algorithms import find_algorithm
from fedcir.errors import InputError, RunError
from fedcir.flower import AlgorithmStrategy, local_update
from fedcir.flower.strategy import _unpack_received
from fedcir.flower.wire import unpack_arrays

Pair = tuple[TensorDataset, TensorDataset]
NODES = (7, 5, 3)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU())


def data(site: int) -> Pair:
    rng = torch.Generator().manual_seed(site)
    labels = torch.arange(24) % 2
    images = torch.randn(24, 4, generator=rng) + 2 * labels[:, None] + site
    return TensorDataset(images, labels), TensorDataset(images[:10], labels[:10])


def node(site: int, state: Path, change: Callable[[Message], None] = lambda reply: None) -> Node:
    def answer(message: Message) -> Message:
        context = context_of({"partition-id": site, "state": str(state)}, message.metadata.dst_node_id)
        reply = local_update(message, context, data=data(site), encoder=encoder(), num_classes=2)
        change(reply)
        return reply

    return answer


def grid(state: Path) -> MemoryGrid:
    return MemoryGrid({number: node(site, state) for site, number in enumerate(NODES)})


def strategy(algorithm: Algorithm | str = "fedcir", **more: object) -> AlgorithmStrategy:
    given = {"encoder": encoder(), "example": torch.zeros(2, 4), "num_classes": 2, "sites": 3, "local_steps": 3}
    return AlgorithmStrategy(algorithm, **{**given, **more})  # type: ignore[arg-type]


MORE = ("fedcirplus", "fedproc", "fedsr", "fedfa", "fpl")
METHODS = ["fedavg", "fedcir", "fedgen", "fedproto", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]


@pytest.mark.parametrize("name", METHODS)
def test_in_flowers_loop_it_gives_what_train_gives_bit_for_bit(tmp_path: Path, name: str) -> None:
    algorithm = find_algorithm(name)()
    result = strategy(algorithm).start(grid(tmp_path), num_rounds=3)
    sites = [data(site) for site in range(3)]
    same = fedcir.train(
        sites, encoder=encoder(), num_classes=2, algorithm=algorithm, rounds=3, local_steps=3, workers=1
    )
    assert result.arrays is not None
    arrays = unpack_arrays(result.arrays)
    assert arrays.keys() == set(algorithm.trains)
    for key, tensor in same.model.state_dict().items() if algorithm.one_model else ():
        assert torch.equal(arrays["model"][key], tensor), key
    last = result.evaluate_metrics_clientapp[3]
    assert last["accuracy"] == same.records[-1].accuracy_mean
    assert result.train_metrics_clientapp[3]["loss/total"] == same.records[-1].losses["total"]


@pytest.mark.parametrize("setting", [{"model.adapter": "lora"}, {"model.train": "head"}])
def test_adapters_and_frozen_parts_are_trained_in_flowers_loop_too(tmp_path: Path, setting: dict[str, str]) -> None:
    result = strategy("fedavg", set=setting).start(grid(tmp_path), num_rounds=2)
    sites = [data(site) for site in range(3)]
    same = fedcir.train(
        *(sites,), encoder=encoder(), num_classes=2, algorithm="fedavg", rounds=2, local_steps=3, workers=1, set=setting
    )
    assert result.arrays is not None
    model = unpack_arrays(result.arrays)["model"]
    assert torch.equal(model["head.weight"], same.model.state_dict()["head.weight"])
    assert sum(tensor.numel() for tensor in model.values()) == 2 * 6 + 2 + ("model.adapter" in setting) * 8 * (4 + 6)


def test_its_step_on_the_server_takes_the_threads_of_every_run(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    arrays = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            arrays.append(strategy(FedCiR()).start(grid(tmp_path / str(count)), num_rounds=2).arrays)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
    one, two = (unpack_arrays(array)["model"] for array in arrays if array is not None)
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_site_without_a_test_set_is_dropped_and_its_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def half(message: Message) -> Message:
        context = context_of({"domain": "here", "state": str(tmp_path)}, message.metadata.dst_node_id)
        return local_update(message, context, data=(data(0)[0], None), encoder=encoder(), num_classes=2)

    plain = grid(tmp_path)
    plain.nodes[9] = half
    with caplog.at_level("ERROR", "flwr"):
        result = strategy().start(plain, num_rounds=1)
    assert result.train_metrics_clientapp[1]["replies"] == 3
    assert "'here' has no test Dataset, but every site must test: give data=(train, test)" in caplog.text


def update_norm(before: ArrayRecord, after: ArrayRecord) -> float:
    pairs = zip(before.to_numpy_ndarrays(), after.to_numpy_ndarrays(), strict=True)
    return math.sqrt(sum(float(((b.astype(float) - a) ** 2).sum()) for a, b in pairs))


def behind(mod: Callable[..., Message], plain: MemoryGrid) -> list[float]:
    """Put a mod of Flower's before the app of every node; gives the norms of the updates that leave them."""
    norms: list[float] = []

    def modded(inner: Node) -> Node:
        def answer(message: Message) -> Message | None:
            if message.metadata.message_type != "train":
                return inner(message)
            reply = mod(message, context_of({}), lambda msg, ctx: inner(msg))
            norms.append(update_norm(message.content.array_records["arrays"], reply.content.array_records["arrays"]))
            return reply

        return answer

    plain.nodes = {number: modded(inner) for number, inner in plain.nodes.items()}
    return norms


def test_a_variance_that_noise_has_made_negative_reaches_clients_as_zero() -> None:
    noised = ArrayRecord({"model/n.running_var": Array(np.float32([-1, 2])), "model/n.bias": Array(np.float32([-1]))})
    assert _unpack_received(noised)["model"]["n.running_var"].tolist() == [0, 2]
    assert _unpack_received(noised)["model"]["n.bias"].tolist() == [-1]


def test_wrappers_are_refused_before_any_client_is_asked_and_the_message_offers_our_privacy(tmp_path: Path) -> None:
    plain = grid(tmp_path)
    wrapped = DifferentialPrivacyServerSideFixedClipping(strategy("fedavg"), 50.0, 0.5, 3)
    with pytest.raises(
        InputError, match=r'in place of Flower\'s wrappers .* set {"privacy.clip": ..., "privacy.noise"'
    ):
        wrapped.start(plain, strategy("fedavg").initial_arrays(), num_rounds=2)
    assert plain.sent == []


def test_a_site_that_fails_is_dropped_and_no_usable_reply_ends_the_run_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = grid(tmp_path)
    bad.nodes[5] = failing(bad.nodes[5])
    with caplog.at_level("INFO", "flwr"):
        result = strategy("fedavg").start(bad, num_rounds=1)
    assert result.train_metrics_clientapp[1]["replies"] == 2
    assert "client 1 dropped: \ufffd[31mno luck" in caplog.text
    assert "\x1b" not in caplog.text
    bad.nodes = {number: failing(inner) for number, inner in grid(tmp_path).nodes.items()}
    with pytest.raises(
        RunError, match=r"round 1: 0 of 3 replies are usable, 1 are needed \(clients 0, 1, 2: .*no luck\)"
    ):
        strategy("fedavg").start(bad, num_rounds=1)


def failing(inner: Node) -> Node:
    def answer(message: Message) -> Message | None:
        if message.metadata.message_type == "train":
            return Message(Error(2, "\x1b[31mno luck"), reply_to=message)
        return inner(message)

    return answer


def test_flowers_local_privacy_goes_with_fedcir(tmp_path: Path) -> None:
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=0.1, epsilon=10.0, delta=1e-3)
    noisy = grid(tmp_path)
    behind(mod, noisy)
    result = strategy(FedCiR()).start(noisy, num_rounds=2)
    assert result.train_metrics_clientapp[2]["replies"] == 3


def test_the_callers_config_is_not_written_to_and_reaches_the_clients(tmp_path: Path) -> None:
    seen = []
    plain = grid(tmp_path)
    inner = plain.nodes[7]
    plain.nodes[7] = lambda message: (seen.append(message), inner(message))[1]  # type: ignore[func-returns-value]
    config = ConfigRecord({"note": "mine"})
    strategy().start(plain, num_rounds=1, train_config=config)
    assert dict(config) == {"note": "mine"}
    (train,) = [message for message in seen if message.metadata.message_type == "train"]
    assert train.content.config_records["config"]["note"] == "mine"
    assert train.content.config_records["config"]["server-round"] == 1


def poison(reply: Message) -> None:
    if "arrays" in reply.content.array_records:
        record = reply.content.array_records["arrays"]
        first = next(iter(record))
        record[first] = type(record[first])(record[first].numpy() * float("nan"))


def test_a_client_that_sends_nan_is_dropped_and_too_few_replies_end_the_run(tmp_path: Path) -> None:
    plain = grid(tmp_path)
    plain.nodes[5] = node(1, tmp_path, poison)
    result = strategy().start(plain, num_rounds=1)
    assert result.train_metrics_clientapp[1]["replies"] == 2
    assert result.train_metrics_clientapp[1]["dropped"] == 1
    with pytest.raises(RunError, match="2 of 3 replies are usable, 3 are needed"):
        strategy(min_replies=3).start(plain, num_rounds=1)


def test_who_is_sampled_does_not_depend_on_the_numbers_of_nodes(tmp_path: Path) -> None:
    losses = []
    for numbers in ((1, 2, 3), (30, 20, 10)):
        plain = MemoryGrid({number: node(site, tmp_path) for site, number in enumerate(numbers)})
        result = strategy(active=1).start(plain, num_rounds=3)
        losses.append([result.train_metrics_clientapp[round]["loss/total"] for round in (1, 2, 3)])
    assert losses[0] == losses[1]


class Scaled(FedCiR):
    """A method that fedcir does not bring."""

    def local_loss(self, modules: dict[str, nn.Module], x: Tensor, y: Tensor, ctx: object) -> object:  # type: ignore[override]
        return super().local_loss(modules, 0.5 * x, y, ctx)  # type: ignore[arg-type]


def test_a_method_of_ones_own_is_named_to_local_update(tmp_path: Path) -> None:
    def own(message: Message) -> Message:
        context = context_of({"domain": "here", "state": str(tmp_path)}, message.metadata.dst_node_id)
        return local_update(message, context, data=data(0), encoder=encoder(), num_classes=2, algorithm=Scaled)

    result = strategy(Scaled(), sites=1).start(MemoryGrid({4: own}), num_rounds=1)
    assert result.train_metrics_clientapp[1]["replies"] == 1
    assert "accuracy/here" in result.evaluate_metrics_clientapp[1]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="centralized trains on all data in one place"):
        strategy(find_algorithm("centralized")())
    wrong = ArrayRecord({"model/x": next(iter(strategy().initial_arrays().values()))})
    with pytest.raises(InputError, match="initial_arrays do not fit"):
        strategy(sites=1).start(MemoryGrid({1: node(0, tmp_path)}), wrong, num_rounds=1)
