"""The one round loop, whatever carries the messages."""

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch

from fedcir.engine.best import best_of, round_to_save
from fedcir.engine.calibration import Calibration
from fedcir.engine.cost import ledger
from fedcir.engine.hits import Hits
from fedcir.engine.replies import Collected, Tests, tally
from fedcir.engine.session import PRIVACY, Session
from fedcir.models.tensors import clone, not_finite, tensor_bytes
from fedcir.types import ClientReply, Dropped, RoundRecord, RunError, ServerState


class Transport(Protocol):
    """Carries a state to clients and their replies back, in any order."""

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterable[ClientReply | Dropped]: ...

    def evaluate(self, state: ServerState, cohort: Sequence[int]) -> Iterable[ClientReply | Dropped]: ...

    def peak_memory(self) -> int:
        """Bytes that all processes of this machine together have held at most."""
        ...


Rounds = Generator[RoundRecord, None, None]


def run(session: Session, transport: Transport) -> Rounds:
    """Do the rounds that are left, giving each one's record once it is on disk.

    However it ends (done, an error, Ctrl-C), the last whole round is saved.
    """
    folder, server = session.folder, session.config.server
    saved = session.state.round
    try:
        while not session.finished and not session.stop_requested:
            started = time.perf_counter()
            record, state, tests = _round(session, transport)
            writing = time.perf_counter()
            due = state.round % server.checkpoint_every == 0 or state.round == server.rounds
            is_best = round_to_save([*session.records, record], server.keep) == state.round
            due = due or (server.keep == "best" and is_best)
            if folder is not None and (due or (record.epsilon is not None and session.deployed)):  # a repeat costs more
                _save(session, state, record)
                saved = state.round
            record.seconds["load"], session.loading = session.loading, 0.0
            _add(record.seconds, "write", writing)
            _add(record.seconds, "total", started, less=-record.seconds["load"])
            if session.has_secret_cohort:
                _leave_out_training(record.seconds)
            else:
                session.peak_memory = max(session.peak_memory, transport.peak_memory())
            session.hits = None if session.deployed else Hits.from_replies(tests.arrays, state.round)
            if folder is not None:
                calibration = None if session.config.privacy.noise else Calibration.of(tests.sums, state.round)
                if calibration is not None and is_best:
                    folder.save_calibration(calibration)
                if session.hits is not None:
                    folder.save_hits(session.hits)
                folder.append(record)
            session.state = state
            session.records.append(record)
            yield record
        if folder is not None and not folder.finished:
            folder.finish(summarise(session), session.model, session.card)
    finally:
        if folder is not None and session.state.round > saved:
            _save(session, session.state, session.records[-1])


def _save(session: Session, state: ServerState, record: RoundRecord) -> None:
    """Save a checkpoint. With noise, the best round's is not kept longer: accuracies have no noise."""
    assert session.folder is not None
    records = () if session.config.privacy.noise else session.records
    session.folder.save_checkpoint(state, records, session.store.rounds(state.round), record)


def summarise(session: Session) -> dict[str, Any]:
    """The content of summary.json."""
    evaluated = [record for record in session.records if record.accuracy_mean is not None]
    aside, best = any(record.validation for record in evaluated), best_of(evaluated)
    cost = asdict(ledger(session.records))
    del cost["rounds"]
    return {
        "algorithm": session.config.algorithm.name,
        "dataset": session.config.data.name,
        "seed": session.config.run.seed,
        "rounds": session.state.round,
        "final": _accuracies(evaluated[-1]) if evaluated else None,
        "best": {**_accuracies(best), "picked_on": "validation" if aside else "test"} if best is not None else None,
        "saved": session.saved,
        "cost": {**cost, "peak_memory": session.peak_memory},
        **_privacy(session),
    }


def _privacy(session: Session) -> dict[str, Any]:
    """The guarantee of a run with noise, as summary.json holds it; nothing without noise."""
    guarantee = session.guarantee
    return {} if guarantee is None else {"privacy": guarantee}


def take_step(
    session: Session, replies: Iterable[ClientReply | Dropped], cohort: Sequence[int]
) -> tuple[ServerState, Collected]:
    """The server's part of a round: the next state from the replies of a cohort, and what was counted on the way."""
    before = session.state
    round = before.round + 1
    received = before.shared if session.upload != "float32" else None
    collected = Collected(
        round,
        session.template(),
        session.config.server.min_replies,
        session.roster.sizes,
        session.screen(),
        received,
        session.has_secret_cohort,
    )
    handed = replace(before, private=clone(before.private))
    usable = collected.usable(replies, cohort)
    private = session.private_mean()
    if private is not None:
        usable = private.released(usable, session.to_test(before))
    state = session.algorithm.server_step(handed, usable, session.modules, session.context(round))
    if private is not None:
        clip = {"clip": torch.tensor(private.clip, dtype=torch.double)}
        state = replace(state, private={**state.private, PRIVACY: clip})
    if (name := not_finite(state.shared)) is not None:
        raise RunError(f"round {round}: {name} is not finite after the server's step: lower the server's learning rate")
    return state, collected


def _round(session: Session, transport: Transport) -> tuple[RoundRecord, ServerState, Tests]:
    server, before = session.config.server, session.state
    round = before.round + 1
    epsilon, cohort = session.spend(), session.cohort(round)
    seconds = {"train": 0.0}
    started = time.perf_counter()
    state, collected = take_step(session, _timed(transport.train(before, cohort), seconds), cohort)
    _add(seconds, "server", started, less=seconds["train"])
    measured = time.perf_counter()
    dropped = {} if session.has_secret_cohort else collected.dropped
    tests = Tests()
    if round % server.eval_every == 0 or round == server.rounds:
        session.coming = state
        trained = replace(state, shared=session.to_test(state))
        replies = transport.evaluate(trained, sorted(session.roster.evaluators))
        tests = tally(session.roster, replies, dropped)
    _add(seconds, "evaluate", measured)
    bytes_down, bytes_up, flops = _cost(session, before, cohort, collected)
    record = RoundRecord(
        round=round,
        losses={} if session.config.privacy.noise else collected.losses(),  # means over clients, without noise
        **tests.accuracies(session.roster.unseen),
        bytes_down=bytes_down,
        bytes_up=bytes_up,
        flops=flops,
        seconds=seconds,
        dropped=dropped,
        validation={domain: correct / count for domain, (correct, count) in tests.aside.items()} or None,
        risk=tests.risk or None,
        epsilon=epsilon,
    )
    return record, state, tests


def _cost(session: Session, sent: ServerState, cohort: Sequence[int], collected: Collected) -> tuple[int, int, int]:
    """Bytes down, bytes up and FLOPs of a round; expected values if nobody may learn which cohort trained."""
    clients, up, flops = len(cohort), collected.bytes_up, collected.flops
    if session.has_secret_cohort:
        clients, flops = session.expected_clients, session.expected_flops()
        up = clients * tensor_bytes(collected.template)
    if session.algorithm.pools:
        return 0, 0, flops
    return clients * tensor_bytes(sent.shared), up, flops


def _leave_out_training(seconds: dict[str, float]) -> None:
    """Remove what depends on the number of clients that trained; the total is that of the other phases."""
    for phase in ("train", "server", "total"):
        del seconds[phase]
    seconds["total"] = sum(seconds.values())


def _timed(replies: Iterable[ClientReply | Dropped], seconds: dict[str, float]) -> Iterator[ClientReply | Dropped]:
    """The same replies, with the time spent waiting for them counted as training."""
    iterator = iter(replies)
    while True:
        started = time.perf_counter()
        reply = next(iterator, None)
        _add(seconds, "train", started)
        if reply is None:
            return
        yield reply


def _accuracies(record: RoundRecord) -> dict[str, Any]:
    return {
        "round": record.round,
        "accuracy_mean": record.accuracy_mean,
        "accuracy_weighted": record.accuracy_weighted,
        "accuracy_worst": record.accuracy_worst,
        **({"accuracy_unseen": record.accuracy_unseen} if record.unseen else {}),
        "accuracy": record.accuracy,
        **({"unseen": record.unseen} if record.unseen else {}),
    }


def _add(seconds: dict[str, float], phase: str, started: float, less: float = 0.0) -> None:
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started - less
