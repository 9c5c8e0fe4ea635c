"""A configured run on this machine, opened and ready to go."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from fedcir.algorithms import make_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import Config
from fedcir.data.federation import Federation, open_federation, pooled
from fedcir.data.pictures.decode import OnFile
from fedcir.engine.folder import RunFolder
from fedcir.engine.machine import devices_of, keep_memory, pick_workers, threads
from fedcir.engine.resume import kept_in
from fedcir.engine.rounds import Rounds, Transport, run
from fedcir.engine.session import Session, check_own, open_session, own_batchnorm, upload_of
from fedcir.engine.store import GENERATIONS, ClientStore
from fedcir.engine.transports.processes import ProcessTransport
from fedcir.engine.transports.serial import SerialTransport
from fedcir.engine.transports.threads import ThreadTransport


@contextmanager
def open_run(
    config: Config, out: Path | None = None, resume: bool = False, on_file: OnFile | None = None
) -> Iterator[tuple[Session, Rounds]]:
    """A configured run, and its rounds for the caller to go through. With `out` it is kept in that folder.

    `on_file` is told of images that are decoded, where the dataset has not been prepared.
    """
    started = time.perf_counter()
    algorithm = make_algorithm(config.algorithm)
    federation = open_federation(config, on_file)
    with open_rounds(config, algorithm, federation, out, resume) as (session, rounds):
        session.loading = time.perf_counter() - started
        yield session, rounds


@contextmanager
def open_rounds(
    config: Config, algorithm: Algorithm, federation: Federation, out: Path | None, resume: bool
) -> Iterator[tuple[Session, Rounds]]:
    """The same for a federation that is there already."""
    for client in federation.clients:
        check_own(config, algorithm, client.domain, client.train is not None)
    if algorithm.pools:
        federation = pooled(federation)
    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(RunFolder(out).locked())
        session = open_session(config, algorithm, federation)
        config = session.config
        if out is not None:
            kept_in(session, out, resume)
        stack.enter_context(threads(config.run.threads))
        keep_memory()
        workers = pick_workers(config, len(federation.evaluators))
        place = out / "clients" if out else None
        rounds_off = upload_of(config, algorithm) != "float32"
        keeps = algorithm.keeps or algorithm.remembers or own_batchnorm(config, algorithm) or rounds_off
        if place is None and workers > 1 and keeps:
            place = Path(stack.enter_context(TemporaryDirectory(prefix="fedcir-")))
        session.store = store = ClientStore(place, GENERATIONS * config.server.checkpoint_every)
        transport: Transport
        if workers == 1:
            transport = SerialTransport(session.workbench(), federation.clients, store)
        elif config.run.device.startswith("cpu"):
            transport = ProcessTransport(session.workbench(), federation.clients, store, workers)
            stack.callback(transport.close)
        else:
            places = devices_of(config.run.device)
            crew = [session.workbench(places[i % len(places)]) for i in range(workers)]
            transport = ThreadTransport(crew, federation.clients, store)
        rounds = run(session, transport)
        stack.callback(rounds.close)  # saves the last whole round if the caller stops early
        yield session, rounds
