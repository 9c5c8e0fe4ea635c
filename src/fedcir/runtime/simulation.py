"""Training on this machine: open_run() for a config, train() for any Datasets and any encoder."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from torch import nn

from fedcir.algorithms import make_algorithm
from fedcir.algorithms.algorithm import PERSONAL, Algorithm
from fedcir.client.local_update import get_local_tensors
from fedcir.client.state import GENERATIONS, ClientStore, check_local_data, has_client_state, has_local_tensors
from fedcir.config import (
    DEFAULT_ALGORITHM,
    AlgorithmConfig,
    Assignments,
    AttackConfig,
    Config,
    LocalConfig,
    ModelConfig,
    RunConfig,
    ServerConfig,
)
from fedcir.data.decoding import OnFile
from fedcir.data.federation import Federation, open_federation, pool_clients
from fedcir.data.torch_datasets import Pairs, federation_from_datasets
from fedcir.errors import InputError, suggest_name
from fedcir.machine import retain_freed_memory, use_threads
from fedcir.models.adapters import load_trained, merge_adapters
from fedcir.runtime.resolution import PARTIAL_SETTINGS, config_from_keywords, list_devices, pick_workers, resolve_config
from fedcir.runtime.resume import attach_run_folder
from fedcir.runtime.rounds import Rounds, SerialTransport, Transport, run_rounds, summarise
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.session import Session, open_session
from fedcir.runtime.workers import ProcessTransport, ThreadTransport
from fedcir.server.attacks import add_malicious_clients
from fedcir.tasks.classification import choose_task
from fedcir.tasks.task import Task
from fedcir.types import Groups, RoundRecord, Tensors


@contextmanager
def open_run(
    config: Config,
    out: Path | None = None,
    resume: bool = False,
    on_file: OnFile | None = None,
    from_round: int | None = None,
) -> Iterator[tuple[Session, Rounds]]:
    """Open a configured run, and yield its session and an iterator over its rounds.

    With `out` the run is saved in that folder. `on_file` is called for every image that is decoded, where the dataset
    has not been prepared. With `from_round`, a resumed run continues from the newest checkpoint at or before that
    round.
    """
    started = time.perf_counter()
    algorithm = make_algorithm(config.algorithm)
    federation = open_federation(config, on_file)
    with open_rounds(config, algorithm, federation, out, resume, from_round, on_file) as (session, rounds):
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
    on_file: OnFile | None = None,
) -> Iterator[tuple[Session, Rounds]]:
    """Open a run like `open_run`, for an open federation."""
    federation = _prepare_federation(federation, config, algorithm)
    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(RunFolder(out).lock())
        session = open_session(config, algorithm, federation)
        config = session.config
        if out is not None:
            attach_run_folder(session, out, resume, from_round)
        if not session.finished:
            federation.load_features()  # after every check that may refuse the run
        if session.state.round == 0 and config.model.start == "fedcirone":
            head = fit_head(config, "channels" in federation.card, on_file)
            model = {**session.state.shared["model"], **head}
            session.state = replace(session.state, shared={**session.state.shared, "model": model})
        stack.enter_context(use_threads(config.run.threads))
        retain_freed_memory()
        workers = pick_workers(config, len(federation.evaluators))
        store_path = out / "clients" if out else None
        if store_path is None and workers > 1 and has_client_state(config, algorithm):
            store_path = Path(stack.enter_context(TemporaryDirectory(prefix="fedcir-")))
        saved_rounds = session.folder.checkpoint_rounds if session.folder is not None else tuple
        session.store = store = ClientStore(store_path, GENERATIONS * config.server.checkpoint_every, saved_rounds)
        transport: Transport
        if workers == 1:
            transport = SerialTransport(session.make_trainer(), federation.clients, store)
        elif config.run.device.startswith("cpu"):
            transport = ProcessTransport(session.make_trainer(), federation.clients, store, workers)
            stack.callback(transport.close)
        else:
            devices = list_devices(config.run.device)
            trainers = [session.make_trainer(devices[number % len(devices)]) for number in range(workers)]
            transport = ThreadTransport(trainers, federation.clients, store)
        rounds = run_rounds(session, transport)
        stack.callback(rounds.close)  # saves the last complete round if the caller stops early
        yield session, rounds


def fit_head(config: Config, has_images: bool, on_file: OnFile | None = None) -> Tensors:
    """Fit the head of a run in closed form, on the features of the encoder that its training starts from.

    Features of images are cached. The mean and the spread of the federation's features are folded into the head.
    """
    whole: dict[str, Any] = dict.fromkeys(PARTIAL_SETTINGS, None) | {"adapter": "none"}  # adapters start as nothing
    model = replace(config.model, start="none", freeze=has_images, batchnorm="average", **whole)
    algorithm = AlgorithmConfig("fedcirone", {"standardise": "federation"})
    plain = replace(config, model=model, algorithm=algorithm, server=ServerConfig(rounds=1), local=LocalConfig())
    with open_run(replace(plain, attack=AttackConfig()), on_file=on_file) as (session, rounds):
        list(rounds)
        fitted = {name: tensor.double() for name, tensor in session.state.shared["model"].items()}
    weight = fitted["head.weight"] / fitted["encoder.scale"]
    bias = fitted["head.bias"] - weight @ fitted["encoder.mean"]
    return {"head.weight": weight.float(), "head.bias": bias.float()}


def check_run(config: Config, algorithm: Algorithm, federation: Federation) -> None:
    """Raise the error that a run with these settings, method and data would raise before its first round."""
    open_session(config, algorithm, _prepare_federation(federation, config, algorithm))


def _prepare_federation(federation: Federation, config: Config, algorithm: Algorithm) -> Federation:
    """Add the malicious clients of an experiment; pool all data if the algorithm does."""
    for client in federation.evaluation_only:
        check_local_data(config, algorithm, client.domain, trains=False)
    if algorithm.pools:
        if config.attack.kind != "none":
            reason = "has all data in one place, so no client is malicious"
            raise InputError(f"{config.algorithm.name} {reason}: set attack.kind=none")
        return pool_clients(federation)
    if config.attack.kind == "none":
        return federation
    task, seed = federation.builder.task, config.run.seed
    clients = add_malicious_clients(federation.clients, config.attack, algorithm.trains, task, seed)
    return replace(federation, clients=clients)


@dataclass(frozen=True)
class Result:
    """Result of `train`: the global model in evaluation mode, the record of every round, and the summary."""

    network: nn.Module
    """The global model. Tensors that stay on the clients are those of the first client."""
    records: list[RoundRecord]
    summary: dict[str, Any]
    own: Groups = field(default_factory=dict)
    """Tensors that stay on clients, by client name: BatchNorm (FedBN), the head (FedRep), or all (FedProto, Ditto)."""
    one_model: bool = True
    """Whether there is a global model."""

    @property
    def model(self) -> nn.Module:
        """The global model in evaluation mode. With FedBN or FedRep, that of the first client."""
        if not self.one_model:
            raise InputError(f"there is no model for all clients: take one client's, as in model_of({min(self.own)!r})")
        return merge_adapters(self.network)

    def model_of(self, client: str) -> nn.Module:
        """Return the model of a client that trained, with its local tensors."""
        if not self.own:
            return self.model
        if client not in self.own:
            raise InputError(f"no client {client!r} that trained; {suggest_name(client, self.own)}")
        model = copy.deepcopy(self.network)
        load_trained(model, self.own[client])
        return merge_adapters(model)


def train(
    clients: Pairs,
    *,
    encoder: nn.Module,
    num_classes: int | None = None,
    task: Task | None = None,
    algorithm: Algorithm | type[Algorithm] | str | Path = DEFAULT_ALGORITHM,
    rounds: int = ServerConfig.rounds,
    local_steps: int = LocalConfig.steps,
    batch_size: int = LocalConfig.batch_size,
    lr: float = LocalConfig.lr,
    momentum: float = LocalConfig.momentum,
    weight_decay: float = LocalConfig.weight_decay,
    prior: Literal["none", "client"] | None = None,
    active: int | None = ServerConfig.active,
    latent: int | None = ModelConfig.latent,
    seed: int = RunConfig.seed,
    eval_every: int = ServerConfig.eval_every,
    device: str = RunConfig.device,
    workers: int | None = RunConfig.workers,
    layout: Literal["contiguous", "channels_last"] = "contiguous",
    set: Assignments = (),
    out: str | Path | None = None,
    resume: bool = False,
    on_round: Callable[[RoundRecord], bool | None] | None = None,
) -> Result:
    """Train one model over clients, each a (train, test) pair of torch Datasets that give (input, target).

    `clients` is a list of such pairs, or a dict whose keys name them in records, summary and manifest. Either Dataset
    of a pair may be None: a client without a test Dataset only trains, one without a train Dataset is only evaluated.
    If no client has a test Dataset, scores are None. A list of (input, target) pairs is accepted as a Dataset.

    Floats are converted to single precision, bytes to fractions from 0 to 1; other integers are passed on unchanged,
    for an nn.Embedding. With `num_classes`, targets are integers below it, of any number type; a `task` such as
    fedcir.MultiLabel(("edema", "nodule")), fedcir.Regression(("age",)) or fedcir.Survival(("event", "time")) says what
    else is predicted.

    `encoder` maps a batch of inputs to features (batch, width), or for fedcir.Segmentation to maps of them;
    training starts from a copy of its weights. `algorithm` is a method such as fedcir.FedProx(mu=0.5), its class,
    its name, or the path of a file that defines one. With `out` the run is saved in that folder, and `resume`
    continues it there. `on_round` is called with the record of every round and may return False to stop: the model
    and the summary of that round are saved, and `resume` continues from there. On a CPU `workers` processes train
    at a time, by default one per core; a convolutional encoder is often faster with `layout="channels_last"`. With
    `prior="client"` the label shares of each client correct its cross-entropy, which helps where they differ; by
    default the algorithm decides. `set` holds any other settings of `local`, `server`, `run` and `privacy`, and
    those that say which parts of the encoder train: {"model.train": "layer4", "model.adapter": "lora"}.
    """
    predicted = choose_task(task, num_classes)
    config, method = config_from_keywords(
        algorithm,
        set,
        rounds=rounds,
        local_steps=local_steps,
        batch_size=batch_size,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        prior=prior,
        active=active,
        latent=latent,
        seed=seed,
        eval_every=eval_every,
        device=device,
        workers=workers,
        layout=layout,
    )
    federation = federation_from_datasets(clients, encoder, predicted, config.model.latent, config.run.seed)
    federation = replace(federation, builder=federation.builder.limit(config.model))
    config = resolve_config(config, method, federation)
    with open_rounds(config, method, federation, None if out is None else Path(out), resume) as (session, records):
        for record in records:
            if on_round is not None and on_round(record) is False:
                session.stop_requested = True
        states = {
            client.domain: session.store.load(client.id, session.state.round + 1)
            for client in (federation.clients if has_local_tensors(config, method) else ())
        }
    local = {name: tensors for name, groups in states.items() if (tensors := get_local_tensors(groups))}
    network = session.modules["model"]
    first = {} if PERSONAL in method.remembers else next(iter(local.values()), {})
    network.load_state_dict({**session.model, **first})
    summary = summarise(session) if session.folder is None else session.folder.summary()
    return Result(network.eval(), session.records, summary, local, method.one_model)
