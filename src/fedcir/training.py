"""From Python: train() on any Datasets with any encoder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from fedcir.algorithm import Algorithm
from fedcir.algorithms.fedcir import FedCiR
from fedcir.config import AlgorithmConfig, Config, DataConfig, LocalConfig, RunConfig, ServerConfig
from fedcir.federation import federation_of
from fedcir.rounds import summarise
from fedcir.simulate import hyper_parameters, open_rounds, resolve
from fedcir.types import RoundRecord


@dataclass(frozen=True)
class Result:
    """What training gives: the global model in evaluation mode, every round's record, and the summary."""

    model: nn.Module
    records: list[RoundRecord]
    summary: dict[str, Any]


def train(
    clients: Sequence[tuple[Any, Any]],
    *,
    encoder: nn.Module,
    num_classes: int,
    algorithm: Algorithm | None = None,
    rounds: int = 40,
    local_steps: int = 20,
    batch_size: int = 32,
    lr: float = 0.01,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    active: int | None = None,
    latent: int | None = None,
    seed: int = 0,
    eval_every: int = 1,
    device: str = "auto",
    workers: int | None = None,
    layout: Literal["contiguous", "channels_last"] = "contiguous",
    out: str | Path | None = None,
    resume: bool = False,
    on_round: Callable[[RoundRecord], None] | None = None,
) -> Result:
    """Train one classifier over clients, each a (train, test) pair of torch Datasets that give (input, label).

    Inputs that are bytes become fractions from 0 to 1.

    `encoder` maps a batch of inputs to features (batch, width) and starts from the weights that it has. With `out`
    the run is kept in that folder, and `resume` continues it there. `on_round` sees every round's record. On a CPU
    `workers` processes train at a time, as many as there are cores if not given; a convolutional encoder is often
    faster with `layout="channels_last"`.
    """
    algorithm = FedCiR() if algorithm is None else algorithm
    config = Config(
        data=DataConfig(name="own"),
        local=LocalConfig(local_steps, batch_size, lr, momentum, weight_decay),
        server=ServerConfig(rounds=rounds, active=active, eval_every=eval_every),
        algorithm=AlgorithmConfig(type(algorithm).__name__.lower(), hyper_parameters(algorithm)),
        run=RunConfig(seed=seed, device=device, workers=workers, layout=layout),
    )
    federation = federation_of(clients, encoder, num_classes, latent, seed)
    config = resolve(config, algorithm, federation)
    with open_rounds(config, algorithm, federation, None if out is None else Path(out), resume) as (session, records):
        for record in records:
            if on_round is not None:
                on_round(record)
    model = session.modules["model"]
    model.load_state_dict(session.state.shared["model"])
    summary = summarise(session) if session.folder is None else session.folder.summary()
    return Result(model.eval(), session.records, summary)
