"""AlgorithmStrategy in Flower's own loop, with the real local_update behind a grid in memory."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)
from grid import MemoryGrid, Node, context_of, run_of_flower  # noqa: F401
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedcir
from fedcir import Algorithm, FedCiR
from fedcir.algorithms import algorithm_class, names
from fedcir.flower import AlgorithmStrategy, local_update
from fedcir.flower.strategy import _received
from fedcir.flower.wire import unpack_arrays
from fedcir.flower.wrapped import check_private
from fedcir.types import InputError, RunError

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


METHODS = ["fedavg", "fedcir", "fedcirplus", "fedgen", "fedproc", "fedsr", "fedproto", "fedfa", "fpl"]


@pytest.mark.parametrize("name", METHODS)
def test_in_flowers_loop_it_gives_what_train_gives_bit_for_bit(tmp_path: Path, name: str) -> None:
    algorithm = algorithm_class(name)()
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
    one, two = (unpack_arrays(each)["model"] for each in arrays if each is not None)
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


def test_flowers_clipping_at_the_client_goes_with_methods_that_average(tmp_path: Path) -> None:
    plain = grid(tmp_path)
    norms = behind(fixedclipping_mod, plain)
    wrapped: Strategy = DifferentialPrivacyClientSideFixedClipping(strategy("fedsr"), 0.0, 0.01, 3)
    result = wrapped.start(plain, strategy("fedsr").initial_arrays(), num_rounds=2)
    assert len(norms) == 6
    assert max(norms) == pytest.approx(0.01, rel=1e-3)
    assert result.train_metrics_clientapp[2]["replies"] == 3


def test_flowers_adaptive_clipping_at_the_client_drops_a_site_that_lacks_its_mod(tmp_path: Path) -> None:
    plain = grid(tmp_path)
    bare = plain.nodes[5]
    behind(adaptiveclipping_mod, plain)
    plain.nodes[5] = bare
    wrapped: Strategy = DifferentialPrivacyClientSideAdaptiveClipping(strategy("fedavg"), 0.0, 3)
    result = wrapped.start(plain, strategy("fedavg").initial_arrays(), num_rounds=1)
    assert (result.train_metrics_clientapp[1]["replies"], result.train_metrics_clientapp[1]["dropped"]) == (2, 1)


def test_flowers_noise_at_the_server_goes_with_methods_that_average(tmp_path: Path) -> None:
    wrapped = DifferentialPrivacyServerSideFixedClipping(strategy("fedavg"), 0.1, 0.5, 3)
    result = wrapped.start(grid(tmp_path), strategy("fedavg").initial_arrays(), num_rounds=2)
    assert result.train_metrics_clientapp[2]["replies"] == 3


def test_a_variance_that_noise_has_made_negative_reaches_clients_as_zero() -> None:
    noised = ArrayRecord({"model/n.running_var": Array(np.float32([-1, 2])), "model/n.bias": Array(np.float32([-1]))})
    assert _received(noised)["model"]["n.running_var"].tolist() == [0, 2]
    assert _received(noised)["model"]["n.bias"].tolist() == [-1]


AVERAGING = {"fedavg", "fedbn", "fedcirplus", "fedlc", "fedprox", "fedsr", "moon"}


@pytest.mark.parametrize("name", names())
def test_a_method_that_makes_more_of_replies_than_their_mean_refuses_flowers_privacy(name: str) -> None:
    wrapper = DifferentialPrivacyServerSideFixedClipping(strategy("fedavg"), 0.1, 0.5, 3)
    method = algorithm_class(name)()
    if name in AVERAGING or method.pools:
        check_private(wrapper, method, name)
    else:
        with pytest.raises(InputError, match=f"{name} makes more from replies than their mean, and DifferentialPri"):
            check_private(wrapper, method, name)


def test_the_refusal_comes_before_any_client_is_asked_to_train(tmp_path: Path) -> None:
    plain = grid(tmp_path)
    wrapped = DifferentialPrivacyServerSideFixedClipping(strategy("fedcir"), 50.0, 0.5, 3)
    with pytest.raises(InputError, match=r"fedcir makes more .* use the \[privacy\] settings of fedcir in its place"):
        wrapped.start(plain, strategy("fedcir").initial_arrays(), num_rounds=2)
    assert plain.sent == []


class Watching(Strategy):
    """A wrapper that changes nothing."""

    def __init__(self, inner: Strategy) -> None:
        self.configure_evaluate = inner.configure_evaluate  # type: ignore[method-assign]
        self.aggregate_evaluate = inner.aggregate_evaluate  # type: ignore[method-assign]
        self.summary, self.inner = inner.summary, inner  # type: ignore[method-assign]

    def configure_train(self, *given: Any) -> Any:
        return self.inner.configure_train(*given)

    def aggregate_train(self, *given: Any) -> Any:
        return self.inner.aggregate_train(*given)

    def configure_evaluate(self, *given: Any) -> Any: ...

    def aggregate_evaluate(self, *given: Any) -> Any: ...

    def summary(self) -> None: ...


def test_a_wrapper_that_promises_no_privacy_goes_with_every_method_and_changes_no_bit(tmp_path: Path) -> None:
    first = strategy("fedcir").initial_arrays()
    watched = Watching(strategy("fedcir", rounds=2)).start(grid(tmp_path / "a"), first, num_rounds=2)
    plain = strategy("fedcir").start(grid(tmp_path / "b"), num_rounds=2)
    assert watched.arrays is not None
    assert plain.arrays is not None
    assert watched.arrays.object_id == plain.arrays.object_id


def largest(record: ArrayRecord) -> dict[str, Array]:
    """The tensors of a record, each with an update that no clipping would let through."""
    return {name: Array(array.numpy() + 1e4) for name, array in record.items()}


def repeat_as_bytes(content: RecordDict) -> None:
    content["config"] = ConfigRecord({name: array.data for name, array in largest(content["arrays"]).items()})  # type: ignore[arg-type]


def repeat_in_a_second_record(content: RecordDict) -> None:
    content["more"] = ArrayRecord(largest(content["arrays"]))  # type: ignore[arg-type]


def lose_a_tensor(content: RecordDict) -> None:
    del content.array_records["arrays"]["model/head.bias"]


def change_a_shape(content: RecordDict) -> None:
    content.array_records["arrays"]["model/head.bias"] = Array(np.zeros(3, np.float32))


def change_the_order(content: RecordDict) -> None:
    content["arrays"] = ArrayRecord(dict(reversed(content.array_records["arrays"].items())))


def claim_many_images(content: RecordDict) -> None:
    content.metric_records["metrics"]["num-examples"] = 10**18


ATTACKS = {
    repeat_as_bytes: "'model/encoder.0.bias' is there twice",
    repeat_in_a_second_record: "its record 'more' is not expected",
    lose_a_tensor: "model/head.bias is missing",
    change_a_shape: "model/head.bias is float32[3], expected float32[2]",
    change_the_order: "its tensors are not in the order in which they were sent",
    claim_many_images: f"num_examples is {10**18}, expected 24",
}


@pytest.mark.parametrize(("attack", "reason"), ATTACKS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_nothing_that_one_site_sends_gets_past_flowers_clipping_or_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, attack: Callable[[RecordDict], None], reason: str
) -> None:
    def change(reply: Message) -> None:
        if "arrays" in reply.content:
            attack(reply.content)

    bad = grid(tmp_path)
    bad.nodes[5] = node(1, tmp_path, change)
    wrapped = DifferentialPrivacyServerSideFixedClipping(strategy("fedavg"), 0.0, 0.5, 3)
    first = strategy("fedavg").initial_arrays()
    with caplog.at_level("WARNING", "flwr"):
        result = wrapped.start(bad, first, num_rounds=1)
    assert result.arrays is not None
    assert update_norm(first, result.arrays) <= 0.5 * (1 + 1e-6)
    assert (result.train_metrics_clientapp[1]["replies"], result.train_metrics_clientapp[1]["dropped"]) == (2, 1)
    assert f"client 1 dropped: {reason}" in caplog.text


def test_under_a_wrapper_a_site_that_fails_is_dropped_and_no_usable_reply_ends_the_run_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = grid(tmp_path)
    bad.nodes[5] = failing(bad.nodes[5])
    wrapped: Strategy = DifferentialPrivacyServerSideAdaptiveClipping(strategy("fedavg"), 0.0, 3)
    with caplog.at_level("INFO", "flwr"):
        result = wrapped.start(bad, strategy("fedavg").initial_arrays(), num_rounds=1)
    assert result.train_metrics_clientapp[1]["replies"] == 2
    assert "client 1 dropped: ?[31mno luck" in caplog.text
    assert "\x1b" not in caplog.text
    bad.nodes = {number: failing(inner) for number, inner in grid(tmp_path).nodes.items()}
    with pytest.raises(
        RunError, match=r"round 1: 0 of 3 replies are usable, 1 are needed \(clients 0, 1, 2: .*no luck\)"
    ):
        wrapped.start(bad, strategy("fedavg").initial_arrays(), num_rounds=1)


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
        strategy(algorithm_class("centralized")())
    wrong = ArrayRecord({"model/x": next(iter(strategy().initial_arrays().values()))})
    with pytest.raises(InputError, match="initial_arrays do not fit"):
        strategy(sites=1).start(MemoryGrid({1: node(0, tmp_path)}), wrong, num_rounds=1)
