"""The only source of randomness: every draw comes from a seed and the path of what it is for.

The noise that protects clients of a deployment is the exception: it comes from the system (`secret_rng`).

Two draws with different paths are independent, and none depends on what was drawn before it elsewhere. So results
do not depend on the order of clients, on the number of workers or on where a run was resumed.
"""

import hashlib
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_for(seed: int, *path: str | int) -> int:
    """A 63-bit seed for one purpose, such as `seed_for(0, "batches", round, client)`."""
    digest = hashlib.blake2b(json.dumps([seed, *path]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def torch_rng(seed: int, *path: str | int) -> torch.Generator:
    """A generator on the CPU: noise is drawn there on every device, so that devices see the same draws."""
    return torch.Generator().manual_seed(seed_for(seed, *path))


def numpy_rng(seed: int, *path: str | int) -> np.random.Generator:
    return np.random.default_rng(seed_for(seed, *path))


def secret_rng() -> np.random.Generator:
    """From the system's randomness: for noise that nobody may guess, not even one who knows the run's seed."""
    return np.random.default_rng(secrets.randbits(256))


@contextmanager
def seeded_init(seed: int, *path: str | int) -> Iterator[None]:
    """Torch's modules draw their first weights from the global generator: seed it here, and put it back after."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_for(seed, *path))
        yield
