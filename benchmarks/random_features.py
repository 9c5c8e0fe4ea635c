"""Whether random features would earn a place in FedCiROne: accuracy on validation images with and without them.

    python benchmarks/random_features.py --pacs DIR --lists DIR --digits DIR --heart DIR [--seeds 0 1 2]

Beside the features z of the encoder, the head gets max(0, W z / |z| + b) for a fixed random W and b, which every site
draws from the seed of the run. The message is still one, and the head is still in closed form, but not linear in z.
"""

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcir
from fedcir.models.builder import NetworkBuilder
from fedcir.models.classifier import Classifier
from fedcir.models.site_statistics import StandardisedEncoder
from fedcir.rng import torch_rng
from fedcir.types import Modules

WIDTHS = (0, 1000, 2000)


class RandomFeatures(nn.Module):
    """The features of an encoder, followed by random ones."""

    matrix: Tensor
    bias: Tensor

    def __init__(self, encoder: nn.Module, features: int, width: int, rng: torch.Generator) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("matrix", torch.randn(features, width, generator=rng))
        self.register_buffer("bias", torch.randn(width, generator=rng) / 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)  # (B, F)
        random = F.relu(F.normalize(z, dim=1) @ self.matrix + self.bias)  # entries of the product have variance 1
        return torch.cat([z, random], dim=1)


@dataclass(frozen=True)
class FedCiROneRandom(fedcir.FedCiROne):
    """FedCiROne with random features."""

    random: int = 0
    """Number of random features."""

    def build(self, builder: NetworkBuilder) -> Modules:
        if not self.random:
            return super().build(builder)
        width = builder.features + self.random
        model = replace(builder, features=width).classifier()
        rng = torch_rng(builder.seed, "init", "random features")
        encoder = RandomFeatures(model.encoder, builder.features, self.random, rng)
        return {"model": Classifier(StandardisedEncoder(encoder, width), model.head)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("pacs", "lists", "digits", "heart"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    frozen = ("--model", "efficientnet-lite0", "--set", "model.freeze=true", "--set", "model.native_size=true")
    studies = {
        "heart": (
            *("--dataset", "csv", "--data-root", options.heart),
            "--set",
            "data.target=num>0",
            "--model",
            "linear",
        ),
        "digits": (
            *("--dataset", "arrays", "--data-root", options.digits, "--set", "data.train_per_domain=500"),
            *frozen,
        ),
        "pacs": (
            *("--dataset", "pacs", "--data-root", options.pacs, "--set", f"data.lists={options.lists}"),
            *("--image-size", "128", "--set", "model.stages=5", *frozen),
        ),
    }
    for study, settings in studies.items():
        for width in WIDTHS:
            accuracies = []
            for seed in options.seeds:
                with tempfile.TemporaryDirectory(prefix="fedcir-") as folder:
                    out = str(Path(folder, "run"))
                    command = [sys.executable, "-m", "fedcir", "run", "--algorithm", __file__, *settings, "--out", out]
                    command += ["--set", f"algorithm.random={width}", "--set", "data.val_fraction=0.1"]
                    subprocess.run([*command, "--seed", str(seed), "--quiet", "--no-report"], check=True)
                    validation = fedcir.load_run(out).records[-1].validation
                assert validation is not None
                accuracies.append(100 * statistics.fmean(validation.values()))
            spread = statistics.stdev(accuracies) if len(accuracies) > 1 else math.nan
            print(f"{study}, {width} random features: {statistics.fmean(accuracies):.1f} ± {spread:.1f}", flush=True)


if __name__ == "__main__":
    main()
