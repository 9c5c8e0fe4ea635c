"""What a run gives away: which images its model was trained on, what an update shows, and what left each client."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedcir.algorithms import make_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.analysis.inversion import invert, nearest, psnr
from fedcir.analysis.membership import Membership, membership
from fedcir.analysis.overlap import unseen_tests
from fedcir.analysis.views import SEED, data_of_run, views_under
from fedcir.config import Config
from fedcir.data.domains import Domains
from fedcir.data.examples.images import Normalisation
from fedcir.data.federation import Client, Federation, federation_from
from fedcir.data.partition.schemes import capped
from fedcir.data.partition.shares import Share
from fedcir.engine.client import Workbench, ready_to_test
from fedcir.engine.machine import threads
from fedcir.engine.prediction import predict
from fedcir.engine.session import open_session
from fedcir.engine.trust import trusted
from fedcir.models.tensors import snapshot, tensor_bytes
from fedcir.rng import numpy_rng, torch_rng
from fedcir.runs.batch import OnWork, unheard
from fedcir.runs.restore import restore
from fedcir.runs.run import Run, Source, as_run
from fedcir.types import Groups, InputError

SAMPLES, IMAGES, STEPS = 1000, 1, 300
"""Images of each domain to look at, images of the batch to reconstruct, and steps to do it in."""
COMPARED = 200
"""Images of the client that a reconstruction is compared with, at most."""


@dataclass(frozen=True)
class Inverted:
    """Images of one client, and what the attack made of the gradient of one step on them."""

    when: str
    client: str
    originals: NDArray[np.float32]  # (B, C, H, W), from 0 to 1
    found: NDArray[np.float32]  # (B, C, H, W)
    psnr: tuple[float, ...]
    recognised: int
    """How many of them are nearest to their own original among the client's images."""
    among: int
    """How many images each was compared with."""


@dataclass(frozen=True)
class Sent:
    """What left a client in all rounds together."""

    client: str
    uploads: int
    groups: dict[str, int]
    """Bytes of one upload by group."""
    tensors: int
    """Tensors of one upload."""

    @property
    def bytes(self) -> int:
        return self.uploads * sum(self.groups.values())


@dataclass(frozen=True)
class Audit:
    name: str
    dataset: str
    algorithm: str
    membership: tuple[Membership, ...]
    inverted: tuple[Inverted, ...]
    sent: tuple[Sent, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        pictures = [{n: v for n, v in vars(each).items() if n not in ("originals", "found")} for each in self.inverted]
        return {
            "run": self.name,
            "dataset": self.dataset,
            "algorithm": self.algorithm,
            "membership": {each.domain: asdict(each) for each in self.membership},
            "inversion": pictures,
            "sent": [{**asdict(each), "bytes": each.bytes} for each in self.sent],
            "notes": list(self.notes),
        }


def audit_run(
    source: Source,
    *,
    data_root: str | Path | None = None,
    samples: int = SAMPLES,
    images: int = IMAGES,
    steps: int = STEPS,
    trust_code: bool = False,
    on_work: OnWork = unheard,
) -> Audit:
    """Attack a finished run with its own data. `steps` of 0 leaves out the reconstruction of images.

    With `trust_code`, code that the run names may run.
    """
    for name, value, least in (("samples", samples, 10), ("images", images, 1), ("steps", steps, 0)):
        if value < least:
            raise InputError(f"{name} must be at least {least}, got {value}")
    run = as_run(source, trust_code)
    method = Path(run.config.algorithm.name).stem
    run = replace(run, config=trusted(run.config, run.path, run.trust_code))
    config, domains, shares = data_of_run(run, None if data_root is None else str(data_root))
    domains, overlap = unseen_tests(run, domains)
    algorithm, federation = make_algorithm(config.algorithm), federation_from(config, domains, shares)
    told = _membership(run, config, domains, shares, federation, samples)
    on_work(1, 2 if steps else 1, what="attacking the run")
    notes = [note for note in (_not_inverted(algorithm, federation), _pooled(algorithm, method)) if note]
    inverted = () if notes or not steps else _inversions(run, config, algorithm, federation, images, steps)
    notes += overlap.notes
    secret = "key" in run.manifest and config.privacy.by_server
    if secret:
        notes.append("who took part in a round is secret in this run: the sites' audit logs hold what each has sent")
    sent = () if algorithm.pools or secret else _sent(run, config, algorithm, federation)
    return Audit(run.path.resolve().name, config.data.name, method, told, inverted, sent, tuple(notes))


def _membership(
    run: Run, config: Config, domains: Domains, shares: Sequence[Share], federation: Federation, samples: int
) -> tuple[Membership, ...]:
    """Each domain that somebody trained on: the images that its clients hold, against its test images."""
    held: dict[str, list[NDArray[np.int64]]] = {}
    for share in shares:
        for domain, rows in share.rows.items():
            held.setdefault(domain, []).append(rows)
    labels = {domain.name: domain.train.labels for domain in domains}
    whole = [Share(name, {name: np.unique(np.concatenate(rows))}) for name, rows in held.items()]
    some = federation_from(config, domains, [capped(share, labels, samples, SEED) for share in whole])
    train = {client.domain: client.train for client in some.clients}
    clients = tuple(replace(client, test=train.get(client.domain)) for client in federation.clients)
    trained, tested = (
        {view.domain: view.losses for view in views_under(run, config, each)}
        for each in (replace(federation, clients=clients), federation)
    )
    return tuple(membership(domain, losses, tested[domain]) for domain, losses in trained.items())


def _not_inverted(algorithm: Algorithm, federation: Federation) -> str | None:
    if not algorithm.one_model:
        return "clients upload no model, so no gradient can be inverted"
    if federation.task.frozen is not None:
        return "the encoder is frozen, so updates are of features; the attack on images was not tried"
    return None


def _pooled(algorithm: Algorithm, method: str) -> str | None:
    return f"{method} trains on all images in one place, so every image left its client" if algorithm.pools else None


def _inversions(
    run: Run, config: Config, algorithm: Algorithm, federation: Federation, images: int, steps: int
) -> tuple[Inverted, ...]:
    """The attack on one client's step from the first weights, and from the last."""
    plain = replace(config, run=replace(config.run, layout="contiguous"))
    restored = restore(run, plain, algorithm, federation.task)
    bench, rounds = restored.bench, restored.round
    client = next(client for client in federation.clients if client.train is not None)
    cases: dict[str, tuple[Groups, Groups, int]] = {
        "round 1": ({"model": snapshot(bench.modules["model"])}, {}, 0),
        "the last round": (restored.received, restored.store.load(client.id, rounds + 1), rounds),
    }
    with threads(1):
        return tuple(_inverted(when, bench, client, federation, case, images, steps) for when, case in cases.items())


def _inverted(
    when: str,
    bench: Workbench,
    client: Client,
    federation: Federation,
    weights: tuple[Groups, Groups, int],
    images: int,
    steps: int,
) -> Inverted:
    """One step on a few images of a client, under what it received and has kept by a round."""
    assert client.train is not None
    ctx = ready_to_test(bench, client, *weights)
    rows = _different(client.train.labels().numpy(), images)
    x, y = client.train.batch(rows, bench.device, torch.contiguous_format)
    model = bench.modules["model"]
    uploaded = [p for name, p in model.named_parameters() if name not in bench.own and p.requires_grad]

    def gradient(images: Tensor) -> list[Tensor]:
        loss = F.cross_entropy(predict(bench.algorithm, bench.modules, images, ctx).logits, y)
        parts = torch.autograd.grad(loss, uploaded, create_graph=True, allow_unused=True)
        return [part for part in parts if part is not None]

    sent = [part.detach() for part in gradient(x)]
    norm = Normalisation(tuple(federation.card["mean"]), tuple(federation.card["std"]))
    low, high = norm.shift, norm.shift + 255 * norm.scale
    start = torch.randn(x.shape, generator=torch_rng(SEED, "audit", when))
    found = invert(gradient, sent, low, high, steps, start)
    others = np.setdiff1d(np.arange(len(client.train)), rows)[:COMPARED]
    among = torch.cat([x, client.train.batch(others, bench.device, torch.contiguous_format)[0]])
    seen, real, them = ((each - low) / (high - low) for each in (found, x, among))
    recognised = sum(nearest(image, them) == number for number, image in enumerate(seen))
    return Inverted(when, _name(client), real.numpy(), seen.numpy(), tuple(psnr(seen, real)), recognised, len(among))


def _different(labels: NDArray[np.int64], images: int) -> NDArray[np.int64]:
    """Images of as many classes as there are, drawn at random: their order is then known from their labels."""
    order = numpy_rng(SEED, "audit").permutation(len(labels))
    first = [int(order[np.flatnonzero(labels[order] == label)[0]]) for label in np.unique(labels[order])]
    rest = [int(row) for row in order if row not in first]
    return np.array([*first, *rest][:images])


def _sent(run: Run, config: Config, algorithm: Algorithm, federation: Federation) -> tuple[Sent, ...]:
    session = open_session(config, algorithm, federation)
    template = session.template()
    groups = {group: tensor_bytes({group: bag}) for group, bag in template.items()}
    tensors = sum(len(bag) for bag in template.values())
    cohorts = [session.cohort(record.round) for record in run.records]
    return tuple(
        Sent(_name(client), sum(client.id in cohort for cohort in cohorts), groups, tensors)
        for client in federation.clients
        if client.train is not None
    )


def _name(client: Client) -> str:
    return f"{client.id} ({client.domain})"
