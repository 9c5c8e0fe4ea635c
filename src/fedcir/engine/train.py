"""From Python: train() on any Datasets with any encoder."""

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from fedcir.algorithms import named_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import (
    DEFAULT_ALGORITHM,
    AlgorithmConfig,
    Config,
    DataConfig,
    LocalConfig,
    ModelConfig,
    RunConfig,
    ServerConfig,
    build,
    nearest,
    require_at_least,
)
from fedcir.data.federation import Pairs, federation_of
from fedcir.engine.client import BATCHNORM
from fedcir.engine.rounds import summarise
from fedcir.engine.session import hyper_parameters, own_batchnorm, settled
from fedcir.engine.simulate import open_rounds
from fedcir.types import Groups, InputError, RoundRecord


@dataclass(frozen=True)
class Result:
    """What training gives: the global model in evaluation mode, every round's record, and the summary."""

    model: nn.Module
    """Where each client has BatchNorm of its own (FedBN), that of the first; `model_of` gives any client's."""
    records: list[RoundRecord]
    summary: dict[str, Any]
    batchnorm: Groups = field(default_factory=dict)
    """The BatchNorm that clients have of their own, by their names. One that never trained has none."""

    def model_of(self, client: str) -> nn.Module:
        """The model as a client has it."""
        if not self.batchnorm:
            return self.model
        if client not in self.batchnorm:
            raise InputError(f"no client {client!r} that trained; {nearest(client, self.batchnorm)}")
        model = copy.deepcopy(self.model)
        model.load_state_dict({**model.state_dict(), **self.batchnorm[client]})
        return model


def train(
    clients: Pairs,
    *,
    encoder: nn.Module,
    num_classes: int,
    algorithm: Algorithm | type[Algorithm] | str | Path = DEFAULT_ALGORITHM,
    rounds: int = ServerConfig.rounds,
    local_steps: int = LocalConfig.steps,
    batch_size: int = LocalConfig.batch_size,
    lr: float = LocalConfig.lr,
    momentum: float = LocalConfig.momentum,
    weight_decay: float = LocalConfig.weight_decay,
    active: int | None = ServerConfig.active,
    latent: int | None = ModelConfig.latent,
    seed: int = RunConfig.seed,
    eval_every: int = ServerConfig.eval_every,
    device: str = RunConfig.device,
    workers: int | None = RunConfig.workers,
    layout: Literal["contiguous", "channels_last"] = "contiguous",
    out: str | Path | None = None,
    resume: bool = False,
    on_round: Callable[[RoundRecord], None] | None = None,
) -> Result:
    """Train one classifier over clients, each a (train, test) pair of torch Datasets that give (input, label).

    `clients` is a list of such pairs, or a dict whose keys name them in records, summary and manifest. Either of a pair
    may be None: without a test Dataset nobody tests there, and without a train Dataset a client only tests. Where
    nobody tests, accuracies are None. A list of (input, label) pairs will do for a Dataset.

    Floats become single precision, bytes fractions from 0 to 1; other whole numbers are passed on as they are, for an
    nn.Embedding. Labels are whole numbers below `num_classes`, of any number type.

    `encoder` maps a batch of inputs to features (batch, width) and starts from a copy of the weights that it has.
    `algorithm` is a method such as fedcir.FedProx(mu=0.5), its class, its name, or the file of one of your own. With
    `out` the run is kept in that folder, and `resume` continues it there. `on_round` sees every round's record. On a
    CPU `workers` processes train at a time, as many as there are cores if not given; a convolutional encoder is often
    faster with `layout="channels_last"`.
    """
    try:
        num_classes = operator.index(num_classes)
    except TypeError as error:
        raise InputError(f"num_classes must be a whole number, got {num_classes!r}") from error
    require_at_least("num_classes", num_classes, 2)
    name, method = named_algorithm(algorithm)
    local = {
        "steps": local_steps,
        "batch_size": batch_size,
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
    }
    server = {"rounds": rounds, "active": active, "eval_every": eval_every}
    run = {"seed": seed, "device": device, "workers": workers, "layout": layout}
    config = Config(
        data=DataConfig(name="own"),
        local=build(LocalConfig, local, "local"),
        server=build(ServerConfig, server, "server"),
        algorithm=AlgorithmConfig(name, hyper_parameters(method)),
        run=build(RunConfig, run, "run"),
    )
    latent = build(ModelConfig, {"latent": latent}, "model").latent
    federation = federation_of(clients, encoder, num_classes, latent, seed)
    config = settled(config, method, federation)
    with open_rounds(config, method, federation, None if out is None else Path(out), resume) as (session, records):
        for record in records:
            if on_round is not None:
                on_round(record)
        keepers = federation.clients if own_batchnorm(config, method) else ()
        kept = {client.domain: session.store.load(client.id, session.state.round + 1) for client in keepers}
    own = {name: each[BATCHNORM] for name, each in kept.items() if BATCHNORM in each}
    model = session.modules["model"]
    model.load_state_dict({**session.state.shared["model"], **next(iter(own.values()), {})})
    summary = summarise(session) if session.folder is None else session.folder.summary()
    return Result(model.eval(), session.records, summary, own)
