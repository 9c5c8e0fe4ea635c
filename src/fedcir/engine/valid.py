"""What values a reply may hold: finite ones, variances that can be, the counts that the server knows, and no other.

They are checked here for every transport, once names, shapes and types are right: one client spoils its own reply only.
"""

import math
from collections.abc import Mapping

import torch

from fedcir.data.federation import Sizes
from fedcir.engine.calibration import BINS, PREFIX, SUMS
from fedcir.models.tensors import not_finite
from fedcir.types import ClientReply, Groups

MAX_LOSS = float(torch.finfo(torch.float32).max)
"""No loss of a network in single precision is above it."""
MAX_FLOPS = 1e21
"""Of a client in a round: a day at 1e16 operations a second."""
MAX_NAME = 60
"""Letters in the name of a metric."""
COUNTED = ("correct", "count", "loss")
TESTED = frozenset([*COUNTED, *(f"validation/{name}" for name in COUNTED), *SUMS])
"""All that a client may tell of a test."""


def training_fault(reply: ClientReply, sizes: Sizes | None) -> str | None:
    """Why the reply of a client that trained cannot be used; None if it can. `sizes` are known of a site only."""
    if (name := not_finite(reply.arrays)) is not None:
        return f"{name} is not finite; a lower local.lr may help"
    if (name := _negative_variance(reply.arrays)) is not None:
        return f"{name} is negative, which no variance is"
    if reply.num_examples < 1:
        return f"num_examples must be at least 1, got {reply.num_examples}"
    if sizes is not None and reply.num_examples != sizes.train:
        return f"num_examples is {reply.num_examples}, expected {sizes.train}"
    return _fault_of_losses(reply.metrics)


def evaluation_fault(reply: ClientReply, sizes: Sizes | None) -> str | None:
    """Why the reply of a client that tested cannot be used; None if it can."""
    metrics = reply.metrics
    if (unknown := next((name for name in metrics if name not in TESTED), None)) is not None:
        return f"metric {unknown[:MAX_NAME]!r} is not expected"
    parts = {"": None if sizes is None else sizes.test}
    if (sizes is not None and sizes.validation) or not metrics.keys() <= set(COUNTED):
        parts["validation/"] = None if sizes is None else sizes.validation
    reasons = (_fault_of_counts(metrics, part, images) for part, images in parts.items())
    return next(filter(None, reasons), None) or _fault_of_sums(metrics)


def _negative_variance(groups: Groups) -> str | None:
    for group, bag in groups.items():
        for name, tensor in bag.items():
            if name.endswith("running_var") and (tensor < 0).any():
                return f"{group}/{name}"
    return None


def _fault_of_losses(metrics: Mapping[str, float]) -> str | None:
    for name, value in metrics.items():
        if name == "flops":
            if not (0 <= value <= MAX_FLOPS and value % 1 == 0):
                return f"flops is {value:g}, but must be a whole number from 0 to {MAX_FLOPS:g}"
        elif not name.startswith("loss/") or len(name) > MAX_NAME or not name.isprintable():
            return f"metric {name[:MAX_NAME]!r} is not expected"
        elif not math.isfinite(value):
            return f"metric {name} is not finite"
        elif abs(value) > MAX_LOSS:
            return f"metric {name} is {value:g}, above {MAX_LOSS:g}"
    return None


def _fault_of_counts(metrics: Mapping[str, float], part: str, images: int | None) -> str | None:
    """Of the images to test on, or of those set aside. A loss that is not finite is that of a model that diverged."""
    correct, count = metrics.get(f"{part}correct", -1.0), metrics.get(f"{part}count", 0.0)
    if not (0 <= correct <= count < math.inf and count > 0 and correct % 1 == count % 1 == 0):
        return "its counts are invalid"
    if images is not None and count != images:
        return f"{part}count is {count:g}, expected {images}"
    loss = metrics.get(f"{part}loss", 0.0)
    if math.isfinite(loss) and not 0 <= loss <= MAX_LOSS:
        return f"{part}loss is {loss:g}, but must be from 0 to {MAX_LOSS:g}"
    return None


def _fault_of_sums(metrics: Mapping[str, float]) -> str | None:
    """Of what the calibration is made from, where a client tells of it: each image is counted in one bin."""
    if not any(name in metrics for name in SUMS):
        return None
    images, values = metrics["validation/count"], [metrics.get(name, -1.0) for name in SUMS]
    slopes, counts = values[:-BINS], values[-BINS:]  # the margin is bounded as a slope is
    if not all(count >= 0 and count % 1 == 0 for count in counts) or sum(counts) != images:
        return f"{PREFIX}unlike does not count {images:g} images"
    if any(math.isfinite(slope) and abs(slope) > 2 * images * MAX_LOSS for slope in slopes):
        return f"{PREFIX}slope or margin is out of bounds"
    return None
