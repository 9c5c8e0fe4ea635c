"""Attacks on the sums of FedCiROne: who was trained on, and what an image of a rare class looks like to the encoder.

The features of n images span n directions of their Gram matrix at most, and another image has a part outside. Its
leverage, x' (G + r I)^-1 x, is large then. The sum of the features of a class with one image is the image's features.
"""

from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from fedcir.algorithms.fedcirone import FedCiROne, select_sums
from fedcir.analysis.leakage import SumLeakage, format_client, infer_membership
from fedcir.client.local_update import EVALUATION_BATCH
from fedcir.config import Config
from fedcir.data.domains import Labels
from fedcir.data.examples import Examples
from fedcir.data.federation import Client, Federation
from fedcir.models.closed_form import FeatureSums, add_sums
from fedcir.runs.evaluation_data import sample_rows
from fedcir.runs.reader import RestoredModel, Run, restore_model
from fedcir.types import Tensors

RIDGE = 1e-6
"""Penalty of the leverage, as a share of the sum of the eigenvalues."""


@torch.no_grad()
def attack_sums(
    run: Run, config: Config, algorithm: FedCiROne, federation: Federation, samples: int
) -> tuple[SumLeakage, ...]:
    """Attack the sums of the clients with the fewest and the most training images, as the server gets them."""
    restored = restore_model(run, config, algorithm, federation.builder)
    clients = [federation.clients[number] for number in federation.trainers]
    attacked = sorted((client for client in clients if client.test is not None), key=_count_images)
    if not attacked:
        return ()
    ends = dict.fromkeys((attacked[0].id, attacked[-1].id))
    total = None
    if config.server.masked:
        total = reduce(add_sums, (_compute_sums(restored, algorithm, client) for client in clients))
    summed = sum(map(_count_images, clients))
    return tuple(
        _attack_client(restored, client, total or _compute_sums(restored, algorithm, client), samples,
                       summed if total else _count_images(client), federation.card["classes"])
        for client in attacked
        if client.id in ends
    )  # fmt: skip


def _count_images(client: Client) -> int:
    return len(client.train or ())


def _compute_sums(restored: RestoredModel, algorithm: FedCiROne, client: Client) -> Tensors:
    """The sums of a client's training images that left it, with the noise of the run."""
    trainer, ctx = restored.trainer, restored.load(client)
    return select_sums(
        algorithm.local_summary(trainer.modules, trainer.iterate_batches(client.train), ctx)["sums"], "train"
    )


def _attack_client(
    restored: RestoredModel, client: Client, sums: Tensors, samples: int, summed: int, classes: Sequence[str]
) -> SumLeakage:
    assert client.train is not None
    assert client.test is not None
    restored.load(client)
    members, others = (
        _encode(restored, data, sample_rows(len(data), samples, 0, client.domain))
        for data in (client.train, client.test)
    )
    pooled = FeatureSums.from_exact(sums, members.shape[1])
    values, vectors = torch.linalg.eigh(pooled.gram)
    values = values.clamp_min(0)  # noise makes some negative
    scale = values + RIDGE * float(values.sum())
    leverage = [((rows @ vectors).square() / scale).sum(1).numpy() for rows in (members, others)]
    counts = client.train.labels().bincount(minlength=len(classes))
    rarest = int(torch.where(counts > 0, counts, counts.max() + 1).argmin())
    cosines = []
    for data in (client.train, client.test):
        rows = np.flatnonzero(data.labels().numpy() == rarest)[:samples]
        near = torch.cosine_similarity(_encode(restored, data, rows), pooled.cross[:, rarest], dim=1)
        cosines.append(float(near.mean()) if len(rows) else None)
    return SumLeakage(
        client=format_client(client),
        images=len(client.train),
        summed=summed,
        features=members.shape[1],
        is_noised=restored.trainer.privacy.noise > 0,
        membership=infer_membership(format_client(client), *leverage),
        rarest=classes[rarest],
        rarest_images=int(counts[rarest]),
        cosine=cosines[0] or 0.0,
        cosine_of_others=cosines[1],
    )


def _encode(restored: RestoredModel, data: Examples, rows: Labels) -> Tensor:
    """Features of some examples (N, F), as they are summed, scaled to norm 1."""
    trainer = restored.trainer
    encoder = trainer.modules["model"].encoder
    parts = [rows[start : start + EVALUATION_BATCH] for start in range(0, len(rows), EVALUATION_BATCH)]
    batches = [encoder.encoder(data.batch(part, trainer.device, trainer.layout)[0]) for part in parts]
    features: Tensor = torch.cat([encoder.mean.new_zeros(0, len(encoder.mean)), *batches]).double()
    norms: Tensor = features.norm(dim=1, keepdim=True)
    return features / norms.clamp_min(1e-300)
