"""The round loop against a transport that goes wrong. All faults of replies: tests/server/test_valid.py."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from fedcir.algorithms import make_algorithm
from fedcir.client.local_update import LocalTrainer
from fedcir.config import Config
from fedcir.data.federation import open_federation
from fedcir.errors import RunError
from fedcir.runtime.resolution import resolve_config
from fedcir.runtime.rounds import SerialTransport, Transport, run_rounds, summarise
from fedcir.runtime.session import Session, open_session
from fedcir.server.accounting import sample_cohort
from fedcir.types import ClientReply, DroppedReply, Groups, ServerState

Tiny = Callable[..., Config]
Replies = Iterable[ClientReply | DroppedReply]

CNN = 3 * 2 * 9 + 2 * 4 * 9 + 4 * 8 * 9 + 4 * (2 + 4 + 8) + 16 * 8 * 128 + 128
"""Floats of the CNN at width 2: convolutions, four vectors of each BatchNorm, the linear layer."""
COUNTERS = 3 * 8
"""Bytes of the BatchNorms' counters."""
HEAD = 128 * 3 + 3
GAUSSIAN = 128 * 256 + 256
GENERATOR = 4 * ((64 + 3) * 8 + 4 * 8 + 8 * 128 + 128) + 8
"""Bytes: two linear layers, a BatchNorm and its counter."""


class Quiet:
    """What a transport may leave undone."""

    def peak_memory(self) -> int:
        return 0


class Altered(Quiet):
    """The serial transport, whose replies pass through a function on their way."""

    def __init__(self, real: SerialTransport, alter: Callable[[list[ClientReply]], Replies]) -> None:
        self.real, self.alter = real, alter

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply | DroppedReply]:
        yield from self.alter(list(self.real.train(state, cohort)))

    def evaluate(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return self.real.evaluate(state, cohort)


class Examined(Quiet):
    """The serial transport, whose evaluations are made up."""

    def __init__(self, real: SerialTransport, replies: Replies) -> None:
        self.real, self.replies = real, replies

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return self.real.train(state, cohort)

    def evaluate(self, state: ServerState, cohort: Sequence[int]) -> Replies:
        return self.replies


def opened(config: Config) -> tuple[Session, SerialTransport]:
    algorithm, federation = make_algorithm(config.algorithm), open_federation(config)
    config = resolve_config(config, algorithm, federation)
    worker = LocalTrainer(
        algorithm=algorithm,
        modules=algorithm.build(federation.builder),
        seed=config.run.seed,
        total_rounds=config.server.rounds,
        task=federation.builder.task,
        local=config.local,
        device=torch.device("cpu"),
        layout=torch.channels_last,
    )
    return open_session(config, algorithm, federation), SerialTransport(worker, federation.clients)


def after(session: Session, transport: Transport) -> Groups:
    """What the server shares after all rounds."""
    for _ in run_rounds(session, transport):
        pass
    return session.state.shared


def same(a: Groups, b: Groups) -> bool:
    return a.keys() == b.keys() and all(
        a[group].keys() == b[group].keys() and all(torch.equal(a[group][name], b[group][name]) for name in a[group])
        for group in a
    )


def altered(reply: ClientReply, change: Callable[[Groups], object]) -> ClientReply:
    arrays = copy.deepcopy(reply.tensors)
    change(arrays)
    return replace(reply, tensors=arrays)


def poison(arrays: Groups) -> None:
    arrays["model"]["head.bias"][1] = float("nan")


@pytest.mark.parametrize("gone", [[], [DroppedReply(1, "timed out after 5 s")]], ids=["silent", "reported"])
def test_a_missing_reply_is_dropped_with_its_reason(tiny: Tiny, gone: list[DroppedReply]) -> None:
    session, real = opened(tiny("fedavg", "server.rounds=1"))
    others = session.algorithm.server_step(
        session.state, real.train(session.state, [0, 2]), session.modules, session.context(1)
    )
    (record,) = run_rounds(session, Altered(real, lambda replies: [replies[0], *gone, replies[2]]))
    assert record.dropped == {"1": "timed out after 5 s" if gone else "no reply"}
    assert same(session.state.shared, others.shared)


def test_a_dropped_reply_counts_neither_bytes_nor_flops_nor_loss(tiny: Tiny) -> None:
    (whole,) = run_rounds(*opened(tiny("fedavg", "server.rounds=1")))
    session, real = opened(tiny("fedavg", "server.rounds=1"))
    heard: list[ClientReply] = []

    def alter(replies: list[ClientReply]) -> Replies:
        heard.extend(replies)
        return [replies[0], altered(replies[1], poison), replies[2]]

    (record,) = run_rounds(session, Altered(real, alter))
    assert record.bytes_up * 3 == whole.bytes_up * 2
    assert record.flops * 3 == whole.flops * 2
    assert record.bytes_down == whole.bytes_down
    assert record.losses["ce"] == (heard[0].metrics["loss/ce"] + heard[2].metrics["loss/ce"]) / 2


@pytest.mark.parametrize(("algorithm", "order"), [("fedavg", [2, 1, 0]), ("fedcir", [1, 2, 0])])
def test_the_order_of_replies_changes_nothing(tiny: Tiny, algorithm: str, order: list[int]) -> None:
    config = tiny(algorithm, "server.rounds=2")
    session, real = opened(config)
    shuffled = after(session, Altered(real, lambda replies: [replies[i] for i in order]))
    assert same(shuffled, after(*opened(config)))
    assert [record.dropped for record in session.records] == [{}, {}]


@pytest.mark.parametrize("order", [[0, 0, 1, 2], [0, 1, 2, 1]])
def test_a_reply_that_comes_twice_counts_once(tiny: Tiny, order: list[int]) -> None:
    config = tiny("fedavg", "server.rounds=1")
    session, real = opened(config)
    doubled = after(session, Altered(real, lambda replies: [replies[i] for i in order]))
    reference, plain = opened(config)
    assert same(doubled, after(reference, plain))
    assert session.records[0].bytes_up == reference.records[0].bytes_up


def test_a_reply_of_a_client_outside_the_cohort_is_not_used(tiny: Tiny) -> None:
    config = tiny("fedavg", "server.rounds=1", "server.active=2")
    session, real = opened(config)
    (outside,) = set(session.roster.trainers) - set(sample_cohort(session.roster.trainers, 2, 0, 1))
    stranger = list(real.train(session.state, [outside]))
    assert same(after(session, Altered(real, lambda replies: [*stranger, *replies])), after(*opened(config)))


def test_the_weight_of_a_client_is_its_number_of_samples_if_asked_for(tiny: Tiny) -> None:
    session, real = opened(tiny("fedavg", "server.rounds=1", "server.weighting=samples"))
    heard: list[ClientReply] = []

    def alter(replies: list[ClientReply]) -> Replies:
        heard.extend(replace(r, num_examples=n) for r, n in zip(replies, (1, 2, 5), strict=True))
        return heard

    shared = after(session, Altered(real, alter))
    biases = [reply.tensors["model"]["head.bias"].double() for reply in heard]
    assert torch.equal(shared["model"]["head.bias"], ((biases[0] + 2 * biases[1] + 5 * biases[2]) / 8).float())


def test_too_few_replies_end_the_run_with_their_reasons(tiny: Tiny) -> None:
    session, real = opened(tiny("fedavg", "server.min_replies=2"))
    transport = Altered(real, lambda replies: [replies[0], altered(replies[1], poison)])
    with pytest.raises(RunError, match=r"round 1: 1 of 3 replies are usable, 2 are needed") as error:
        after(session, transport)
    assert "client 1: model/head.bias is not finite" in str(error.value)
    assert "client 2: no reply" in str(error.value)
    assert session.state.round == 0
    assert session.records == []


@pytest.mark.parametrize("algorithm", ["fedcir"])
def test_no_reply_at_all_is_the_same_error(tiny: Tiny, algorithm: str) -> None:
    session, real = opened(tiny(algorithm))
    with pytest.raises(RunError, match="round 1: 0 of 3 replies are usable, 1 are needed"):
        after(session, Altered(real, lambda replies: []))


def test_a_cohort_is_sorted_of_the_size_asked_for_and_the_same_each_time() -> None:
    trainers = (4, 0, 7, 2, 9)
    for round in range(1, 20):
        cohort = sample_cohort(trainers, 3, seed=5, round=round)
        assert cohort == sorted(set(cohort))
        assert len(cohort) == 3
        assert set(cohort) <= set(trainers)
        assert cohort == sample_cohort(trainers[::-1], 3, seed=5, round=round)
    assert sample_cohort(trainers, 5, seed=5, round=1) == [0, 2, 4, 7, 9]


def test_cohorts_change_with_the_round_and_the_seed_and_reach_everybody() -> None:
    trainers = range(6)
    by_round = [tuple(sample_cohort(trainers, 2, seed=0, round=round)) for round in range(1, 40)]
    assert {client for cohort in by_round for client in cohort} == set(trainers)
    assert by_round != [tuple(sample_cohort(trainers, 2, seed=1, round=round)) for round in range(1, 40)]


def test_a_round_without_evaluation_has_null_accuracies_and_the_last_is_always_evaluated(tiny: Tiny) -> None:
    session, real = opened(tiny("fedavg", "server.rounds=5", "server.eval_every=2"))
    records = list(run_rounds(session, real))
    assert [record.round for record in records if record.accuracy is not None] == [2, 4, 5]
    for record in (records[0], records[2]):
        assert record.accuracy is None
        assert record.accuracy_mean is None
        assert record.accuracy_weighted is None
        assert record.accuracy_worst is None


def test_how_often_is_evaluated_does_not_change_the_model(tiny: Tiny) -> None:
    often, seldom = (tiny("fedcir", f"server.eval_every={every}") for every in (1, 3))
    assert same(after(*opened(often)), after(*opened(seldom)))


def counts(client: int, correct: int, count: int) -> ClientReply:
    return ClientReply(client, count, {}, {"correct": correct, "count": count})


def test_mean_weighted_and_worst_accuracy_by_hand(tiny: Tiny) -> None:
    session, real = opened(tiny("fedavg", "server.rounds=1"))
    (record,) = run_rounds(session, Examined(real, [counts(2, 0, 4), counts(0, 9, 12), counts(1, 4, 8)]))
    assert record.accuracy == {"ink": 0.75, "pen": 0.5, "wax": 0.0}
    assert list(record.accuracy) == ["ink", "pen", "wax"]
    assert record.accuracy_mean == (0.75 + 0.5 + 0.0) / 3
    assert record.accuracy_weighted == 13 / 24
    assert record.accuracy_worst == 0.0


def test_a_domain_that_is_not_evaluated_is_dropped_and_the_others_count(tiny: Tiny) -> None:
    session, real = opened(tiny("fedavg", "server.rounds=1"))
    (record,) = run_rounds(session, Examined(real, [counts(0, 6, 12), DroppedReply(1, "gone")]))
    assert record.accuracy == {"ink": 0.5}
    assert record.dropped == {"1": "evaluation: gone", "2": "evaluation: no reply"}


def test_a_run_that_nobody_evaluated_still_ends_with_a_summary(tiny: Tiny) -> None:
    session, real = opened(tiny("fedavg", "server.rounds=1"))
    (record,) = run_rounds(session, Examined(real, []))
    assert record.accuracy is None
    assert summarise(session)["final"] is None


def test_a_held_out_domain_is_tested_on_and_not_trained_on(tiny: Tiny) -> None:
    session, real = opened(tiny("fedavg", "server.rounds=1", "partition.hold_out=pen"))
    assert list(session.roster.trainers) == [0, 1]
    (record,) = run_rounds(session, real)
    assert record.accuracy is not None
    assert list(record.accuracy) == ["ink", "wax", "pen"]
    assert record.bytes_up == 2 * (4 * (CNN + HEAD) + COUNTERS)


def test_a_held_out_domain_has_a_mean_of_its_own_and_is_in_no_other(tiny: Tiny) -> None:
    session, real = opened(tiny("fedavg", "server.rounds=1", "partition.hold_out=pen"))
    (record,) = run_rounds(session, Examined(real, [counts(0, 9, 12), counts(1, 4, 8), counts(2, 1, 4)]))
    assert record.accuracy == {"ink": 0.75, "wax": 0.5, "pen": 0.25}
    assert (record.accuracy_mean, record.accuracy_weighted, record.accuracy_worst) == (0.625, 13 / 20, 0.5)
    assert (record.unseen, record.accuracy_unseen) == (["pen"], 0.25)
    final = summarise(session)["final"]
    assert (final["accuracy_mean"], final["accuracy_unseen"], final["unseen"]) == (0.625, 0.25, ["pen"])
    assert replace(record, risk={"ink": 1.0, "wax": 2.0, "pen": 9.0}).risk_mean == 1.5


def test_a_round_in_which_only_a_held_out_domain_was_tested_has_no_mean(tiny: Tiny) -> None:
    session, real = opened(tiny("fedavg", "server.rounds=1", "partition.hold_out=pen"))
    (record,) = run_rounds(session, Examined(real, [counts(2, 1, 4)]))
    assert (record.accuracy, record.accuracy_mean, record.accuracy_unseen) == ({"pen": 0.25}, None, 0.25)
    assert summarise(session)["final"] is None


@pytest.mark.parametrize("method", ["fedavg", "centralized"])
def test_without_a_held_out_domain_nothing_tells_of_one(tiny: Tiny, method: str) -> None:
    for record in run_rounds(*opened(tiny(method))):
        assert (record.unseen, record.accuracy_unseen) == (None, None)


def test_bytes_of_fedavg_by_hand(tiny: Tiny) -> None:
    one = 4 * (CNN + HEAD) + COUNTERS
    for active in (1, 3):
        for record in run_rounds(*opened(tiny("fedavg", f"server.active={active}"))):
            assert (record.bytes_down, record.bytes_up) == (active * one, active * one)


@pytest.mark.parametrize(
    ("algorithm", "further"),
    [("fedcir", GENERATOR + 2 * 3 * 128 * 4), ("fedreg", GENERATOR), ("fedalign", 2 * 3 * 128 * 4)],
)
def test_bytes_of_fedcir_by_hand_generator_and_gaussians_from_round_2_on(
    tiny: Tiny, algorithm: str, further: int
) -> None:
    model = 4 * (CNN + GAUSSIAN + HEAD) + COUNTERS
    records = list(run_rounds(*opened(tiny(algorithm))))
    assert [record.bytes_up for record in records] == [3 * model] * 3
    assert [record.bytes_down for record in records] == [3 * model] + [3 * (model + further)] * 2


def test_seconds_hold_every_phase_and_their_total(tiny: Tiny) -> None:
    for record in run_rounds(*opened(tiny("fedavg"))):
        assert record.seconds.keys() == {"load", "train", "server", "evaluate", "write", "total"}
        phases = sum(value for phase, value in record.seconds.items() if phase != "total")
        assert all(value >= 0 for value in record.seconds.values())
        assert phases <= record.seconds["total"] + 1e-6


def test_counts_that_make_no_sense_are_dropped(tiny: Tiny) -> None:
    session, transport = opened(tiny("fedavg", "server.rounds=1"))
    good = {client: {"correct": 1.0, "count": 4.0} for client in session.roster.evaluators}
    replies = [
        ClientReply(client, 4, {}, {"correct": 5.0, "count": 4.0} if client == 0 else good[client]) for client in good
    ]
    (record,) = run_rounds(session, Examined(transport, replies))
    assert record.dropped == {"0": "evaluation: its counts are invalid"}
    assert record.accuracy == {domain: 0.25 for client, domain in session.roster.evaluators.items() if client != 0}
