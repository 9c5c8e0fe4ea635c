"""Requests to a client: train or evaluate, with the client's state and the protection of its upload."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fedcir.algorithms.algorithm import PERSONAL
from fedcir.client.calibration import calibration_sums
from fedcir.client.head_bank import COALITIONS, pack_head_hits
from fedcir.client.local_update import LOCAL, LocalTrainer, draw_batches, train_client
from fedcir.client.prediction import Output, pack_hits, predict
from fedcir.client.state import ClientStore
from fedcir.client.uploads import ROUNDING, PrivateMean, compress_update
from fedcir.data.examples import Examples
from fedcir.data.federation import Client
from fedcir.errors import RunError
from fedcir.models.adapters import load_trained
from fedcir.models.normalisation import estimate_statistics
from fedcir.models.tensors import find_non_finite, is_statistic
from fedcir.rng import numpy_rng, secret_rng, torch_rng
from fedcir.tasks.task import add_sums
from fedcir.types import ClientReply, Groups, LocalContext

RequestKind = Literal["train", "evaluate"]


def handle_request(
    trainer: LocalTrainer, client: Client, store: ClientStore, kind: RequestKind, broadcast: Groups, round: int
) -> ClientReply:
    """Train or evaluate one client, and save its state after training."""
    if kind == "evaluate":
        return evaluate_client(trainer, client, broadcast, store.load(client.id, round + 1), round)
    client_state = store.load(client.id, round)
    reply, new_state = train_client(trainer, client, broadcast, client_state, round)
    if trainer.privacy.by_clients:
        reply = privatise_reply(trainer, reply, broadcast, round)
    if trainer.upload != "float32":
        rng, residual = numpy_rng(trainer.seed, "rounding", round, client.id), client_state.get(ROUNDING, {})
        rounded, new_state[ROUNDING] = compress_update(reply.tensors, broadcast, residual, trainer.upload, rng)
        reply = replace(reply, tensors=rounded)
    store.save(client.id, round, new_state)
    return reply if client.tamper is None else client.tamper(reply, broadcast, round)


def privatise_reply(trainer: LocalTrainer, reply: ClientReply, broadcast: Groups, round: int) -> ClientReply:
    """Clip and noise the update of a reply, and leave out its losses, which have no noise."""
    assert trainer.privacy.clip is not None
    rng = secret_rng() if trainer.deployed else numpy_rng(trainer.seed, "privacy", round, reply.client_id)
    mean = PrivateMean(trainer.privacy, trainer.privacy.clip, expected=1, rng=rng)
    before = {group: {name: broadcast[group][name] for name in tensors} for group, tensors in reply.tensors.items()}
    if find_non_finite(before) or find_non_finite(reply.tensors):
        # The norm of such an update is not a number, so nothing would be clipped.
        message = "the model holds values that are not finite, so its change cannot be clipped"
        raise RunError(message, public=message)
    metrics = {name: value for name, value in reply.metrics.items() if not name.startswith("loss/")}
    return replace(reply, tensors=mean.compute([reply.tensors], before), metrics=metrics)


@torch.inference_mode()
def evaluate_client(
    trainer: LocalTrainer, client: Client, broadcast: Groups, client_state: Groups, round: int
) -> ClientReply:
    """Evaluate a model on a client's test set; the reply carries sums, which add over clients.

    With classes, after the last round, it also carries one bit for each test image, except at a site or under privacy.
    With heads of coalitions in the broadcast it carries a bit for each of them and each test image.
    """
    assert client.test is not None
    ctx = load_for_evaluation(trainer, client, broadcast, client_state, round)
    metrics, hits = _evaluate_examples(trainer, client.test, ctx)
    is_last = round == trainer.total_rounds or trainer.may_stop
    tensors: Groups = {}
    if hits and is_last and not trainer.deployed and trainer.privacy.clip is None:
        correct, labels = map(torch.cat, zip(*hits, strict=True))
        tensors = pack_hits(correct, labels, trainer.task.outputs)
    if COALITIONS in broadcast:
        tensors = {**tensors, **pack_head_hits(trainer, client.test, broadcast[COALITIONS], ctx)}
    if client.validation is not None:
        validation, _ = _evaluate_examples(trainer, client.validation, ctx)
        metrics |= {f"validation/{name}": value for name, value in validation.items()}
        calibrates = trainer.task.has_classes and (is_last or trainer.always_calibrates)
        if calibrates and not trainer.privacy.noise:  # these sums have no noise
            outputs = predict_batches(trainer, client.validation, ctx)
            metrics |= calibration_sums((output.logits, output.novelty, y) for output, y in outputs)
    return ClientReply(client.id, len(client.test), tensors, metrics)


def load_for_evaluation(
    trainer: LocalTrainer, client: Client, broadcast: Groups, client_state: Groups, round: int
) -> LocalContext:
    """Load the networks as this client evaluates them, and return the context of `predict`.

    Its random numbers do not depend on the client, so that a global model predicts the same everywhere.
    """
    ctx = trainer.load(client, broadcast, client_state, round, torch_rng(trainer.seed, "evaluate", round))
    if LOCAL not in client_state and any(map(is_statistic, trainer.local_names)):
        # A site that has not trained yet takes the BatchNorm statistics of its training data.
        assert client.train is not None
        model, size = trainer.modules["model"].train(), trainer.local.batch_size
        layers = [model.get_submodule(n.rpartition(".")[0]) for n in trainer.local_names if n.endswith("running_mean")]
        with estimate_statistics(model, layers):
            for positions in draw_batches(len(client.train), size, ctx.steps, numpy_rng(0)):
                model(client.train.batch(positions, trainer.device, trainer.layout)[0])
    if PERSONAL in client_state:
        load_trained(trainer.modules["model"], client_state[PERSONAL])
    for module in trainer.modules.values():
        module.eval()
    return ctx


def _evaluate_examples(
    trainer: LocalTrainer, data: Examples, ctx: LocalContext
) -> tuple[dict[str, float], list[tuple[Tensor, Tensor]]]:
    """Return sums and mean loss; with classes also which were predicted (B,), and the labels (B,), in batches."""
    task, sums, hits, loss = trainer.task, [], [], 0.0
    batches: Iterable[tuple[Tensor, Tensor]] = ((output.logits, y) for output, y in predict_batches(trainer, data, ctx))
    if not task.adds_over_batches:
        outputs, targets = map(torch.cat, zip(*batches, strict=True))
        batches = [(outputs, targets)]
    for outputs, y in batches:
        sums.append(task.metrics(outputs, y))
        loss += task.total_loss(outputs, y)
        if task.has_classes:
            hits.append((outputs.argmax(-1) == y, y))
    return {**add_sums(sums), "loss": loss / len(data)}, hits


def predict_batches(trainer: LocalTrainer, data: Examples, ctx: LocalContext) -> Iterator[tuple[Output, Tensor]]:
    """Predict all data in batches, each with its labels, after `load_for_evaluation`."""
    for x, y in trainer.iterate_batches(data):
        yield predict(trainer.algorithm, trainer.modules, x, ctx), y
