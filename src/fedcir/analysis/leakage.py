"""Attacks on a finished run: membership inference, gradient inversion, and a summary of uploads."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedcir.algorithms.algorithm import PERSONAL, Algorithm
from fedcir.client.client_requests import load_for_evaluation
from fedcir.client.local_update import LocalTrainer
from fedcir.client.prediction import predict
from fedcir.config import Config
from fedcir.data.domains import Domains
from fedcir.data.examples import Normalisation
from fedcir.data.federation import Client, Federation, build_federation
from fedcir.data.partition import ClientPartition, limit_samples
from fedcir.inference.evaluation import predict_run
from fedcir.machine import use_threads
from fedcir.models.tensors import count_bytes, snapshot
from fedcir.rng import numpy_rng, torch_rng
from fedcir.runs.evaluation_data import SEED
from fedcir.runs.reader import Run, restore_model
from fedcir.runs.statistics import Interval, draw_resamples, percentile_interval
from fedcir.runtime.session import open_session
from fedcir.types import Groups

Losses = NDArray[np.floating]


@dataclass(frozen=True)
class Membership:
    """Membership inference in one domain: training images against test images, by their loss."""

    domain: str
    trained: int
    """Number of training images that were tested."""
    others: int
    auc: Interval
    """Probability that a training image has a lower loss than a test image; 0.5 is chance."""
    advantage: Interval
    """Share of training images with a loss below their mean, minus that of test images; 0 is chance."""

    @property
    def is_beyond_chance(self) -> bool:
        """Check whether the interval of either measure lies above chance."""
        return self.auc.low > 0.5 or self.advantage.low > 0


def infer_membership(domain: str, trained: Losses, unseen: Losses) -> Membership:
    """Attack by a threshold on the loss (Yeom et al., 2018); both sets are resampled for the intervals."""
    low, high = trained.astype(np.float64), unseen.astype(np.float64)
    values, ranks = np.unique(np.concatenate([low, high]), return_inverse=True)
    is_below = values <= low.mean()

    def measure(member_weights: NDArray[np.floating], other_weights: NDArray[np.floating]) -> tuple[float, float]:
        """AUC and advantage of weighted images; equal losses count half."""
        members = np.bincount(ranks[: len(low)], member_weights, len(values)) / member_weights.sum()
        rest = np.bincount(ranks[len(low) :], other_weights, len(values)) / other_weights.sum()
        above = rest[::-1].cumsum()[::-1] - rest / 2
        return float(members @ above), float(members[is_below].sum() - rest[is_below].sum())

    auc, advantage = measure(np.ones(len(low)), np.ones(len(high)))
    resamples = zip(
        draw_resamples(f"{domain}/trained", len(low)), draw_resamples(f"{domain}/others", len(high)), strict=True
    )
    draws = np.array([measure(*weights) for weights in resamples])
    intervals = percentile_interval(auc, draws[:, 0]), percentile_interval(advantage, draws[:, 1])
    return Membership(domain, len(low), len(high), *intervals)


STEP = 0.1
"""Learning rate of Adam, in units of a channel's standard deviation."""
SMOOTH = 0.1
"""Weight of the total variation."""

Gradient = Callable[[Tensor], Sequence[Tensor]]
"""Function from images to the gradient of their loss, which is differentiable."""


def invert(gradient: Gradient, sent: Sequence[Tensor], low: Tensor, high: Tensor, steps: int, start: Tensor) -> Tensor:
    """Find images (B, C, H, W) within bounds whose gradient resembles the one that was sent (Geiping et al., 2020)."""
    images = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([images], lr=STEP)
    milestones = [round(steps * part) for part in (3 / 8, 5 / 8, 7 / 8)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones, gamma=0.1)
    for _ in range(steps):
        distance = 1 - cosine(gradient(images), sent)
        (slope,) = torch.autograd.grad(distance + SMOOTH * total_variation(images), images)
        images.grad = slope.sign()  # as in the paper: only the sign of the gradient is used
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            images.copy_(torch.maximum(torch.minimum(images, high), low))
    return images.detach()


def cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Cosine similarity of two gradients, over all their tensors."""
    first, second = (torch.cat([tensor.flatten() for tensor in gradient]) for gradient in (a, b))
    return F.cosine_similarity(first, second, dim=0)


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels."""
    return images.diff(dim=2).abs().mean() + images.diff(dim=3).abs().mean()


def psnr(images: Tensor, references: Tensor) -> list[float]:
    """Peak signal-to-noise ratio of each image in dB, for values from 0 to 1; above 20 an image is recognisable."""
    errors = (images - references).square().flatten(1).mean(1).clamp_min(1e-10)
    return [float(value) for value in -10 * errors.log10()]


def find_nearest(image: Tensor, candidates: Tensor) -> int:
    """Find the candidate (N, C, H, W) whose pixels correlate most with an image; contrast does not count."""

    def standardise(images: Tensor) -> Tensor:
        flat = images.flatten(1)
        return F.normalize(flat - flat.mean(1, keepdim=True))

    return int((standardise(candidates) @ standardise(image[None]).T).squeeze(1).argmax())


SAMPLES, IMAGES, STEPS = 1000, 1, 300
"""Defaults: training images of each domain to test, images of the batch to reconstruct, and steps to do it in."""
MAX_CANDIDATES = 200
"""Most images of the client with which a reconstruction is compared."""


@dataclass(frozen=True)
class Inversion:
    """Images of one client, and their reconstruction from the gradient of one step."""

    when: str
    client: str
    originals: NDArray[np.float32]  # (B, C, H, W), from 0 to 1
    reconstructed: NDArray[np.float32]  # (B, C, H, W)
    psnr: tuple[float, ...]
    recognised: int
    """Number of reconstructions that are nearest to their original among the client's images."""
    among: int
    """Number of images with which each reconstruction was compared."""


@dataclass(frozen=True)
class UploadSummary:
    """Everything that a client uploaded in all rounds."""

    client: str
    uploads: int
    groups: dict[str, int]
    """Bytes of one upload by group."""
    tensors: int
    """Number of tensors in one upload."""

    @property
    def bytes(self) -> int:
        return self.uploads * sum(self.groups.values())


@dataclass(frozen=True)
class SumLeakage:
    """What the sums that a server sees tell of one client's training images."""

    client: str
    images: int
    """Training images of the client."""
    summed: int
    """Training images in the sums: those of all clients, if sums are masked."""
    features: int
    is_noised: bool
    membership: Membership
    """By leverage: the client's training images against test images of its domain."""
    rarest: str
    """The class of the fewest training images of the client."""
    rarest_images: int
    cosine: float
    """Mean cosine of the features of these images and the sum of their class; 1 shows them as they are."""
    cosine_of_others: float | None
    """The same of test images of this class, which are in no sum; None if there are none."""


@dataclass(frozen=True)
class Audit:
    """Results of all attacks on a run, and the files that were written."""

    name: str
    dataset: str
    algorithm: str
    membership: tuple[Membership, ...]
    inverted: tuple[Inversion, ...]
    sent: tuple[UploadSummary, ...]
    notes: tuple[str, ...]
    sums: tuple[SumLeakage, ...] = ()
    """Of fedcirone."""
    page: Path | None = None
    picture: Path | None = None
    numbers: Path | None = None

    @property
    def audit(self) -> "Audit":
        """The object itself, for callers of earlier versions."""
        return self

    def to_json(self) -> dict[str, Any]:
        images = ("originals", "reconstructed")
        return {
            "run": self.name,
            "dataset": self.dataset,
            "algorithm": self.algorithm,
            "membership": {domain.domain: asdict(domain) for domain in self.membership},
            "inversion": [
                {name: value for name, value in vars(inversion).items() if name not in images}
                for inversion in self.inverted
            ],
            "sent": [{**asdict(upload), "bytes": upload.bytes} for upload in self.sent],
            "sums": {attack.client: asdict(attack) for attack in self.sums},
            "notes": list(self.notes),
        }


def attack_membership(
    run: Run,
    config: Config,
    domains: Domains,
    partitions: Sequence[ClientPartition],
    federation: Federation,
    samples: int,
) -> tuple[Membership, ...]:
    """Compare the training images of each domain's clients with its test images, by the clients that test."""
    rows_by_domain: dict[str, list[NDArray[np.int64]]] = {}
    for partition in partitions:
        for domain, rows in partition.rows.items():
            rows_by_domain.setdefault(domain, []).append(rows)
    labels = {domain.name: domain.train.labels for domain in domains}
    whole = [ClientPartition(name, {name: np.unique(np.concatenate(rows))}) for name, rows in rows_by_domain.items()]
    sample = build_federation(config, domains, [limit_samples(part, labels, samples, SEED) for part in whole])
    train = {client.domain: client.train for client in sample.clients}
    clients = tuple(
        client if client.test is None else replace(client, test=train.get(client.domain))
        for client in federation.clients
    )
    trained, tested = (
        {domain.domain: domain.losses for domain in predict_run(run, config, tested_federation)}
        for tested_federation in (replace(federation, clients=clients), federation)
    )
    return tuple(infer_membership(domain, losses, tested[domain]) for domain, losses in trained.items())


def explain_no_inversion(algorithm: Algorithm, federation: Federation) -> str | None:
    """Say why gradient inversion does not apply; None if it does."""
    if algorithm.one_shot:
        return "clients send sums over features, so there is no gradient to invert"
    if not algorithm.one_model:
        return "clients upload no model, so no gradient can be inverted"
    if "image_size" not in federation.card:
        return "inputs are no images; the attack on rows and arrays was not tried"
    if federation.builder.frozen is not None:
        return "the encoder is frozen, so updates are of features; the attack on images was not tried"
    return None


def invert_updates(
    run: Run, config: Config, algorithm: Algorithm, federation: Federation, images: int, steps: int
) -> tuple[Inversion, ...]:
    """Invert one client's gradient at the initial weights and at the final ones."""
    plain = replace(config, run=replace(config.run, layout="contiguous"))
    restored = restore_model(run, plain, algorithm, federation.builder)
    trainer, rounds = restored.trainer, restored.round
    client = next(client for client in federation.clients if client.train is not None)
    state = restored.store.load(client.id, rounds + 1)
    state = {name: group for name, group in state.items() if name != PERSONAL}  # updates are of the global model
    cases: dict[str, tuple[Groups, Groups, int]] = {
        "round 1": ({"model": snapshot(trainer.modules["model"])}, {}, 0),
        "the last round": (restored.received, state, rounds),
    }
    with use_threads(1):
        return tuple(
            _invert_update(when, trainer, client, federation, case, images, steps) for when, case in cases.items()
        )


def _invert_update(
    when: str,
    trainer: LocalTrainer,
    client: Client,
    federation: Federation,
    weights: tuple[Groups, Groups, int],
    images: int,
    steps: int,
) -> Inversion:
    """Reconstruct a few images of a client from the gradient of one step, at given weights and client state."""
    assert client.train is not None
    ctx = load_for_evaluation(trainer, client, *weights)
    rows = _draw_distinct(client.train.labels().numpy(), images)
    x, y = client.train.batch(rows, trainer.device, torch.contiguous_format)
    model = trainer.modules["model"]
    uploaded = [p for name, p in model.named_parameters() if name not in trainer.local_names and p.requires_grad]

    def gradient(images: Tensor) -> list[Tensor]:
        loss = F.cross_entropy(predict(trainer.algorithm, trainer.modules, images, ctx).logits, y)
        parts = torch.autograd.grad(loss, uploaded, create_graph=True, allow_unused=True)
        return [part for part in parts if part is not None]

    sent = [part.detach() for part in gradient(x)]
    norm = Normalisation(tuple(federation.card["mean"]), tuple(federation.card["std"]))
    low, high = norm.shift, norm.shift + 255 * norm.scale
    start = torch.randn(x.shape, generator=torch_rng(SEED, "audit", when))
    reconstructed = invert(gradient, sent, low, high, steps, start)
    decoys = np.setdiff1d(np.arange(len(client.train)), rows)[:MAX_CANDIDATES]
    candidates = torch.cat([x, client.train.batch(decoys, trainer.device, torch.contiguous_format)[0]])
    restored, originals, candidates = ((images - low) / (high - low) for images in (reconstructed, x, candidates))
    recognised = sum(find_nearest(image, candidates) == number for number, image in enumerate(restored))
    return Inversion(
        when,
        format_client(client),
        originals.numpy(),
        restored.numpy(),
        tuple(psnr(restored, originals)),
        recognised,
        len(candidates),
    )


def _draw_distinct(labels: NDArray[np.int64], images: int) -> NDArray[np.int64]:
    """Draw images of as many classes as possible, so that labels fix their order."""
    order = numpy_rng(SEED, "audit").permutation(len(labels))
    first = [int(order[np.flatnonzero(labels[order] == label)[0]]) for label in np.unique(labels[order])]
    rest = [int(row) for row in order if row not in first]
    return np.array([*first, *rest][:images])


def summarise_uploads(
    run: Run, config: Config, algorithm: Algorithm, federation: Federation
) -> tuple[UploadSummary, ...]:
    """Count the uploads of each client over all rounds, and their bytes by group."""
    session = open_session(config, algorithm, federation)
    template = session.template()
    groups = {group: count_bytes({group: bag}) for group, bag in template.items()}
    tensors = sum(len(bag) for bag in template.values())
    cohorts = [session.cohort(record.round) for record in run.records]
    return tuple(
        UploadSummary(format_client(client), sum(client.id in cohort for cohort in cohorts), groups, tensors)
        for client in federation.clients
        if client.train is not None
    )


def format_client(client: Client) -> str:
    return f"{client.id} ({client.domain})"
