"""What a frozen encoder makes of images, written into a file by several processes.

Features depend on nothing but the image and the encoder: they are computed on the CPU, by one thread, in evaluation
mode and in batches of one shape.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcir.data.examples.images import Examples, Positions
from fedcir.data.pictures.decode import OnFile
from fedcir.models.threads import threads

BATCH = 8
"""Images that the encoder sees at a time, always as many, since bits depend on it. More are no faster on a CPU."""

Values = NDArray[np.float32]
Batch = tuple[int, Examples, Positions]
"""The row of its first in the file, and where the images are."""


def features_of(network: nn.Module, examples: Examples, positions: Positions) -> Tensor:
    """The features of these examples, at most BATCH; the encoder always sees a full batch."""
    full = np.concatenate([positions, np.repeat(positions[-1:], BATCH - len(positions))])
    x, _ = examples.batch(full, torch.device("cpu"), torch.contiguous_format)
    with torch.inference_mode():
        features: Tensor = network(x)
    return features[: len(positions)].float()


def compute(
    network: nn.Module, parts: Sequence[Examples], place: Path, workers: int = 1, on_file: OnFile | None = None
) -> None:
    """Write the features of all examples into a .npy file, by several processes where they can be forked."""
    network = network.eval()
    total = sum(len(part) for part in parts)
    with threads(1):
        width = features_of(network, parts[0], np.zeros(1, dtype=np.int64)).shape[1]
        values = np.lib.format.open_memmap(place, mode="w+", dtype=np.float32, shape=(total, width))
        if hasattr(os, "posix_fallocate"):
            with open(place, "r+b") as file:  # a full disk is an error now, not a crash later
                os.posix_fallocate(file.fileno(), 0, values.offset + values.nbytes)
        batches = list(_batches(parts))
        # Other threads might hold a lock that a forked process would wait for in vain.
        crew = min(workers, len(batches)) if hasattr(os, "fork") and threading.active_count() == 1 else 1
        own, *others = [batches[first::crew] for first in range(crew)]
        with _forked([partial(_fill, network, values, share) for share in others]) as helpers:
            for done in _fill(network, values, own):
                if on_file is not None:
                    on_file(min(done * crew, total), total)
            for share, helper in zip(others, helpers, strict=True):
                if os.waitpid(helper, 0)[1] != 0:  # repeated here, where an error is told
                    deque(_fill(network, values, share), 0)
        values.flush()


def _batches(parts: Sequence[Examples]) -> Iterator[Batch]:
    """All parts in batches."""
    begin = 0
    for part in parts:
        for start in range(0, len(part), BATCH):
            yield begin + start, part, np.arange(start, min(start + BATCH, len(part)))
        begin += len(part)


def _fill(network: nn.Module, values: Values, share: Sequence[Batch]) -> Iterator[int]:
    """Compute a share; tells after each batch how many images are done."""
    done = 0
    for begin, part, positions in share:
        values[begin : begin + len(positions)] = features_of(network, part, positions).numpy()
        done += len(positions)
        yield done


@contextmanager
def _forked(jobs: Sequence[Callable[[], Iterator[int]]]) -> Iterator[list[int]]:
    """Processes that fill their shares of a file, which all have mapped; they are ended if anything goes wrong."""
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
