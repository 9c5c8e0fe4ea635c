"""Compute the features that a frozen encoder gives of images, in several processes.

Features depend only on the image and the encoder: they are computed on the CPU, by one thread, in evaluation mode and
in batches of one shape, so neither the other images of a batch nor the number of processes changes a bit.
"""

import mmap
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcir.data.examples.images import Examples, Positions
from fedcir.models.threads import threads

BATCH = 8
"""Images in each batch. The encoder always gets full batches, since bits depend on it. More are no faster on a CPU."""

Values = NDArray[np.float32]
OnImages = Callable[[int], None]
"""Called with the number of images whose features are computed."""


def features_of(network: nn.Module, examples: Examples, positions: Positions) -> Tensor:
    """Compute the features of at most BATCH examples, in a batch that is padded with copies of the last one."""
    full = np.concatenate([positions, np.repeat(positions[-1:], BATCH - len(positions))])
    x, _ = examples.batch(full, torch.device("cpu"), torch.contiguous_format)
    with torch.inference_mode():
        features: Tensor = network(x)
    return features[: len(positions)].float()


def compute(
    network: nn.Module,
    examples: Examples,
    positions: Positions,
    workers: int = 1,
    on_images: OnImages | None = None,
) -> Values:
    """Compute the features (N, F) of examples, in several processes where they can be forked."""
    network = network.eval()
    starts = range(0, len(positions), BATCH)
    with threads(1):
        first = features_of(network, examples, positions[:BATCH]).numpy()
        memory = mmap.mmap(-1, len(positions) * first.shape[1] * first.itemsize)  # shared with forked processes
        values = np.frombuffer(memory, np.float32).reshape(len(positions), -1)
        values[:BATCH] = first
        # Other threads might hold a lock that a forked process would wait for in vain.
        can_fork = hasattr(os, "fork") and threading.active_count() == 1
        crew = max(1, min(workers, len(starts) - 1)) if can_fork else 1
        own, *others = [starts[number + 1 :: crew] for number in range(crew)]
        fill = partial(_fill, network, examples, positions, values)
        with _forked([partial(fill, share) for share in others]) as helpers:
            for done in chain([0], fill(own)):
                if on_images is not None:
                    on_images(min(len(first) + done * crew, len(positions)))
            for share, helper in zip(others, helpers, strict=True):
                if os.waitpid(helper, 0)[1] != 0:  # repeated here, where an error is reported
                    deque(fill(share), 0)
    return values


def _fill(
    network: nn.Module, examples: Examples, positions: Positions, values: Values, starts: Sequence[int]
) -> Iterator[int]:
    """Compute the batches that begin at `starts`; yields after each how many images are done."""
    done = 0
    for start in starts:
        batch = positions[start : start + BATCH]
        values[start : start + len(batch)] = features_of(network, examples, batch).numpy()
        done += len(batch)
        yield done


@contextmanager
def _forked(jobs: Sequence[Callable[[], Iterator[int]]]) -> Iterator[list[int]]:
    """Run jobs in forked processes, which are killed if anything goes wrong."""
    helpers = []
    try:
        for job in jobs:
            if (child := os.fork()) == 0:
                failed = 1
                try:
                    deque(job(), 0)
                    failed = 0
                finally:
                    os._exit(failed)
            helpers.append(child)
        yield helpers
    except BaseException:
        for helper in helpers:
            with suppress(OSError):  # it may have ended
                os.kill(helper, signal.SIGKILL)
                os.waitpid(helper, 0)
        raise
