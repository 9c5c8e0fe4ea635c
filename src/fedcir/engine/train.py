"""From Python: train() on any Datasets with any encoder."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
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
    require_at_least,
)
from fedcir.data.federation import Pairs, federation_of
from fedcir.engine.rounds import summarise
from fedcir.engine.session import hyper_parameters, settled
from fedcir.engine.simulate import open_rounds
from fedcir.types import InputError, RoundRecord


@dataclass(frozen=True)
class Result:
    """What training gives: the global model in evaluation mode, every round's record, and the summary."""

    trained: nn.Module | None
    records: list[RoundRecord]
    summary: dict[str, Any]

    @property
    def model(self) -> nn.Module:
        """The global model in evaluation mode."""
        if self.trained is None:
            raise InputError(
                "there is no model for all clients: each keeps its own, with out=... in the folder clients/"
            )
        return self.trained


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
    model = session.modules["model"].eval() if method.one_model else None
    if model is not None:
        model.load_state_dict(session.model)
    summary = summarise(session) if session.folder is None else session.folder.summary()
    return Result(model, session.records, summary)
