"""Pictures with a bright band, whose height is the class."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("high", "low", "middle")


def write_pictures(
    root: Path, domains: tuple[str, ...], classes: tuple[str, ...], count: int = 16, seed: int = 0
) -> Path:
    """A bright band at a height of its own for each class, over noise that differs by domain."""
    rng = np.random.default_rng(seed)
    for number, domain in enumerate(domains):
        for name in classes:
            folder = root / domain / name
            folder.mkdir(parents=True)
            for image in range(count):
                pixels = rng.integers(0, 130 + 60 * number, (12, 10, 3))
                start = {"high": 0, "middle": 4, "low": 8}.get(name, 2)
                pixels[start : start + 4] += 25
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{image}.png")
    return root


SAMPLING = ("algorithm.eval_samples=1", "algorithm.sigma_init=1.0", "local.steps=20", "local.lr=0.1")
FURTHER_METHODS = {
    "fedcir-sampling": ("fedcir", *SAMPLING),
    "fedavg-local": ("fedavg", "model.batchnorm=local"),
    "fedavg-frozen": ("fedavg", "model.freeze=true"),
}
"""Further runs: a method that samples, BatchNorm statistics of each client, and a frozen encoder."""
