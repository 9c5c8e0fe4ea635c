"""What the sums of FedCiROne give away: python benchmarks/gram_leakage.py --pacs DIR --lists DIR

For a site of n images, from its exact sums and from noised ones:
- the largest angle between an image's features and the span of the Gram matrix (0: they lie in it);
- the cosine of the features of an image that is the only one of its class with the class's sum;
- the area under the ROC curve of a membership test by leverage, x' (G + r I)^-1 x, which is small for others.
"""

import argparse

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fedcir.config import config_from_tables
from fedcir.data.federation import open_federation
from fedcir.models.closed_form import FeatureSums, gram_sums
from fedcir.models.private_sums import RandomProjection, add_noise, bound_rows
from fedcir.reporting.page import join_markdown
from fedcir.types import ExampleNoise

NOISE = 0.8919
"""Epsilon 5 at a delta of 1e-5."""
SIZES = (1, 5, 20, 100, 500, 1300)


def measure(z: Tensor, labels: Tensor, others: Tensor, noise: ExampleNoise | None) -> list[float]:
    """Largest sine of the angle to the span, cosine with the sum of the image's class, AUC of membership."""
    classes = int(labels.max()) + 1
    if noise is None:
        sums = FeatureSums.from_exact(gram_sums([(z, labels)], z.shape[1], classes), z.shape[1])
    else:
        exact = gram_sums(bound_rows([(z, labels)], noise.clip), z.shape[1], classes)
        sums = FeatureSums.from_exact(add_noise(exact, noise, np.random.default_rng(0)), z.shape[1])
    values, vectors = torch.linalg.eigh(sums.gram)
    values = values.clamp_min(0)
    units, candidates = (x.double() / x.double().norm(dim=1, keepdim=True) for x in (z, others))
    span = vectors[:, -min(len(z), z.shape[1]) :]
    outside = (1 - (units @ span).square().sum(1)).clamp_min(0).sqrt()
    with_class = torch.cosine_similarity(units, sums.cross.T[labels], dim=1)
    ridge = 1e-6 * float(values.sum())
    leverage = [((x @ vectors).square() / (values + ridge)).sum(1) for x in (units, candidates)]
    # Members lie in the span, where leverage is small.
    truth = np.r_[np.ones(len(units)), np.zeros(len(candidates))]
    auc = roc_auc_score(truth, -torch.cat(leverage).numpy())
    return [float(outside.max()), float(with_class.mean()), float(auc)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pacs", required=True)
    parser.add_argument("--lists", required=True)
    given = parser.parse_args()
    data = {"name": "pacs", "root": given.pacs, "lists": given.lists, "val_fraction": 0.1, "image_size": 224}
    model = {"name": "efficientnet-lite0", "freeze": True, "stages": 5}
    client = open_federation(config_from_tables({"data": data, "model": model})).clients[0]
    assert client.train is not None
    assert client.test is not None
    (z, labels), (others, _) = (
        part.batch(np.arange(len(part)), torch.device("cpu"), torch.contiguous_format)
        for part in (client.train, client.test)
    )
    project = RandomProjection(torch.nn.Identity(), z.shape[1], 512, torch.Generator().manual_seed(0))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(z)))
    rows = [["images", "sums", "outside the span (at most)", "cosine with the class's sum", "membership AUC"]]
    for size in SIZES:
        chosen = order[:size]
        for name, transform, noise in (
            ("exact, 2,024 features", torch.nn.Identity(), None),
            ("exact, projected to 512", project, None),
            ("epsilon 5, projected to 512", project, ExampleNoise(1.0, NOISE)),
        ):
            values = measure(transform(z[chosen]), labels[chosen], transform(others), noise)
            rows.append([f"{size:,}", name, f"{values[0]:.3f}", f"{values[1]:.2f}", f"{values[2]:.2f}"])
    print(join_markdown(rows))


if __name__ == "__main__":
    main()
