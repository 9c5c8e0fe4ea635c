"""The only source of randomness: every generator is seeded by the run's seed and a path that names its purpose.

The noise that protects clients of a deployment is the exception: it comes from the system (`secret_rng`).

Generators with different paths are independent, and none depends on earlier draws of others. So results do not depend
on the order of clients, on the number of workers or on where a run was resumed.
"""

import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch


def seed_for(seed: int, *path: str | int) -> int:
    """Return a 63-bit seed for one purpose, such as `seed_for(0, "batches", round, client)`."""
    digest = hashlib.blake2b(json.dumps([seed, *path]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def torch_rng(seed: int, *path: str | int) -> torch.Generator:
    """Return a generator on the CPU, where noise is drawn for every device, so that all get the same draws."""
    return torch.Generator().manual_seed(seed_for(seed, *path))


def numpy_rng(seed: int, *path: str | int) -> np.random.Generator:
    return np.random.default_rng(seed_for(seed, *path))


def secret_rng() -> np.random.Generator:
    """Return a generator seeded by the system, for noise that cannot be guessed from the run's seed."""
    return np.random.default_rng(secrets.randbits(256))


@dataclass(frozen=True)
class DefaultGenerators:
    """Torch's default generators of the CPU and of a device, for dropout and the initial weights of modules.

    All threads of a process share them.
    """

    device: torch.device

    def states(self) -> list[torch.Tensor]:
        """Return the state of each generator, which changes with every draw."""
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        elif self.device.type == "mps":
            states.append(torch.mps.get_rng_state())
        return states

    def restore(self, states: Sequence[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self.device)
        elif self.device.type == "mps":
            torch.mps.set_rng_state(states[1])

    def seed(self, number: int) -> None:
        torch.default_generator.manual_seed(number)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(number)
        elif self.device.type == "mps":
            torch.mps.manual_seed(number)


class ReadWriteLock:
    """A lock for any number of readers, or for one writer."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0

    @contextmanager
    def read(self) -> Iterator[None]:
        with self._condition:
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    @contextmanager
    def write(self) -> Iterator[None]:
        with self._condition:  # new readers wait for it
            self._condition.wait_for(lambda: not self._readers)
            yield


CPU = torch.device("cpu")
_LOCK = ReadWriteLock()
"""Lock of the default generators, which are seeded by one thread at a time."""


@contextmanager
def keep_generators(device: torch.device = CPU) -> Iterator[DefaultGenerators]:
    """Restore torch's default generators afterwards. No other thread may draw from them meanwhile."""
    generators = DefaultGenerators(device)
    with _LOCK.write():
        states = generators.states()
        try:
            yield generators
        finally:
            generators.restore(states)


@contextmanager
def share_generators(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Share torch's default generators with all threads; yields a function that tells whether any thread drew."""
    generators = DefaultGenerators(device)
    with _LOCK.read():
        states = generators.states()
        yield lambda: not all(map(torch.equal, states, generators.states()))


@contextmanager
def seeded_init(seed: int, *path: str | int) -> Iterator[None]:
    """Seed the default generator, from which modules draw their initial weights, and restore it afterwards."""
    with keep_generators() as generators:
        generators.seed(seed_for(seed, *path))
        yield
