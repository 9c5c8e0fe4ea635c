"""Device, number of workers and memory layout for this machine, and settings of the process."""

import contextlib
import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from fedcir.config import BUILTIN_MODELS, Config, ModelConfig
from fedcir.errors import InputError
from fedcir.machine import count_cores


def pick_device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    usable = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    kind, colon, number = name.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if not usable.get(kind) or (colon and number not in map(str, range(count))):
        choices = " or ".join(kind for kind, is_usable in usable.items() if is_usable)
        raise InputError(f"run.device {name!r} is not available here: use {choices}")
    return torch.device(name)


def pick_workers(config: Config, evaluators: int) -> int:
    """Number of clients to train at a time: run.workers, or one for each core or GPU that has a client."""
    most = max(config.server.active or 1, evaluators)
    if not config.run.device.startswith("cpu"):
        return config.run.workers or min(most, len(list_devices(config.run.device)))
    if not (hasattr(os, "memfd_create") and hasattr(os, "fork")):  # worker processes need Linux
        return 1
    return config.run.workers or max(1, min(count_cores() // config.run.threads, most))


def list_devices(name: str) -> list[str]:
    """Devices of a name: all GPUs for cuda, one for cuda:1."""
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] if name == "cuda" else [name]


def choose_layout(
    model: ModelConfig, encoder: Callable[[], nn.Module] | None = None
) -> Literal["contiguous", "channels_last"]:
    """Choose the faster memory layout, as measured by benchmarks/layouts.py: channels_last, where it is safe.

    The choice follows a fixed rule instead of a timing, because results depend on it to the last bit.
    """
    if model.freeze or (model.name not in BUILTIN_MODELS and encoder is not None and find_unsafe_layer(encoder())):
        return "contiguous"
    if model.name == "resnet18" and model.width is not None and model.width < 16:
        return "contiguous"  # see find_unsafe_layer
    return "channels_last"


def find_unsafe_layer(network: nn.Module) -> str | None:
    """Describe the first layer that torch must not run in channels_last; None if there is none.

    With few input channels, the gradient of a strided 1x1 convolution writes out of bounds in torch 2.13 on a CPU
    (oneDNN issue 6035).
    """
    for name, layer in network.named_modules():
        strided = isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and max(layer.stride) > 1
        if strided and layer.in_channels < 16:
            return f"{name}, a strided 1x1 convolution of {layer.in_channels} channels"
    return None


def retain_freed_memory() -> None:
    """Make glibc retain the memory of freed tensors instead of returning it to the system in every step.

    This saves a tenth of the step of a small network. Memory left over from opening a dataset is returned first. It
    does nothing on other C libraries.
    """
    try:
        mallopt, trim = ctypes.CDLL(None).mallopt, ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
    for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        mallopt(option, 1 << 30)


def stop_openmp_threads() -> None:
    """Stop OpenMP's idle threads: a forked process lacks them and would wait for them forever."""
    if not sys.platform.startswith("linux"):
        return
    with open("/proc/self/maps", encoding="utf-8") as file:
        loaded = {line.split(maxsplit=5)[-1].strip() for line in file if re.search(r"/lib(g|i)?omp[^/]*$", line)}
    for path in loaded:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(2)  # omp_pause_hard


def exit_with_parent(parent: int, signal_number: signal.Signals = signal.SIGKILL) -> None:
    """Make the system end this process when its parent ends, even by kill -9 (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(1, signal_number)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error is a lack of memory, which torch reports only in its message."""
    messages = ("allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(message in str(error) for message in messages)
