"""Frozen encoders in ONNX Runtime, which computes features on a CPU several times as fast as PyTorch."""

import importlib.util
import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

TOLERANCE = 1e-4
"""Largest difference to PyTorch's features, relative to the largest feature."""


class ConversionError(Exception):
    """A network that ONNX Runtime cannot compute as PyTorch does."""


def find_onnxruntime() -> str | None:
    """Return the version of ONNX Runtime; None if it is not installed."""
    if importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnx") is None:
        return None
    from importlib.metadata import version

    return f"onnxruntime {version('onnxruntime')}"


class OnnxEncoder(nn.Module):
    """A network converted to ONNX, on one thread; batches have the size of the example."""

    def __init__(self, network: nn.Module, example: Tensor) -> None:
        super().__init__()
        self._session = _open_session(_convert(network, example))
        with torch.inference_mode():
            expected = network(example)
        difference = (self(example) - expected).abs().max()
        if not difference <= TOLERANCE * expected.abs().max().clamp_min(1.0):
            raise ConversionError(f"features differ by {difference:g}")

    def forward(self, x: Tensor) -> Tensor:
        (features,) = self._session.run(None, {"x": np.ascontiguousarray(x.numpy())})
        return torch.from_numpy(features)


def _convert(network: nn.Module, example: Tensor) -> bytes:
    """Convert with torch's exporter by tracing: the newer one takes ten times as long."""
    file = io.BytesIO()
    try:
        with warnings.catch_warnings(), torch.inference_mode(), _discard_stdout():
            warnings.simplefilter("ignore")  # of deprecation, and of traces
            torch._C._jit_set_onnx_log_output_stream(
                "stderr"
            )  # private: a failure prints its graph, by default to stdout
            torch.onnx.export(network, (example,), cast(Any, file), dynamo=False, input_names=["x"], opset_version=18)
    except Exception as error:  # any operation of a foreign network may be unknown to the exporter
        raise ConversionError(str(error)) from error
    return file.getvalue()


@contextmanager
def _discard_stdout() -> Iterator[None]:
    """Discard what native code prints to standard output: the exporter prints a graph that it cannot convert."""
    sys.stdout.flush()
    saved, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(null)


def _open_session(content: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # bits depend on threads, and forks have none
    options.log_severity_level = 3  # errors only
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ConversionError(str(error)) from error
