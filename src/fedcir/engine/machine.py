"""What suits this machine: device, workers, threads, and how tensors lie in memory."""

import contextlib
import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from fedcir.config import OWN_MODELS, Config, ModelConfig, cores
from fedcir.models.threads import threads
from fedcir.types import InputError

__all__ = [
    "WORKERS",
    "allowed_workers",
    "devices_of",
    "end_idle_threads",
    "end_with",
    "keep_memory",
    "layout_for",
    "may_grow",
    "pick_device",
    "pick_workers",
    "threads",
    "unsafe_in_channels_last",
]


WORKERS = "FEDCIR_WORKERS"
"""Names a file in which whoever started a run says how many workers it may have by now: more as other runs end."""


def pick_device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    usable = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    kind, colon, number = name.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if not usable.get(kind) or (colon and number not in map(str, range(count))):
        raise InputError(
            f"run.device {name!r} is not available here: use {' or '.join(k for k, v in usable.items() if v)}"
        )
    return torch.device(name)


def pick_workers(config: Config, evaluators: int) -> int:
    """Clients that train at a time: as asked for, else one for every core, or GPU, that has something to do."""
    most = max(config.server.active or 1, evaluators)
    if not config.run.device.startswith("cpu"):
        return config.run.workers or min(most, len(devices_of(config.run.device)))
    if not _forks():
        return 1
    return config.run.workers or max(1, min(cores() // config.run.threads, most))


def _forks() -> bool:
    """Whether processes can be forked and share memory, as on Linux."""
    return hasattr(os, "memfd_create") and hasattr(os, "fork")


def may_grow(device: str) -> bool:
    """Whether a run that begins with one worker may get more."""
    return WORKERS in os.environ and device.startswith("cpu") and _forks()


def allowed_workers() -> int:
    """How many there may be by now, if anybody says so."""
    try:
        return int(Path(os.environ[WORKERS]).read_text(encoding="utf-8"))
    except (KeyError, OSError, ValueError):
        return 1


def devices_of(name: str) -> list[str]:
    """The devices that a name stands for: all GPUs for cuda, one for cuda:1."""
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] if name == "cuda" else [name]


def layout_for(
    model: ModelConfig, encoder: Callable[[], nn.Module] | None = None
) -> Literal["contiguous", "channels_last"]:
    """The faster memory layout, measured on a CPU by benchmarks/layouts.py: channels_last, where that is safe.

    It is never timed in a run, since results depend on it to the last bit.
    """
    if model.freeze or (model.name not in OWN_MODELS and encoder is not None and unsafe_in_channels_last(encoder())):
        return "contiguous"
    if model.name == "resnet18" and model.width is not None and model.width < 16:
        return "contiguous"  # see below
    return "channels_last"


def unsafe_in_channels_last(network: nn.Module) -> str | None:
    """The first layer that torch must not run in channels_last.

    With few input channels, the gradient of a strided 1x1 convolution writes out of bounds in torch 2.13 on a CPU
    (oneDNN issue 6035).
    """
    for name, layer in network.named_modules():
        strided = isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and max(layer.stride) > 1
        if strided and layer.in_channels < 16:
            return f"{name}, a strided 1x1 convolution of {layer.in_channels} channels"
    return None


def keep_memory() -> None:
    """Have glibc keep what tensors give back: it would return large ones to the system and fetch them anew each step.

    That takes a tenth of a small network's step. What opening a dataset has left is returned first. Elsewhere it does
    nothing.
    """
    try:
        mallopt, trim = ctypes.CDLL(None).mallopt, ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
    for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        mallopt(option, 1 << 30)


def end_idle_threads() -> None:
    """End the threads that OpenMP keeps: in a process forked beside them it would wait for them for ever."""
    if not sys.platform.startswith("linux"):
        return
    with open("/proc/self/maps", encoding="utf-8") as file:
        loaded = {line.split(maxsplit=5)[-1].strip() for line in file if re.search(r"/lib(g|i)?omp[^/]*$", line)}
    for path in loaded:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(2)  # omp_pause_hard


def end_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the system end this process when its parent ends, even by kill -9. Only Linux can."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it has ended before
        os._exit(0)
