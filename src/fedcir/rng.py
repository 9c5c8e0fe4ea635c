"""The only source of randomness: every draw comes from a seed and the path of what it is for.

The noise that protects clients of a deployment is the exception: it comes from the system (`secret_rng`).

Two draws with different paths are independent, and none depends on what was drawn before it elsewhere. So results
do not depend on the order of clients, on the number of workers or on where a run was resumed.
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


@dataclass(frozen=True)
class DefaultGenerators:
    """Torch's default generators of the CPU and of a device, which dropout and the first weights of modules draw from.

    A process has one of each, whatever its threads do.
    """

    device: torch.device

    def states(self) -> list[torch.Tensor]:
        """The state of each generator, which changes with every draw."""
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
    """Held by any number of readers, or by one writer."""

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
        with self._condition:  # a new reader waits for it
            self._condition.wait_for(lambda: not self._readers)
            yield


CPU = torch.device("cpu")
_LOCK = ReadWriteLock()
"""On the default generators: whoever seeds them is alone."""


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
    """Leave torch's default generators to all threads; gives a function that tells whether any of them drew."""
    generators = DefaultGenerators(device)
    with _LOCK.read():
        states = generators.states()
        yield lambda: not all(map(torch.equal, states, generators.states()))


@contextmanager
def seeded_init(seed: int, *path: str | int) -> Iterator[None]:
    """Torch's modules draw their first weights from the default generator: seed it here, and restore it afterwards."""
    with keep_generators() as generators:
        generators.seed(seed_for(seed, *path))
        yield
