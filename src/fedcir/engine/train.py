"""From Python: train() on any Datasets with any encoder."""

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import (
    DEFAULT_ALGORITHM,
    Assignments,
    Between,
    LocalConfig,
    ModelConfig,
    RunConfig,
    ServerConfig,
    nearest,
)
from fedcir.data.federation import Pairs, federation_of
from fedcir.engine.client import own_part
from fedcir.engine.own import own_batchnorm
from fedcir.engine.rounds import summarise
from fedcir.engine.settling import own_config, settled
from fedcir.engine.simulate import open_rounds
from fedcir.types import Groups, InputError, RoundRecord


@dataclass(frozen=True)
class Result:
    """What training gives: the global model in evaluation mode, every round's record, and the summary."""

    network: nn.Module
    """The model for all clients. Where they have all or some of it of their own, that of the first client."""
    records: list[RoundRecord]
    summary: dict[str, Any]
    own: Groups = field(default_factory=dict)
    """What clients have of the model for themselves, by their names: BatchNorm (FedBN) or all of it (FedProto)."""
    one_model: bool = True
    """Whether there is a model for all."""

    @property
    def model(self) -> nn.Module:
        """The global model in evaluation mode. With FedBN, that of the first client."""
        if not self.one_model:
            raise InputError(f"there is no model for all clients: take one client's, as in model_of({min(self.own)!r})")
        return self.network

    def model_of(self, client: str) -> nn.Module:
        """The model as a client has it. One that never trained has none of its own."""
        if not self.own:
            return self.network
        if client not in self.own:
            raise InputError(f"no client {client!r} that trained; {nearest(client, self.own)}")
        model = copy.deepcopy(self.network)
        model.load_state_dict({**model.state_dict(), **self.own[client]})
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
    """Train one classifier over clients, each a (train, test) pair of torch Datasets that give (input, label).

    `clients` is a list of such pairs, or a dict whose keys name them in records, summary and manifest. Either of a pair
    may be None: without a test Dataset nobody tests there, and without a train Dataset a client only tests. Where
    nobody tests, accuracies are None. A list of (input, label) pairs will do for a Dataset.

    Floats become single precision, bytes fractions from 0 to 1; other whole numbers are passed on as they are, for an
    nn.Embedding. Labels are whole numbers below `num_classes`, of any number type.

    `encoder` maps a batch of inputs to features (batch, width) and starts from a copy of the weights that it has.
    `algorithm` is a method such as fedcir.FedProx(mu=0.5), its class, its name, or the file of one of your own. With
    `out` the run is kept in that folder, and `resume` continues it there. `on_round` sees every round's record, and may
    return False to stop: the model and the summary of that round are kept, and `resume` goes on from there. On a
    CPU `workers` processes train at a time, as many as there are cores if not given; a convolutional encoder is often
    faster with `layout="channels_last"`. With `prior="client"` each client's own label shares correct its
    cross-entropy, which helps where they differ; if not given, the algorithm decides. `set` holds any other settings of
    `local`, `server`, `run` and `privacy`: {"local.balance": "classes"}.
    """
    try:
        num_classes = operator.index(num_classes)
    except TypeError as error:
        raise InputError(f"num_classes must be a whole number, got {num_classes!r}") from error
    Between(2, 1_000_000).check("num_classes", num_classes)
    config, method = own_config(
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
    federation = federation_of(clients, encoder, num_classes, config.model.latent, config.run.seed)
    config = settled(config, method, federation)
    with open_rounds(config, method, federation, None if out is None else Path(out), resume) as (session, records):
        for record in records:
            if on_round is not None and on_round(record) is False:
                session.stop_requested = True
        keepers = federation.clients if own_batchnorm(config, method) or not method.one_model else ()
        kept = {client.domain: session.store.load(client.id, session.state.round + 1) for client in keepers}
    own = {name: bag for name, groups in kept.items() if (bag := own_part(groups))}
    network = session.modules["model"]
    network.load_state_dict({**session.model, **next(iter(own.values()), {})})
    summary = summarise(session) if session.folder is None else session.folder.summary()
    return Result(network.eval(), session.records, summary, own, method.one_model)
