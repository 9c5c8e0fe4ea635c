"""Local training: the networks of a process, and the training loop of one client in one round."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from fedcir.algorithms.algorithm import PERSONAL, Algorithm, Batch
from fedcir.client.cost import step_flops
from fedcir.client.uploads import ROUNDING, UploadFormat, make_noise, sample_poisson_batch, set_private_gradients
from fedcir.config import LocalConfig, PrivacyConfig
from fedcir.data.examples import Examples, augment
from fedcir.data.federation import Client
from fedcir.losses import balanced_cross_entropy, class_weighted_cross_entropy
from fedcir.models.adapters import select_frozen, snapshot_trained
from fedcir.models.networks import use_matmul_conv
from fedcir.models.normalisation import find_statistics_layers
from fedcir.models.optimizers import LocalOptimizer, RoundOptimizer, make_optimizer
from fedcir.models.tensors import snapshot, to_cpu
from fedcir.rng import keep_generators, numpy_rng, secret_rng, seed_for, share_generators, torch_rng
from fedcir.tasks.task import Task
from fedcir.types import ClientReply, Groups, LocalContext, Modules, Tensors

EVALUATION_BATCH = 256
LOCAL = "batchnorm"
"""Group name of the model's tensors that stay on the client, such as BatchNorm or the head."""

RoundKind = tuple[tuple[str, ...], tuple[str, ...], int]
"""What FLOPs depend on: names of the groups in a broadcast and in a client's state; steps, if a method counts them."""


def get_local_tensors(client_state: Groups) -> Tensors:
    """Return the tensors of the model that stayed on a client: all of them, some, or none."""
    return {**client_state.get("model", {}), **client_state.get(LOCAL, {}), **client_state.get(PERSONAL, {})}


@dataclass
class LocalTrainer:
    """The networks and settings with which a process trains and evaluates clients, one at a time."""

    algorithm: Algorithm
    modules: Modules
    seed: int
    total_rounds: int
    task: Task
    local: LocalConfig
    device: torch.device
    layout: torch.memory_format
    precision: torch.dtype = torch.float32
    """Dtype of autocast in local steps."""
    freeze_batchnorm: bool = False
    """Whether the model's BatchNorm layers use their running statistics in training and leave them unchanged."""
    always_calibrates: bool = False
    """Whether every evaluation returns calibration sums, because any round's model may be saved, or only the last."""
    may_stop: bool = False
    """Whether any evaluated round may be the last."""
    local_names: frozenset[str] = frozenset()
    """Names of the model's tensors that stay on the client."""
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    has_validation: bool = False
    """Whether clients of this run set validation examples aside, and may send sums over them."""
    deployed: bool = False
    """Whether this process is a site of a deployment, whose noise must not come from the seed."""
    upload: UploadFormat = "float32"
    initial_state: Groups = field(default_factory=dict)
    """State of a client that has not trained yet."""
    flops: dict[RoundKind, int] = field(default_factory=dict)
    """FLOPs of a step, counted once for each kind of round."""
    concurrent: bool = False
    """Whether other threads may train at the same time; not if training draws from torch's default generators."""
    frozen_hash: str = ""
    """Hash of the tensors that never change, at a site."""
    optimizer: LocalOptimizer = field(init=False)
    frozen: Tensors = field(init=False)
    """Tensors of the model that never change."""

    def __post_init__(self) -> None:
        for module in self.modules.values():
            module.to(self.device, memory_format=self.layout)
            use_matmul_conv(module)
        self.frozen = select_frozen(self.modules["model"])
        self.initial_state.update(self.get_client_state())
        if twice := {*self.algorithm.remembers} & {*self.algorithm.keeps, LOCAL, ROUNDING}:
            method = type(self.algorithm).__name__
            raise TypeError(f"{method}.remembers names {sorted(twice)}, which clients already keep")
        trained = (*self.algorithm.trains, *self.algorithm.keeps)
        parameters = (p for name in trained for p in self.modules[name].parameters())
        self.optimizer = make_optimizer(self.local.optimizer, parameters)

    def get_client_state(self) -> Groups:
        """Copy the modules and model tensors that stay on the client."""
        state = {name: snapshot_trained(self.modules[name]) for name in self.algorithm.keeps}
        if self.local_names:
            state[LOCAL] = {n: t for n, t in snapshot(self.modules["model"]).items() if n in self.local_names}
        return state

    def load(
        self, client: Client, broadcast: Groups, client_state: Groups, round: int, rng: torch.Generator
    ) -> LocalContext:
        """Load broadcast and client state into the networks, and return the context of the algorithm's hooks."""
        state = {**self.initial_state, **client_state}
        for name, module in self.modules.items():
            frozen = self.frozen if name == "model" else {}
            if name in self.algorithm.keeps:
                module.load_state_dict({**frozen, **state[name]})
            elif name in broadcast:
                local = state.get(LOCAL, {}) if name == "model" else {}
                module.load_state_dict({**frozen, **broadcast[name], **local})
        context = LocalContext(
            round=round,
            total_rounds=self.total_rounds,
            num_classes=self.task.outputs,
            batch_size=self.local.batch_size,
            broadcast=_to_device(broadcast, self.device),
            rng=rng,
            client_state=_to_device(self.select_remembered(client_state), self.device),
            steps=self.count_steps(client),
            lr=learning_rate(self.local, round, self.total_rounds),
            momentum=self.local.momentum,
            autocast=partial(torch.autocast, self.device.type, self.precision, enabled=self.precision != torch.float32),
            client=client.id,
            domain=client.domain,
            loss=self.task.loss,
            loss_name=self.task.loss_name,
            validation=(lambda: self.iterate_batches(client.validation)) if self.has_validation else None,
            noise=make_noise(self.privacy),
            noise_rng=secret_rng() if self.deployed else numpy_rng(self.seed, "privacy", round, client.id),
        )
        data = client.train
        return context if data is None else replace(context, labels=lambda: data.labels().to(self.device))

    def count_steps(self, client: Client) -> int:
        return self.local.steps if client.train is None else self.local.count_steps(len(client.train))

    def find_kind(self, broadcast: Groups, client_state: Groups, steps: int) -> RoundKind:
        steps = steps if self.algorithm.overrides_local_update else 1
        return tuple(sorted(broadcast)), tuple(sorted(client_state)), steps

    def select_remembered(self, client_state: Groups) -> Groups:
        """Select the groups that `local_finish` left."""
        return {name: client_state[name] for name in self.algorithm.remembers if name in client_state}

    def count_flops(self, x: torch.Tensor, y: torch.Tensor, ctx: LocalContext) -> int:
        """FLOPs of a local step, counted once for each kind of round."""
        key = self.find_kind(ctx.broadcast, ctx.client_state, ctx.steps)
        if key not in self.flops:
            self.flops[key] = step_flops(self.algorithm, self.modules, x, y, ctx)
        return self.flops[key]

    def iterate_batches(self, data: Examples | None) -> Iterator[Batch]:
        """Iterate once over the data, in order."""
        if data is None:
            return
        for start in range(0, len(data), EVALUATION_BATCH):
            positions = np.arange(start, min(start + EVALUATION_BATCH, len(data)))
            yield data.batch(positions, self.device, self.layout)


def train_client(
    trainer: LocalTrainer, client: Client, broadcast: Groups, client_state: Groups, round: int
) -> tuple[ClientReply, Groups]:
    """Train on one client's data, and return its reply and its new state."""
    kind = trainer.find_kind(broadcast, trainer.select_remembered(client_state), trainer.count_steps(client))
    if trainer.concurrent and kind in trainer.flops:
        with share_generators(trainer.device) as has_drawn:
            result = _train_client(trainer, client, broadcast, client_state, round)
            if not has_drawn():
                return result
        trainer.concurrent = False  # repeat this client alone, and train the next ones alone
    # Dropout of a foreign encoder draws from torch's default generators, which all threads of a process share.
    with keep_generators(trainer.device) as generators:
        generators.seed(seed_for(trainer.seed, "dropout", round, client.id))
        return _train_client(trainer, client, broadcast, client_state, round)


def _train_client(
    trainer: LocalTrainer, client: Client, broadcast: Groups, client_state: Groups, round: int
) -> tuple[ClientReply, Groups]:
    assert client.train is not None
    algorithm, modules, local = trainer.algorithm, trainer.modules, trainer.local
    ctx = trainer.load(client, broadcast, client_state, round, torch_rng(trainer.seed, "local", round, client.id))
    if local.prior == "client":
        ctx = replace(ctx, loss=partial(balanced_cross_entropy, counts=ctx.class_counts))
    elif local.balance == "classes":
        ctx = replace(ctx, loss=partial(class_weighted_cross_entropy, counts=ctx.class_counts))
    for name, module in modules.items():
        module.train(name in (*algorithm.trains, *algorithm.keeps))
    if trainer.freeze_batchnorm:
        for layer in find_statistics_layers(modules["model"]):
            layer.eval()
    trainer.optimizer.restart()
    with torch.no_grad():
        algorithm.local_start(modules, ctx)
    losses: dict[str, float] = {}
    flops = 0
    if trainer.privacy.by_steps and not algorithm.one_shot:
        flops = _take_private_steps(trainer, client.train, ctx)
    elif not algorithm.one_shot:
        losses, flops = _take_steps(trainer, client.train, ctx)
    for module in modules.values():
        module.eval()
    tensors = {name: snapshot(modules[name]) for name in algorithm.trains if name in algorithm.uploads}
    if "model" in tensors:
        unsent = trainer.local_names | trainer.frozen.keys()
        tensors["model"] = {n: t for n, t in tensors["model"].items() if n not in unsent}
    with torch.inference_mode():
        summary = algorithm.local_summary(modules, trainer.iterate_batches(client.train), ctx)
    _check_groups(algorithm, "local_summary", summary, algorithm.sends)
    with torch.no_grad():
        remembered = algorithm.local_finish(modules, trainer.iterate_batches(client.train), ctx)
    _check_groups(algorithm, "local_finish", remembered, algorithm.remembers)
    metrics = {f"loss/{name}": mean for name, mean in losses.items()}
    metrics["flops"] = float(flops * ctx.steps)
    new_state = {**trainer.get_client_state(), **{name: to_cpu(group) for name, group in remembered.items()}}
    return ClientReply(client.id, len(client.train), tensors | summary, metrics), new_state


def _take_steps(trainer: LocalTrainer, data: Examples, ctx: LocalContext) -> tuple[dict[str, float], int]:
    """Take the local steps, and return the means of the loss terms and the FLOPs of one step."""
    batches, local = _draw_training_batches(trainer, data, ctx), trainer.local
    first = next(batches)
    flops = trainer.count_flops(*first, ctx)
    optimizer = RoundOptimizer(trainer.optimizer, ctx.lr, local.momentum, local.weight_decay, local.clip_norm)
    return trainer.algorithm.local_update(trainer.modules, chain([first], batches), optimizer, ctx), flops


def _draw_training_batches(trainer: LocalTrainer, data: Examples, ctx: LocalContext) -> Iterator[Batch]:
    """Draw the augmented batches of the local steps."""
    augment_rng = torch_rng(trainer.seed, "augment", ctx.round, ctx.client)
    rng = numpy_rng(trainer.seed, "batches", ctx.round, ctx.client)
    for positions in draw_batches(len(data), trainer.local.batch_size, ctx.steps, rng):
        x, y = data.batch(positions, trainer.device, trainer.layout)
        yield augment(x, trainer.local.augment, augment_rng), y


def _take_private_steps(trainer: LocalTrainer, data: Examples, ctx: LocalContext) -> int:
    """Take the steps of DP-SGD, and return the FLOPs of one. Losses have no noise, so they are not reported."""
    rng = secret_rng() if trainer.deployed else numpy_rng(trainer.seed, "privacy", ctx.round, ctx.client)
    augment_rng = torch_rng(trainer.seed, "augment", ctx.round, ctx.client)
    for _ in range(trainer.local.steps):
        positions = sample_poisson_batch(len(data), trainer.local.batch_size, rng)
        x, y = data.batch(positions, trainer.device, trainer.layout)
        x = augment(x, trainer.local.augment, augment_rng) if len(x) else x
        set_private_gradients(trainer.modules["model"], x, y, ctx, trainer.privacy, rng)
        trainer.optimizer.step(ctx.lr, trainer.local.momentum, trainer.local.weight_decay)
    full_batch = np.arange(trainer.local.batch_size) % len(data)
    return trainer.count_flops(*data.batch(full_batch, trainer.device, trainer.layout), ctx)


def draw_batches(samples: int, size: int, steps: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Positions of full batches, one per step, from a shuffled stream that wraps."""
    stream = np.empty(0, dtype=np.int64)
    for _ in range(steps):
        while len(stream) < size:
            stream = np.concatenate([stream, rng.permutation(samples)])
        yield stream[:size]
        stream = stream[size:]


def learning_rate(local: LocalConfig, round: int, total_rounds: int) -> float:
    """Learning rate of a round: constant, or half a cosine from the full rate in round 1 towards 0; after a warm-up."""
    lr = local.lr
    if round <= local.warmup:
        lr *= round / (local.warmup + 1)
    if local.schedule == "cosine":
        lr *= 0.5 * (1 + math.cos(math.pi * (round - 1) / total_rounds))
    return lr


def _to_device(groups: Groups, device: torch.device) -> Groups:
    return {group: {name: tensor.to(device) for name, tensor in tensors.items()} for group, tensors in groups.items()}


def _check_groups(algorithm: Algorithm, hook: str, groups: Groups, declared: tuple[str, ...]) -> None:
    if groups.keys() != set(declared):
        raise TypeError(
            f"{type(algorithm).__name__}.{hook} returned {sorted(groups)}, but the class declares {sorted(declared)}"
        )
