"""What happens on a client: fit() is the one local training loop, evaluate() the one test loop."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from fedcir.algorithms.algorithm import Algorithm, Batch
from fedcir.config import LocalConfig, PrivacyConfig
from fedcir.data.examples.augment import augment
from fedcir.data.examples.images import Examples
from fedcir.data.federation import Client
from fedcir.engine.calibration import calibration_sums
from fedcir.engine.cost import step_flops
from fedcir.engine.dpsgd import poisson_batch, private_gradients
from fedcir.engine.hits import pack_hits
from fedcir.engine.prediction import Output, predict
from fedcir.engine.privacy import PrivateMean
from fedcir.engine.store import ClientStore
from fedcir.engine.uploads import ROUNDING, Upload, encoded
from fedcir.losses import balanced_cross_entropy, class_weighted_cross_entropy
from fedcir.models.optim import SGD
from fedcir.models.taps import use_taps
from fedcir.models.tensors import at_rest, snapshot
from fedcir.rng import keep_generators, numpy_rng, secret_rng, seed_for, share_generators, torch_rng
from fedcir.types import Arrays, ClientReply, Groups, LocalContext, Modules, RunError

EVALUATION_BATCH = 256
BATCHNORM = "batchnorm"
"""The group that what is a client's own of the model's BatchNorm is kept as."""

What = Literal["train", "evaluate"]
GroupNames = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of the groups that a client has received and of those that it remembers."""


def own_part(kept: Groups) -> Arrays:
    """What a client has of the model for itself: all of it, its BatchNorm, or nothing."""
    return {**kept.get("model", {}), **kept.get(BATCHNORM, {})}


@dataclass
class Workbench:
    """A process's own copy of the networks, and what every client of a run is told once."""

    algorithm: Algorithm
    modules: Modules
    seed: int
    total_rounds: int
    num_classes: int
    local: LocalConfig
    device: torch.device
    layout: torch.memory_format
    precision: torch.dtype = torch.float32
    """What autocast makes of the local steps."""
    steady: bool = False
    """Whether the model's BatchNorm layers normalise by the statistics that they have, and leave them as they are."""
    calibrates_always: bool = False
    """Whether every test tells what calibration needs, because any round's model may be saved; else the last one's."""
    own: frozenset[str] = frozenset()
    """The tensors of the model that stay with the client."""
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    deployed: bool = False
    """Whether this is a site of its own, whose noise must not come from the seed."""
    upload: Upload = "float32"
    first: Groups = field(default_factory=dict)
    """What a client that has kept nothing yet starts from."""
    flops: dict[GroupNames, int] = field(default_factory=dict)
    """FLOPs of a step by the groups received and kept, each counted once."""
    concurrent: bool = False
    """Whether other threads may train at the same time. Training that draws from torch's default generators may not."""
    optimizer: SGD = field(init=False)

    def __post_init__(self) -> None:
        for module in self.modules.values():
            module.to(self.device, memory_format=self.layout)  # type: ignore[call-overload]
            use_taps(module)
        self.first.update(self.to_keep())
        if twice := {*self.algorithm.remembers} & {*self.algorithm.keeps, BATCHNORM, ROUNDING}:
            raise TypeError(
                f"{type(self.algorithm).__name__}.remembers names {sorted(twice)}, which clients already keep"
            )
        trained = (*self.algorithm.trains, *self.algorithm.keeps)
        sgd = SGD(p for name in trained for p in self.modules[name].parameters())
        self.optimizer = sgd

    def to_keep(self) -> Groups:
        """A copy of what a client keeps: modules of its own, and what is its own of the model."""
        kept = {name: snapshot(self.modules[name]) for name in self.algorithm.keeps}
        if self.own:
            kept[BATCHNORM] = {n: t for n, t in snapshot(self.modules["model"]).items() if n in self.own}
        return kept


def attend(bench: Workbench, client: Client, store: ClientStore, what: What, shared: Groups, round: int) -> ClientReply:
    """One client's part of a round: it trains or tests, with what it has kept."""
    if what == "evaluate":
        return evaluate(bench, client, shared, store.load(client.id, round + 1), round)
    kept = store.load(client.id, round)
    reply, keep = fit(bench, client, shared, kept, round)
    if bench.privacy.by_clients:
        reply = protected(bench, reply, shared, round)
    if bench.upload != "float32":
        reply, keep[ROUNDING] = shortened(bench, reply, shared, kept, round)
    store.save(client.id, round, keep)
    return reply if client.tamper is None else client.tamper(reply, shared, round)


def fit(bench: Workbench, client: Client, received: Groups, kept: Groups, round: int) -> tuple[ClientReply, Groups]:
    """Train on one client's data from what was received and what it kept.

    Gives the reply that it uploads, and what it keeps for its next round.
    """
    if bench.concurrent and _group_names(received, _remembered(bench, kept)) in bench.flops:
        with share_generators(bench.device) as drawn:
            fitted = _fit(bench, client, received, kept, round)
            if not drawn():
                return fitted
        bench.concurrent = False  # from now on it waits for its turn
    # Dropout of a foreign encoder draws from torch's default generators, which all threads of a process share.
    with keep_generators(bench.device) as generators:
        generators.seed(seed_for(bench.seed, "dropout", round, client.id))
        return _fit(bench, client, received, kept, round)


def protected(bench: Workbench, reply: ClientReply, received: Groups, round: int) -> ClientReply:
    """The reply with its update clipped and noised. Its losses stay here: they tell of the data without noise."""
    assert bench.privacy.clip is not None
    rng = secret_rng() if bench.deployed else numpy_rng(bench.seed, "privacy", round, reply.client_id)
    mean = PrivateMean(bench.privacy, bench.privacy.clip, expected=1, rng=rng)
    before = {group: {name: received[group][name] for name in bag} for group, bag in reply.arrays.items()}
    for bag in (*before.values(), *reply.arrays.values()):
        if not all(bool(tensor.isfinite().all()) for tensor in bag.values() if tensor.is_floating_point()):
            # The norm of such an update is no number, so nothing would be clipped.
            wrong = "the model holds values that are not finite, so its change cannot be clipped"
            raise RunError(wrong, public=wrong)
    metrics = {name: value for name, value in reply.metrics.items() if not name.startswith("loss/")}
    return replace(reply, arrays=mean.of([reply.arrays], before), metrics=metrics)


def shortened(
    bench: Workbench, reply: ClientReply, received: Groups, kept: Groups, round: int
) -> tuple[ClientReply, Arrays]:
    """The reply in fewer bytes, and the rounding errors that the client adds to its next one."""
    rng = numpy_rng(bench.seed, "rounding", round, reply.client_id)
    sent, errors = encoded(reply.arrays, received, kept.get(ROUNDING, {}), bench.upload, rng)
    return replace(reply, arrays=sent), errors


def _fit(bench: Workbench, client: Client, received: Groups, kept: Groups, round: int) -> tuple[ClientReply, Groups]:
    assert client.train is not None
    algorithm, modules = bench.algorithm, bench.modules
    ctx = _receive(bench, client, received, kept, round, torch_rng(bench.seed, "local", round, client.id))
    if bench.local.prior == "client":
        ctx = replace(ctx, cross_entropy=partial(balanced_cross_entropy, counts=ctx.class_counts))
    elif bench.local.balance == "classes":
        ctx = replace(ctx, cross_entropy=partial(class_weighted_cross_entropy, counts=ctx.class_counts))
    trained = (*algorithm.trains, *algorithm.keeps)
    for name, module in modules.items():
        module.train(name in trained)
    for layer in modules["model"].modules() if bench.steady else ():
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
            layer.eval()
    optimizer = bench.optimizer
    optimizer.restart()
    with torch.no_grad():
        algorithm.local_start(modules, ctx)
    sums: Arrays = {}
    flops = 0
    rng = numpy_rng(bench.seed, "batches", round, client.id)
    changes = torch_rng(bench.seed, "augment", round, client.id)
    steps = bench.local.steps
    if bench.privacy.by_steps:
        flops, steps = _private_steps(bench, client.train, ctx, changes, client.id), 0
    for positions in batches(len(client.train), bench.local.batch_size, steps, rng):
        x, y = client.train.batch(positions, bench.device, bench.layout)
        x = augment(x, bench.local.augment, changes)
        if not flops:
            flops = _counted_flops(bench, x, y, ctx)
        with torch.autocast(bench.device.type, bench.precision, enabled=bench.precision != torch.float32):
            losses = algorithm.local_loss(modules, x, y, ctx)
        optimizer.zero_grad()
        losses.total.backward()  # type: ignore[no-untyped-call]
        optimizer.step(ctx.lr, bench.local.momentum, bench.local.weight_decay)
        for name, term in {**losses.terms, "total": losses.total}.items():
            sums[name] = sums[name] + term.detach() if name in sums else term.detach()
    for module in modules.values():
        module.eval()
    arrays = {name: _upload(bench, name) for name in algorithm.trains}
    with torch.inference_mode():
        summary = algorithm.local_summary(modules, in_order(bench, client.train), ctx)
    _declared(algorithm, "local_summary", summary, algorithm.sends)
    with torch.no_grad():
        remembered = algorithm.local_finish(modules, in_order(bench, client.train), ctx)
    _declared(algorithm, "local_finish", remembered, algorithm.remembers)
    metrics = {f"loss/{name}": float(total) / bench.local.steps for name, total in sums.items()}
    metrics["flops"] = float(flops * bench.local.steps)
    keep = {**bench.to_keep(), **{name: at_rest(bag) for name, bag in remembered.items()}}
    return ClientReply(client.id, len(client.train), arrays | summary, metrics), keep


def _private_steps(bench: Workbench, data: Examples, ctx: LocalContext, changes: torch.Generator, client: int) -> int:
    """Steps that are private for each example; gives the FLOPs of one. Their losses are told to nobody."""
    rng = secret_rng() if bench.deployed else numpy_rng(bench.seed, "privacy", ctx.round, client)
    for _ in range(bench.local.steps):
        positions = poisson_batch(len(data), bench.local.batch_size, rng)
        x, y = data.batch(positions, bench.device, bench.layout)
        x = augment(x, bench.local.augment, changes) if len(x) else x
        private_gradients(bench.modules["model"], x, y, ctx, bench.privacy, rng)
        bench.optimizer.step(ctx.lr, bench.local.momentum, bench.local.weight_decay)
    usual = np.arange(bench.local.batch_size) % len(data)
    return _counted_flops(bench, *data.batch(usual, bench.device, bench.layout), ctx)


@torch.inference_mode()
def evaluate(bench: Workbench, client: Client, received: Groups, kept: Groups, round: int) -> ClientReply:
    """Test the received model on the client's test set; the reply carries counts, so that they can be added.

    After the last round it also carries one bit for each test image, unless this is a site or privacy is set.
    """
    assert client.test is not None
    ctx = ready_to_test(bench, client, received, kept, round)
    metrics, correct, labels = _tested(bench, client.test, ctx)
    arrays: Groups = {}
    if round == bench.total_rounds and not bench.deployed and bench.privacy.clip is None:
        arrays = pack_hits(correct, labels, bench.num_classes)
    if client.validation is not None:
        aside, _, _ = _tested(bench, client.validation, ctx)
        metrics |= {f"validation/{name}": value for name, value in aside.items()}
        may_be_saved = bench.calibrates_always or round == bench.total_rounds
        if may_be_saved and not bench.privacy.noise:  # these sums have no noise
            outputs = predictions(bench, client.validation, ctx)
            metrics |= calibration_sums((output.logits, output.novelty, y) for output, y in outputs)
    return ClientReply(client.id, len(client.test), arrays, metrics)


def ready_to_test(bench: Workbench, client: Client, received: Groups, kept: Groups, round: int) -> LocalContext:
    """Load the networks as this client tests them; gives the context of `predict`.

    Its random numbers do not depend on the client, so that the model for all predicts alike everywhere.
    """
    ctx = _receive(bench, client, received, kept, round, torch_rng(bench.seed, "evaluate", round))
    if BATCHNORM in bench.first and BATCHNORM not in kept:
        _estimate_statistics(bench, client)
    for module in bench.modules.values():
        module.eval()
    return ctx


def _tested(bench: Workbench, data: Examples, ctx: LocalContext) -> tuple[dict[str, float], torch.Tensor, torch.Tensor]:
    """Counts and mean loss; for each image whether its class was predicted (N,), and its label (N,)."""
    correct, labels, loss = [], [], 0.0
    for output, y in predictions(bench, data, ctx):
        correct.append(output.logits.argmax(-1) == y)
        labels.append(y)
        loss += float(F.cross_entropy(output.logits, y, reduction="sum"))
    hits = torch.cat(correct)
    return {"correct": float(hits.sum()), "count": float(len(data)), "loss": loss / len(data)}, hits, torch.cat(labels)


def predictions(bench: Workbench, data: Examples, ctx: LocalContext) -> Iterator[tuple[Output, torch.Tensor]]:
    """Predict all data in batches, each with its labels. The networks must be loaded by `ready_to_test`."""
    for x, y in in_order(bench, data):
        yield predict(bench.algorithm, bench.modules, x, ctx), y


def in_order(bench: Workbench, data: Examples) -> Iterator[Batch]:
    """Once over the data, in batches."""
    for start in range(0, len(data), EVALUATION_BATCH):
        positions = np.arange(start, min(start + EVALUATION_BATCH, len(data)))
        yield data.batch(positions, bench.device, bench.layout)


def batches(samples: int, size: int, steps: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Positions of full batches, one per step, from a shuffled stream that starts over when the data end."""
    stream = np.empty(0, dtype=np.int64)
    for _ in range(steps):
        while len(stream) < size:
            stream = np.concatenate([stream, rng.permutation(samples)])
        yield stream[:size]
        stream = stream[size:]


def learning_rate(local: LocalConfig, round: int, total_rounds: int) -> float:
    """The rate of a round: constant, or half a cosine from the full rate in round 1 towards 0 after the last."""
    if local.schedule == "cosine":
        return local.lr * 0.5 * (1 + math.cos(math.pi * (round - 1) / total_rounds))
    return local.lr


def _upload(bench: Workbench, name: str) -> Arrays:
    bag = snapshot(bench.modules[name])
    return {n: t for n, t in bag.items() if n not in bench.own} if name == "model" else bag


def _receive(
    bench: Workbench, client: Client, received: Groups, kept: Groups, round: int, rng: torch.Generator
) -> LocalContext:
    own = {**bench.first, **kept}
    for name, module in bench.modules.items():
        if name in bench.algorithm.keeps:
            module.load_state_dict(own[name])
        elif name in received:
            layers = own.get(BATCHNORM, {}) if name == "model" else {}
            module.load_state_dict({**received[name], **layers})
    context = LocalContext(
        round=round,
        total_rounds=bench.total_rounds,
        num_classes=bench.num_classes,
        batch_size=bench.local.batch_size,
        received=_on_device(received, bench.device),
        rng=rng,
        kept=_on_device(_remembered(bench, kept), bench.device),
        steps=bench.local.steps,
        lr=learning_rate(bench.local, round, bench.total_rounds),
        momentum=bench.local.momentum,
    )
    data = client.train
    return context if data is None else replace(context, labels=lambda: data.labels().to(bench.device))


def _on_device(groups: Groups, device: torch.device) -> Groups:
    return {group: {name: tensor.to(device) for name, tensor in bag.items()} for group, bag in groups.items()}


def _declared(algorithm: Algorithm, hook: str, given: Groups, declared: tuple[str, ...]) -> None:
    if given.keys() != set(declared):
        raise TypeError(
            f"{type(algorithm).__name__}.{hook} returned {sorted(given)}, but the class declares {sorted(declared)}"
        )


def _estimate_statistics(bench: Workbench, client: Client) -> None:
    """A site that has not trained yet takes its BatchNorm statistics from its own data, under the received weights."""
    assert client.train is not None
    model = bench.modules["model"].train()
    norms = [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean of all batches
    for positions in batches(len(client.train), bench.local.batch_size, bench.local.steps, numpy_rng(0)):
        model(client.train.batch(positions, bench.device, bench.layout)[0])
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _remembered(bench: Workbench, kept: Groups) -> Groups:
    return {name: kept[name] for name in bench.algorithm.remembers if name in kept}


def _group_names(received: Groups, remembered: Groups) -> GroupNames:
    return tuple(sorted(received)), tuple(sorted(remembered))


def _counted_flops(bench: Workbench, x: torch.Tensor, y: torch.Tensor, ctx: LocalContext) -> int:
    key = _group_names(ctx.received, ctx.kept)
    if key not in bench.flops:
        bench.flops[key] = step_flops(bench.algorithm, bench.modules, x, y, ctx)
    return bench.flops[key]
