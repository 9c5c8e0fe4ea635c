"""What a run with Poisson sampling writes must not tell who trained: epsilon relies on it."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fedcir.algorithms import make_algorithm
from fedcir.config import Config
from fedcir.data.federation import open_federation
from fedcir.errors import RunError
from fedcir.models.tensors import count_bytes
from fedcir.rng import numpy_rng
from fedcir.runs.tracking import flatten_record
from fedcir.runtime.rounds import SerialTransport, run_rounds
from fedcir.runtime.session import Session, make_trainer, open_session
from fedcir.runtime.simulation import open_run
from fedcir.server.accounting import sample_poisson_cohort
from fedcir.types import ClientReply, DroppedReply, RoundRecord, ServerState

Tiny = Callable[..., Config]
SECRET = ("privacy.clip=1", "privacy.noise=1", "model.norm=group", "server.active=1", "local.steps=2")
COVERED = ("fedavg", "fedcir", "fedcirplus", "fedprox", "fedsr", "fedavgm", "feddyn", "moon", "fedlc", "fedreg")


class Failing(SerialTransport):
    """A transport over which client 0 never replies."""

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterable[ClientReply | DroppedReply]:
        for reply in super().train(state, cohort):
            yield reply if reply.client_id else DroppedReply(0, "no reply")


def opened(config: Config, kind: type[SerialTransport] = SerialTransport) -> tuple[Session, SerialTransport]:
    algorithm, federation = make_algorithm(config.algorithm), open_federation(config)
    session = open_session(config, algorithm, federation)
    return session, kind(make_trainer(session.config, algorithm, federation.builder), federation.clients)


def shown(record: RoundRecord) -> dict[str, object]:
    """What a record holds beside what a model of its own explains: its accuracies, and times."""
    apart = ("round", "epsilon", "scores", "score_mean", "score_weighted", "score_worst", "risk")
    values = {name: value for name, value in asdict(record).items() if name not in apart}
    return {**values, "seconds": sorted(record.seconds)}


def test_records_are_the_same_whoever_trained(tiny: Tiny) -> None:
    seen, cohorts = [], []
    for seed in (0, 1):
        session, transport = opened(tiny("fedavg", *SECRET, f"run.seed={seed}", "server.rounds=4"))
        cohorts += [session.cohort(round) for round in range(1, 5)]
        seen += [shown(record) for record in run_rounds(session, transport)]
    assert len({len(cohort) for cohort in cohorts}) > 1, "or the test shows nothing"
    assert all(values == seen[0] for values in seen)
    assert seen[0]["losses"] == {}
    assert seen[0]["bytes_down"] == count_bytes(session.state.shared), "of the one client that is expected"
    assert seen[0]["seconds"] == ["evaluate", "load", "total", "write"]


def test_records_tell_of_no_client_that_was_drawn_and_failed(tiny: Tiny) -> None:
    seed = next(
        seed for seed in range(99) if sample_poisson_cohort(range(3), 2 / 3, numpy_rng(seed, "poisson", 1)) == [0, 2]
    )
    config = tiny("fedavg", *SECRET, "server.active=2", "server.rounds=1", f"run.seed={seed}")
    (failed,) = run_rounds(*opened(config, Failing))
    (usual,) = run_rounds(*opened(config))
    assert shown(failed) == shown(usual)
    with pytest.raises(RunError, match=r"^round 1: too few replies are usable for server.min_replies=2 \(no reply\)$"):
        list(run_rounds(*opened(replace(config, server=replace(config.server, min_replies=2)), Failing)))


@pytest.mark.parametrize("name", COVERED)
def test_expected_flops_are_those_of_the_expected_clients(tiny: Tiny, name: str) -> None:
    session, transport = opened(tiny(name, *SECRET, "server.active=2"))
    (reply,) = transport.train(session.state, (0,))
    assert isinstance(reply, ClientReply)
    assert session.expected_flops() == 2 * reply.metrics["flops"]


def test_summary_and_trackers_hold_expected_values(tiny: Tiny, tmp_path: Path) -> None:
    costs, logged = [], []
    for seed in (0, 1):
        out = tmp_path / str(seed)
        with open_run(tiny("fedavg", *SECRET, f"run.seed={seed}", "run.workers=1"), out) as (_, rounds):
            values = [flatten_record(record) for record in rounds]
        logged += [{name: item[name] for name in ("bytes_down", "bytes_up", "flops", "dropped")} for item in values]
        cost = json.loads((out / "summary.json").read_text(encoding="utf-8"))["cost"]
        costs.append({**cost, "seconds": sorted(cost["seconds"])})
    assert costs[0] == costs[1]
    assert costs[0]["peak_memory"] == 0
    assert all(item == logged[0] for item in logged)


def test_where_everybody_trains_in_every_round_records_hold_what_was_measured(tiny: Tiny) -> None:
    session, transport = opened(tiny("fedavg", "privacy.clip=1", "privacy.noise=1", "model.norm=group"))
    assert not session.has_secret_cohort
    record = next(iter(run_rounds(session, transport)))
    assert record.losses == {}, "a mean over clients without noise"
    assert "train" in record.seconds
