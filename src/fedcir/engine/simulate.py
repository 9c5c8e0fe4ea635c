"""A federation on this machine: the serial transport, and how a configured run is opened or resumed."""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fedcir.algorithms import make_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import AlgorithmConfig, Config, build, config_tables, differing
from fedcir.data.decode import OnFile
from fedcir.data.federation import Client, Federation, Roster, open_federation, pooled
from fedcir.engine.client import Worker
from fedcir.engine.cost import peak_memory
from fedcir.engine.folder import GENERATIONS, ClientStore, RunFolder, file_hash
from fedcir.engine.machine import (
    devices_of,
    keep_memory,
    layout_for,
    pick_device,
    pick_workers,
    threads,
    unsafe_in_channels_last,
)
from fedcir.engine.rounds import Session, Transport, run
from fedcir.engine.transports.processes import WorkerTransport, attend
from fedcir.engine.transports.threads import StreamTransport
from fedcir.models.task import Task
from fedcir.models.tensors import is_statistic
from fedcir.types import ClientReply, InputError, RoundRecord, ServerState

Rounds = Generator[RoundRecord, None, None]

MAY_DIFFER = {
    "server.rounds",
    "server.checkpoint_every",
    "data.root",
    "data.lists",
    "partition.file",
    "run.device",
    "run.workers",
}
"""Settings that a resume may change."""

OPEN = {"server.active": None, "run.layout": "auto"}
"""Settings that are settled only when a run is opened."""


class SerialTransport:
    """Clients one after the other in this process."""

    def __init__(self, worker: Worker, clients: Sequence[Client], store: ClientStore | None = None) -> None:
        self.worker, self.clients, self.store = worker, clients, store or ClientStore()

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        for client in cohort:
            yield attend(self.worker, self.clients[client], self.store, "train", state.shared, state.round + 1)

    def evaluate(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        for client in cohort:
            yield attend(self.worker, self.clients[client], self.store, "evaluate", state.shared, state.round)

    def evaluate_early(self, state: ServerState, cohort: Sequence[int]) -> None:
        pass

    def peak_memory(self) -> int:
        return peak_memory()


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
    for client in federation.clients:
        check_statistics(config, algorithm, client.domain, client.train is not None)
    with open_rounds(resolve(config, algorithm, federation), algorithm, federation, out, resume) as (session, rounds):
        session.loading = time.perf_counter() - started
        yield session, rounds


@contextmanager
def open_rounds(
    config: Config, algorithm: Algorithm, federation: Federation, out: Path | None, resume: bool
) -> Iterator[tuple[Session, Rounds]]:
    """The same for a federation that is there already."""
    if algorithm.pools:
        federation = pooled(federation)
    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(RunFolder(out).locked())
        session = open_session(config, algorithm, federation, out, resume)
        stack.enter_context(threads(config.run.threads))
        keep_memory()
        workers = pick_workers(config, len(federation.evaluators))
        place = out / "clients" if out else None
        if place is None and workers > 1 and (algorithm.keeps or keeps_statistics(config, algorithm)):
            place = Path(stack.enter_context(TemporaryDirectory(prefix="fedcir-")))
        store = ClientStore(place, GENERATIONS * config.server.checkpoint_every)
        transport: Transport
        if workers == 1:
            transport = SerialTransport(make_worker(session, federation), federation.clients, store)
        elif config.run.device.startswith("cpu"):
            transport = WorkerTransport(make_worker(session, federation), federation.clients, store, workers)
            stack.callback(transport.close)
        else:
            places = devices_of(config.run.device)
            crew = [make_worker(session, federation, places[i % len(places)]) for i in range(workers)]
            transport = StreamTransport(crew, federation.clients, store)
        rounds = run(session, transport)
        stack.callback(rounds.close)  # saves the last whole round if the caller stops early
        yield session, rounds


def resolve(config: Config, algorithm: Algorithm, federation: Roster) -> Config:
    """The config with everything that was left open settled, as it is saved."""
    clients = len(federation.trainers)
    active = clients if config.server.active is None else config.server.active
    if active > clients:
        raise InputError(f"server.active is {active}, but there are {clients} clients: lower --active")
    if config.server.min_replies > active:
        raise InputError(f"server.min_replies is {config.server.min_replies}, above the {active} active clients")
    run = replace(config.run, device=str(pick_device(config.run.device)))
    if run.layout == "auto":
        run = replace(run, layout=layout_for(config.model, federation.card.get("image_size", 0)))
    elif run.layout == "channels_last" and (fault := unsafe_in_channels_last(federation.task.encoder())):
        raise InputError(f"run.layout=channels_last is not safe with {fault}: leave it out")
    build(type(algorithm), hyper_parameters(algorithm), "algorithm")  # one made in Python has not been checked
    return replace(
        config,
        server=replace(config.server, active=active),
        algorithm=AlgorithmConfig(config.algorithm.name, hyper_parameters(algorithm)),
        run=run,
    )


def hyper_parameters(algorithm: Algorithm) -> dict[str, Any]:
    return {f.name: getattr(algorithm, f.name) for f in fields(algorithm) if f.init}


def open_session(config: Config, algorithm: Algorithm, federation: Roster, out: Path | None, resume: bool) -> Session:
    """A session at its start, or where the run in `out` was left."""
    modules = algorithm.build(federation.task)
    session = Session(
        config=config,
        algorithm=algorithm,
        modules=modules,
        num_classes=federation.task.num_classes,
        trainers=federation.trainers,
        evaluators=federation.evaluators,
        unseen=federation.unseen,
        card={**federation.card, **_model_card(config)},
        state=ServerState(0, {}),
        notes=federation.notes,
    )
    session.state = algorithm.start(modules, session.context(0))
    if keeps_statistics(config, algorithm):
        weights = {name: t for name, t in session.state.shared["model"].items() if not is_statistic(name)}
        session.state = replace(session.state, shared={**session.state.shared, "model": weights})
    if out is None:
        return session
    session.folder = folder = RunFolder(out)
    if not folder.exists:
        folder.create(config, federation.manifest)
        return session
    if not resume:
        raise InputError(f"{out} holds a run already: continue it with --resume, or give another --out")
    check_settings(folder, config, algorithm)
    check_data(folder, config, federation)
    state = folder.load_checkpoint()
    if state is not None:
        session.state = state
    if not session.finished or not folder.finished:
        session.records = folder.rewind(session.state.round)
        folder.create(config, federation.manifest)  # a longer run says so
    else:
        session.records = folder.records()
        if not folder.has_model():
            folder.save_model(session.state.shared["model"], session.card)
            said = f"{out}/model.safetensors was missing or damaged: it is written again from the last checkpoint"
            session.notes = (*session.notes, said)
    return session


def make_worker(session: Session, federation: Federation, device: str | None = None) -> Worker:
    return worker_of(session.config, session.algorithm, federation.task, device)


def worker_of(config: Config, algorithm: Algorithm, task: Task, device: str | None = None) -> Worker:
    """A worker for a settled config."""
    modules = algorithm.build(task)
    if config.run.compile:
        for network in modules["model"].children():
            network.compile()  # the parts, since methods call them one by one
    return Worker(
        algorithm=algorithm,
        modules=modules,
        seed=config.run.seed,
        total_rounds=config.server.rounds,
        num_classes=task.num_classes,
        local=replace(config.local, steps=config.local.steps * (config.server.active or 1))
        if algorithm.pools
        else config.local,
        device=torch.device(device or config.run.device),
        precision=getattr(torch, config.run.precision),
        layout=torch.channels_last if config.run.layout == "channels_last" else torch.contiguous_format,
        keeps_statistics=keeps_statistics(config, algorithm),
    )


def keeps_statistics(config: Config, algorithm: Algorithm) -> bool:
    """Whether each site has BatchNorm statistics of its own; with all data in one place there is one site only."""
    return config.model.batchnorm == "local" and not algorithm.pools


def check_statistics(config: Config, algorithm: Algorithm, domain: str, trains: bool) -> None:
    """A site's own statistics are those of its training data."""
    if keeps_statistics(config, algorithm) and not trains:
        raise InputError(
            f"model.batchnorm=local needs training data at every site, {domain!r} has none: "
            "it does not go with --hold-out"
        )


def _model_card(config: Config) -> dict[str, Any]:
    """What it takes to build the network again; no path, so that equal runs are equal files."""
    model = {name: value for name, value in config_tables(config)["model"].items() if name != "weights"}
    return {"model": model, "algorithm": {"name": Path(config.algorithm.name).stem, **config.algorithm.fields}}


def check_settings(folder: RunFolder, config: Config, algorithm: Algorithm) -> None:
    """Refuse to go on with a run under other settings than it was begun with."""
    asked = replace(config, algorithm=replace(config.algorithm, fields=hyper_parameters(algorithm)))
    _check_file(folder, config)
    for key, (old, new) in differing(folder.config(), asked).items():
        if key not in MAY_DIFFER and not (key in OPEN and new == OPEN[key]) and not _same_file(key, old, new):
            raise InputError(f"{folder.path} was begun with {key}={old}, not {new}: give another --out")
    old_rounds, new_rounds = folder.config().server.rounds, config.server.rounds
    if new_rounds < old_rounds:
        raise InputError(
            f"{folder.path} was begun with {old_rounds} rounds, not {new_rounds}: only more can be asked for"
        )
    if new_rounds > old_rounds and (algorithm.uses_total_rounds or config.local.schedule != "constant"):
        what = config.algorithm.name if algorithm.uses_total_rounds else f"the {config.local.schedule} schedule"
        raise InputError(f"{folder.path} cannot be extended to {new_rounds} rounds: {what} depends on their number")


def check_data(folder: RunFolder, config: Config, federation: Roster) -> None:
    """Refuse to go on with a run on other data than it was begun on."""
    if folder.manifest().get("hash") != federation.manifest["hash"]:
        raise InputError(f"{folder.path} was begun on other data than {config.data.name} holds now: give another --out")


def _check_file(folder: RunFolder, config: Config) -> None:
    """An algorithm of the user's own is the one that the run's rounds were done with, wherever its file lies now."""
    begun, path = folder.algorithm_hash(), Path(config.algorithm.name)
    if begun is not None and path.suffix == ".py" and file_hash(path) != begun and folder.records():
        raise InputError(
            f"{path} is not as it was when {folder.path} was begun: give another --out "
            f"(that run's copy is {folder.path / Path(folder.config().algorithm.name).name})"
        )


def _same_file(key: str, old: Any, new: Any) -> bool:
    """Whether both name the file of one algorithm: its content is checked apart."""
    files = isinstance(old, str) and isinstance(new, str) and old.endswith(".py")
    return key == "algorithm.name" and files and Path(old).name == Path(new).name
