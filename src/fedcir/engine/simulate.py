"""A configured run on this machine, opened and ready to go."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from fedcir.algorithms import make_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.attacks import with_bad_clients
from fedcir.config import Config
from fedcir.data.federation import Federation, open_federation, pooled
from fedcir.data.pictures.decode import OnFile
from fedcir.engine.folder import RunFolder
from fedcir.engine.machine import allowed_workers, devices_of, keep_memory, may_grow, pick_workers, threads
from fedcir.engine.own import check_own, keeps_something
from fedcir.engine.resume import kept_in
from fedcir.engine.rounds import Rounds, Transport, run
from fedcir.engine.session import Session, open_session
from fedcir.engine.store import GENERATIONS, ClientStore
from fedcir.engine.transports.processes import ProcessTransport
from fedcir.engine.transports.serial import SerialTransport
from fedcir.engine.transports.threads import ThreadTransport
from fedcir.types import InputError


@contextmanager
def open_run(
    config: Config,
    out: Path | None = None,
    resume: bool = False,
    on_file: OnFile | None = None,
    from_round: int | None = None,
) -> Iterator[tuple[Session, Rounds]]:
    """A configured run, and its rounds for the caller to go through. With `out` it is kept in that folder.

    `on_file` is told of images that are decoded, where the dataset has not been prepared. With `from_round`, a resumed
    run goes on from the newest checkpoint at or before that round.
    """
    started = time.perf_counter()
    algorithm = make_algorithm(config.algorithm)
    federation = open_federation(config, on_file)
    with open_rounds(config, algorithm, federation, out, resume, from_round) as (session, rounds):
        session.loading = time.perf_counter() - started
        yield session, rounds


@contextmanager
def open_rounds(
    config: Config,
    algorithm: Algorithm,
    federation: Federation,
    out: Path | None,
    resume: bool,
    from_round: int | None = None,
) -> Iterator[tuple[Session, Rounds]]:
    """The same for a federation that is there already."""
    federation = _as_met(federation, config, algorithm)
    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(RunFolder(out).locked())
        session = open_session(config, algorithm, federation)
        config = session.config
        if out is not None:
            kept_in(session, out, resume, from_round)
        if not session.finished:
            federation.load_features()  # after everything that may refuse the run
        stack.enter_context(threads(config.run.threads))
        keep_memory()
        workers = pick_workers(config, len(federation.evaluators))
        place = out / "clients" if out else None
        if place is None and workers > 1 and keeps_something(config, algorithm):
            place = Path(stack.enter_context(TemporaryDirectory(prefix="fedcir-")))
        saved = session.folder.saved if session.folder is not None else tuple
        session.store = store = ClientStore(place, GENERATIONS * config.server.checkpoint_every, saved)
        transport: Transport
        if workers == 1 and not may_grow(config.run.device):
            transport = SerialTransport(session.workbench(), federation.clients, store)
        elif config.run.device.startswith("cpu"):
            transport = ProcessTransport(session.workbench(), federation.clients, store, workers, allowed_workers)
            stack.callback(transport.close)
        else:
            places = devices_of(config.run.device)
            crew = [session.workbench(places[i % len(places)]) for i in range(workers)]
            transport = ThreadTransport(crew, federation.clients, store)
        rounds = run(session, transport)
        stack.callback(rounds.close)  # saves the last whole round if the caller stops early
        yield session, rounds


def check_run(config: Config, algorithm: Algorithm, federation: Federation) -> None:
    """Refuse settings, a method and data that do not go together, as a run of them would."""
    open_session(config, algorithm, _as_met(federation, config, algorithm))


def _as_met(federation: Federation, config: Config, algorithm: Algorithm) -> Federation:
    """The federation as a method meets it: with the bad clients of an experiment, or with all data in one place."""
    for client in federation.watchers:
        check_own(config, algorithm, client.domain, trains=False)
    federation = _attacked(federation, config, algorithm)
    return pooled(federation) if algorithm.pools else federation


def _attacked(federation: Federation, config: Config, algorithm: Algorithm) -> Federation:
    """The federation with the bad clients that an experiment asks for."""
    if config.attack.kind == "none":
        return federation
    if algorithm.pools:
        raise InputError(
            f"{config.algorithm.name} has all data in one place, so none of its clients is bad: set attack.kind=none"
        )
    classes, seed = federation.task.num_classes, config.run.seed
    clients = with_bad_clients(federation.clients, config.attack, algorithm.trains, classes, seed)
    return replace(federation, clients=clients)
