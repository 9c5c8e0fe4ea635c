"""The round loop, which every transport shares, and the transport that runs clients in turn."""

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

import torch

from fedcir.client.calibration import Calibration
from fedcir.client.client_requests import RequestKind, handle_request
from fedcir.client.cost import peak_memory, sum_costs
from fedcir.client.head_bank import COALITIONS, HeadBank
from fedcir.client.local_update import LocalTrainer
from fedcir.client.masks import FEWEST, MASKS, LostClients, simulate_masks, sum_masked
from fedcir.client.prediction import Hits
from fedcir.client.state import ClientStore
from fedcir.data.federation import Client
from fedcir.errors import RunError
from fedcir.models.tensors import clone, count_bytes, find_non_finite
from fedcir.runtime.file_formats import find_best, round_to_save
from fedcir.runtime.run_folder import SUMS
from fedcir.runtime.session import PRIVACY, Session
from fedcir.runtime.stored_sums import save_hits
from fedcir.server.replies import EvaluationTotals, ReplyCollector, tally_evaluations
from fedcir.types import ACCURACY, ClientReply, DroppedReply, Groups, RoundRecord, ServerState


class Transport(Protocol):
    """Sends a state to clients and returns their replies, in any order."""

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterable[ClientReply | DroppedReply]: ...

    def evaluate(self, state: ServerState, cohort: Sequence[int]) -> Iterable[ClientReply | DroppedReply]: ...

    def peak_memory(self) -> int:
        """Sum of the peak memory of all processes of this machine, in bytes."""
        ...


class SerialTransport:
    """Clients one after the other in this process."""

    def __init__(self, trainer: LocalTrainer, clients: Sequence[Client], store: ClientStore | None = None) -> None:
        self.trainer, self.clients, self.store = trainer, clients, store or ClientStore()

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return self._handle("train", state.round + 1, state.shared, cohort)

    def evaluate(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return self._handle("evaluate", state.round, state.shared, cohort)

    def peak_memory(self) -> int:
        return peak_memory()

    def _handle(self, kind: RequestKind, round: int, shared: Groups, cohort: Sequence[int]) -> Iterator[ClientReply]:
        for client in cohort:
            yield handle_request(self.trainer, self.clients[client], self.store, kind, shared, round)


Rounds = Generator[RoundRecord, None, None]


def run_rounds(session: Session, transport: Transport) -> Rounds:
    """Run the remaining rounds, and yield the record of each once it is on disk.

    The last complete round is saved however the loop ends: after the last round, by an error or by Ctrl-C.
    """
    folder, server = session.folder, session.config.server
    saved = session.state.round
    try:
        while not session.finished and not session.stop_requested:
            started = time.perf_counter()
            record, state, evaluation = _run_round(session, transport)
            writing = time.perf_counter()
            due = state.round % server.checkpoint_every == 0 or state.round == server.rounds
            is_best = round_to_save([*session.records, record], server.keep) == state.round
            due = due or (server.keep == "best" and is_best)
            due = due or (record.epsilon is not None and session.deployed)  # repeating the round would cost epsilon
            if folder is not None and due:
                _save_checkpoint(session, state, record)
                saved = state.round
            record.seconds["load"], session.loading = session.loading, 0.0
            _add_time(record.seconds, "write", writing)
            _add_time(record.seconds, "total", started, minus=-record.seconds["load"])
            if session.has_secret_cohort:  # the time of these phases depends on the number of clients that trained
                for phase in ("train", "server", "total"):
                    del record.seconds[phase]
                record.seconds["total"] = sum(record.seconds.values())
            else:
                session.peak_memory = max(session.peak_memory, transport.peak_memory())
            session.hits = None if session.deployed else Hits.from_replies(evaluation.tensors, state.round)
            if folder is not None:
                calibration = None if session.config.privacy.noise else Calibration.of(evaluation.replies, state.round)
                if calibration is not None and is_best:
                    folder.save_json("calibration.json", calibration.to_json())
                if session.hits is not None:
                    folder.save_json("hits.json", session.hits.to_json())
                if evaluation.sums and not evaluation.task.has_classes:
                    folder.save_json(SUMS, {"round": state.round, "domains": evaluation.sums})
                folder.append(record)
            session.state = state
            session.records.append(record)
            yield record
        if folder is not None and not folder.finished:
            folder.finish(summarise(session), session.model, session.card)
    finally:
        if folder is not None and session.state.round > saved:
            _save_checkpoint(session, session.state, session.records[-1])


def _save_checkpoint(session: Session, state: ServerState, record: RoundRecord) -> None:
    """Save a checkpoint. With noise, the best round's is not kept longer, because accuracies have no noise."""
    assert session.folder is not None
    records = () if session.config.privacy.noise else session.records
    session.folder.save_checkpoint(state, records, session.store.rounds(state.round), record)


def summarise(session: Session) -> dict[str, Any]:
    """Return the content of summary.json."""
    evaluated = [record for record in session.records if record.score_mean is not None]
    best, metric = find_best(evaluated), session.roster.builder.task.primary
    picked_on = "validation" if any(record.validation for record in evaluated) else "test"
    cost = asdict(sum_costs(session.records))
    del cost["rounds"]
    return {
        "algorithm": session.config.algorithm.name,
        "dataset": session.config.data.name,
        "seed": session.config.run.seed,
        "rounds": session.state.round,
        **({} if metric == ACCURACY else {"metric": asdict(metric)}),
        "final": _list_scores(evaluated[-1]) if evaluated else None,
        "best": {**_list_scores(best), "picked_on": picked_on} if best is not None else None,
        "saved": session.saved,
        "cost": {**cost, "peak_memory": session.peak_memory},
        **({} if session.guarantee is None else {"privacy": session.guarantee}),
    }


def step_server(
    session: Session, replies: Iterable[ClientReply | DroppedReply], cohort: Sequence[int]
) -> tuple[ServerState, ReplyCollector]:
    """Aggregate the replies of a cohort into the next state; also return the collector, which counted them."""
    before = session.state
    round = before.round + 1
    received = before.shared if session.upload != "float32" else None
    collector = ReplyCollector(
        *(round, session.template(), session.config.server.min_replies, session.roster.sizes, session.screen()),
        *(received, session.has_secret_cohort),
    )
    if not session.config.server.masked:
        collector.find_fault = partial(session.algorithm.find_reply_fault, ctx=session.context(round))
    usable: Iterable[ClientReply] = collector.collect(replies, cohort)
    context = session.context(round)
    if session.stored_sums is not None:
        usable = session.stored_sums.save(usable, round)
    if session.config.server.masked:
        usable, context = sum_masked(session.algorithm, list(usable), collector.dropped, context)
    private = session.private_mean()
    if private is not None:
        usable = private.release(usable, session.evaluation_groups(before))
    state = session.algorithm.server_step(
        replace(before, private=clone(before.private)), usable, session.modules, context
    )
    if private is not None:
        clip = {"clip": torch.tensor(private.clip, dtype=torch.double)}
        state = replace(state, private={**state.private, PRIVACY: clip})
    if (name := find_non_finite(state.shared)) is not None:
        raise RunError(f"round {round}: {name} is not finite after the server's step: lower the server's learning rate")
    return state, collector


def _step_masked(
    session: Session, transport: Transport, cohort: Sequence[int], seconds: dict[str, float]
) -> tuple[ServerState, ReplyCollector]:
    """Ask a cohort for masked sums, and if clients are lost, ask the others again, with fresh masks."""
    lost: dict[str, str] = {}
    while True:
        keys = session.mask_keys(cohort)
        broadcast = replace(session.state, shared={**session.state.shared, MASKS: keys})
        replies = transport.train(broadcast, cohort)
        if not session.deployed:
            replies = simulate_masks(replies, keys, session.config.run.seed)
        try:
            state, collector = step_server(session, _time_replies(replies, seconds), cohort)
        except LostClients as error:
            lost |= error.dropped
            cohort = [client for client in cohort if str(client) not in lost]
            if len(cohort) < max(FEWEST, session.config.server.min_replies):
                raise
            continue
        collector.dropped |= lost
        return state, collector


def _run_round(session: Session, transport: Transport) -> tuple[RoundRecord, ServerState, EvaluationTotals]:
    server, before = session.config.server, session.state
    round = before.round + 1
    epsilon, cohort = session.spend_epsilon(), session.cohort(round)
    seconds = {"train": 0.0}
    started = time.perf_counter()
    if server.masked:
        state, collector = _step_masked(session, transport, cohort, seconds)
    else:
        state, collector = step_server(session, _time_replies(transport.train(before, cohort), seconds), cohort)
    _add_time(seconds, "server", started, minus=seconds["train"])
    measured = time.perf_counter()
    dropped = {} if session.has_secret_cohort else collector.dropped
    evaluation = EvaluationTotals(session.roster.builder.task)
    if round % server.eval_every == 0 or round == server.rounds:
        session.next_state = state
        trained = replace(state, shared=session.evaluation_groups(state))
        heads = _ask_coalitions(session, trained)
        replies = transport.evaluate(trained, sorted(session.roster.evaluators))
        evaluation = tally_evaluations(session.roster, replies, dropped)
        if heads is not None and session.folder is not None and session.stored_sums is not None:
            bits = {d: groups[COALITIONS]["bits"] for d, groups in evaluation.tensors.items() if COALITIONS in groups}
            save_hits(session.folder.path, session.stored_sums.list_clients(), bits, heads)
    _add_time(seconds, "evaluate", measured)
    bytes_down, bytes_up, flops = _count_cost(session, before, cohort, collector)
    record = RoundRecord(
        round=round,
        losses={} if session.config.privacy.noise else collector.losses(),  # means over clients, without noise
        **evaluation.to_fields(session.roster.unseen),
        bytes_down=bytes_down,
        bytes_up=bytes_up,
        flops=flops,
        seconds=seconds,
        dropped=dropped,
        epsilon=epsilon,
    )
    return record, state, evaluation


def _ask_coalitions(session: Session, trained: ServerState) -> HeadBank | None:
    """Add the heads of all coalitions to what clients are to test, where sums of several clients are stored."""
    stored = session.stored_sums
    if stored is None or not session.roster.evaluators or len(clients := stored.list_clients()) < 2:
        return None
    sums = {client: lambda client=client: stored.load(client)["sums"] for client in clients}
    heads = session.solve_coalitions(trained, sums)
    trained.shared[COALITIONS] = heads.to_tensors()
    return heads


def _count_cost(
    session: Session, sent: ServerState, cohort: Sequence[int], collector: ReplyCollector
) -> tuple[int, int, int]:
    """Bytes down, bytes up and FLOPs of a round; expected values if the cohort is secret."""
    clients, up, flops = len(cohort), collector.bytes_up, collector.flops
    if session.has_secret_cohort:
        clients, flops = session.expected_clients, session.expected_flops()
        up = clients * count_bytes(collector.template)
    if session.algorithm.pools:
        return 0, 0, flops
    return clients * count_bytes(sent.shared), up, flops


def _time_replies(
    replies: Iterable[ClientReply | DroppedReply], seconds: dict[str, float]
) -> Iterator[ClientReply | DroppedReply]:
    """Yield the replies, and add the time spent waiting for them to the training time."""
    iterator = iter(replies)
    while True:
        started = time.perf_counter()
        reply = next(iterator, None)
        _add_time(seconds, "train", started)
        if reply is None:
            return
        yield reply


def _list_scores(record: RoundRecord) -> dict[str, Any]:
    unseen, means = bool(record.unseen), ("score_mean", "score_weighted", "score_worst")
    names = ("round", *means, *["score_unseen"] * unseen, "scores", *["unseen"] * unseen)
    further = {} if record.metrics is None else {"metrics": record.metrics}
    return {record.metric.name_in_files(name): getattr(record, name) for name in names} | further


def _add_time(seconds: dict[str, float], phase: str, started: float, minus: float = 0.0) -> None:
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started - minus
