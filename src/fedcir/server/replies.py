"""Validation of replies: they are checked, ordered by client and counted; unusable ones are dropped and named."""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedcir.client.calibration import BINS, CONFIDENCE_BINS, PREFIX, SUMS
from fedcir.client.uploads import decompress_update
from fedcir.data.federation import Roster, SampleCounts
from fedcir.errors import RunError
from fedcir.models.tensors import count_bytes, find_mismatch, find_non_finite, update_norm
from fedcir.tasks.task import Sums, Task, add_sums
from fedcir.types import ClientReply, DroppedReply, Groups

MAX_LOSS = float(torch.finfo(torch.float32).max)
"""Largest loss in single precision."""
MAX_FLOPS = 1e21
"""FLOPs of a client in a round: a day at 1e16 operations a second."""
MAX_NAME = 60
"""Characters in the name of a metric."""


def find_training_fault(reply: ClientReply, sizes: SampleCounts | None) -> str | None:
    """Return why a training reply cannot be used; None if it can. `sizes` are known of sites only."""
    if (name := find_non_finite(reply.tensors)) is not None:
        return f"{name} is not finite; a lower local.lr may help"
    for group, bag in reply.tensors.items():
        if name := next((name for name in bag if name.endswith("running_var") and (bag[name] < 0).any()), None):
            return f"{group}/{name} is negative, which no variance is"
    if reply.num_examples < 1:
        return f"num_examples must be at least 1, got {reply.num_examples}"
    if sizes is not None and reply.num_examples != sizes.train:
        return f"num_examples is {reply.num_examples}, expected {sizes.train}"
    return _find_loss_fault(reply.metrics)


def list_evaluation_metrics(task: Task) -> tuple[str, ...]:
    """Names of the metrics that an evaluation reply may carry."""
    sums = (*task.sum_names, "loss")
    return *sums, *(f"validation/{name}" for name in sums), *(SUMS if task.has_classes else ())


def find_evaluation_fault(reply: ClientReply, sizes: SampleCounts | None, task: Task) -> str | None:
    """Return why an evaluation reply cannot be used; None if it can."""
    metrics, expected = reply.metrics, list_evaluation_metrics(task)
    if unknown := sorted(metrics.keys() - set(expected)):
        return f"metric {unknown[0][:MAX_NAME]!r} is not expected"
    parts = {"": None if sizes is None else sizes.test}
    if (sizes is not None and sizes.validation) or not metrics.keys() <= {*task.sum_names, "loss"}:
        parts["validation/"] = None if sizes is None else sizes.validation
    reasons = (_find_sums_fault(metrics, part, examples, task) for part, examples in parts.items())
    return next(filter(None, reasons), None) or _find_calibration_fault(metrics)


def _find_loss_fault(metrics: Mapping[str, float]) -> str | None:
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


def _select_sums(metrics: Mapping[str, float], part: str, task: Task) -> Sums:
    """Sums over test or validation examples, with NaN for those that are missing."""
    return {name: metrics.get(f"{part}{name}", math.nan) for name in task.sum_names}


def _find_sums_fault(metrics: Mapping[str, float], part: str, examples: int | None, task: Task) -> str | None:
    """Check the sums over test or validation examples. A loss may be infinite or NaN if the model diverged."""
    sums = _select_sums(metrics, part, task)
    if (fault := task.find_sums_fault(sums)) is not None:
        return fault
    if examples is not None and sums["count"] != examples:
        return f"{part}count is {sums['count']:g}, expected {examples}"
    loss, least = metrics.get(f"{part}loss", 0.0), 0.0 if task.has_classes else -MAX_LOSS
    if math.isfinite(loss) and not least <= loss <= MAX_LOSS:
        return f"{part}loss is {loss:g}, but must be from {least:g} to {MAX_LOSS:g}"
    return None


def _find_calibration_fault(metrics: Mapping[str, float]) -> str | None:
    """Check calibration sums, if there are any: each image is counted in one bin of each histogram."""
    if not any(name in metrics for name in SUMS):
        return None
    images, values = metrics["validation/count"], [metrics.get(name, -1.0) for name in SUMS]
    slopes = values[: -BINS - CONFIDENCE_BINS]  # the margin is bounded as a slope is
    histograms = {"novelty": values[-BINS:], "confidence": values[-BINS - CONFIDENCE_BINS : -BINS]}
    for name, counts in histograms.items():
        if not all(count >= 0 and count % 1 == 0 for count in counts) or sum(counts) != images:
            return f"{PREFIX}{name} does not count {images:g} images"
    if any(math.isfinite(slope) and abs(slope) > 2 * images * MAX_LOSS for slope in slopes):
        return f"{PREFIX}slope or margin is out of bounds"
    return None


AHEAD = 8
"""Replies that are buffered to estimate the usual norm, which bounds memory."""
SMALL = 0.01
"""Smallest usual norm, as a share of the model's: when most clients have converged, their updates are tiny."""

Norms = dict[str, float]
"""Norms by part: the update of "model", its "model statistics", or another group."""
AnyReply = ClientReply | DroppedReply


class NormFilter:
    """Drops replies whose update norm is an outlier; `factor` 0 drops none."""

    def __init__(self, sent: Groups, trained: Sequence[str], factor: float) -> None:
        self._sent, self._factor = {group: sent[group] for group in trained}, factor
        self._least = {part: SMALL * norm for part, norm in self._compute_norms(self._sent, update=False).items()}
        self._seen: list[Norms] = []

    def drop_outliers(self, replies: Iterable[AnyReply]) -> Iterator[AnyReply]:
        """Pass replies on in order, with outliers replaced by DroppedReply."""
        waiting: list[tuple[AnyReply, Norms]] = []
        for reply in replies:
            norms = self._compute_norms(reply.tensors) if self._factor and isinstance(reply, ClientReply) else {}
            waiting.append((reply, norms))
            if norms:
                self._seen.append(norms)
            if len(self._seen) >= AHEAD or not self._factor:
                yield from self._apply_limit(waiting)
                waiting = []
        yield from self._apply_limit(waiting)

    def _apply_limit(self, waiting: Iterable[tuple[AnyReply, Norms]]) -> Iterator[AnyReply]:
        for reply, norms in waiting:
            reason = self._find_fault(norms)
            yield reply if reason is None else DroppedReply(reply.client_id, reason)

    def _find_fault(self, norms: Norms) -> str | None:
        alone = len(self._seen) == 1  # with nobody to compare it with, only the model
        for part, norm in norms.items():
            median = 0.0 if alone else statistics.median_low(norm[part] for norm in self._seen)  # bad ones are long
            usual = max(median, self._least.get(part, 0.0))
            # What else is uploaded grows with a client's data, and statistics differ as the data do.
            limit = self._factor**2 if alone or part not in self._sent else self._factor
            if usual and norm > limit * usual:
                part_name = f"update of {part}" if part in self._sent else part
                return (
                    f"the norm of its {part_name} is {norm:.3g}, {norm / usual:.3g} times the usual {usual:.3g}; "
                    f"server.max_update allows {limit:g} times, and a lower local.lr may help an honest client"
                )
        return None

    def _compute_norms(self, arrays: Groups, update: bool = True) -> Norms:
        norms = {}
        for group, bag in arrays.items():
            sent = self._sent.get(group, {}) if update else {}
            norms[group] = update_norm(bag, sent)
            if group in self._sent:
                norms[f"{group} statistics"] = update_norm(bag, sent, statistics=True)
        return norms


@dataclass
class ReplyCollector:
    """Validates the replies of a round and totals their losses, bytes and FLOPs."""

    round: int
    template: Groups
    min_replies: int
    sizes: Mapping[int, SampleCounts]
    screen: NormFilter
    received: Groups | None = None
    """The broadcast, if uploads are compressed changes to it."""
    secret: bool = False
    """Whether errors must not reveal which clients take part, or how many."""
    find_fault: Callable[[ClientReply], str | None] = lambda reply: None
    """The method's own check of a reply."""
    dropped: dict[str, str] = field(default_factory=dict)
    bytes_up: int = 0
    flops: int = 0
    count: int = 0
    _losses: dict[str, list[float]] = field(default_factory=dict)

    def collect(self, replies: Iterable[AnyReply], cohort: Sequence[int]) -> Iterator[ClientReply]:
        """Yield the valid replies in client order, and record the dropped ones."""
        for reply in self.screen.drop_outliers(map(self._validate, _sort_replies(replies, cohort))):
            if isinstance(reply, DroppedReply):
                self.dropped[str(reply.client_id)] = reply.reason
                continue
            self.count += 1
            self.bytes_up += count_bytes(self.template)  # a valid reply is as large
            self.flops += int(reply.metrics.get("flops", 0))
            for name, value in reply.metrics.items():
                if name.startswith("loss/"):
                    self._losses.setdefault(name.removeprefix("loss/"), []).append(value)
            yield reply
        least = min(self.min_replies, len(cohort))
        if self.count >= least:
            return
        clients: dict[str, list[str]] = {}
        for client, reason in self.dropped.items():
            clients.setdefault(reason, []).append(client)
        if self.secret:
            fault = f"too few replies are usable for server.min_replies={self.min_replies}"
            reasons = sorted(clients)
        else:
            fault = f"{self.count} of {len(cohort)} replies are usable, {least} are needed"
            reasons = [f"client{'s' * (len(ids) > 1)} {', '.join(ids)}: {reason}" for reason, ids in clients.items()]
        raise RunError(f"round {self.round}: {fault} ({'; '.join(reasons)})")

    def losses(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self._losses.items()}

    def _validate(self, reply: AnyReply) -> AnyReply:
        """Return the decompressed reply, or why it is dropped."""
        if isinstance(reply, DroppedReply):
            return reply
        if (reason := find_mismatch(reply.tensors, self.template)) is not None:
            return DroppedReply(reply.client_id, reason)
        if self.received is not None:
            reply = replace(reply, tensors=decompress_update(reply.tensors, self.received))
        reason = find_training_fault(reply, self.sizes.get(reply.client_id)) or self.find_fault(reply)
        return reply if reason is None else DroppedReply(reply.client_id, reason)


def _sort_replies(replies: Iterable[AnyReply], cohort: Sequence[int]) -> Iterator[AnyReply]:
    """Yield replies in cohort order, each as soon as its predecessors are there; missing ones as dropped."""
    waiting: dict[int, AnyReply] = {}
    position = 0
    for reply in replies:
        waiting.setdefault(reply.client_id, reply)
        while position < len(cohort) and cohort[position] in waiting:
            yield waiting.pop(cohort[position])
            position += 1
    for client in cohort[position:]:
        yield waiting.pop(client, DroppedReply(client, "no reply"))
    for client in set(waiting) - set(cohort):
        yield DroppedReply(client, "not in this round's cohort")


@dataclass
class EvaluationTotals:
    """Sums of an evaluation by domain, in client order."""

    task: Task
    sums: dict[str, Sums] = field(default_factory=dict)
    aside: dict[str, Sums] = field(default_factory=dict)
    """Over the validation examples."""
    risk: dict[str, float] = field(default_factory=dict)
    """Mean loss on the test examples."""
    replies: list[Mapping[str, float]] = field(default_factory=list)
    """Metrics of each client, with its calibration sums."""
    tensors: dict[str, Groups] = field(default_factory=dict)
    """Tensors of the replies by domain."""

    def scores(self, sums: Mapping[str, Sums], metric: str | None = None) -> dict[str, float]:
        """A metric by domain, without the domains whose examples do not define it; by default the primary one."""
        name = metric or self.task.primary.name
        values = {domain: self.task.scores(parts)[name] for domain, parts in sums.items()}
        return {domain: value for domain, value in values.items() if math.isfinite(value)}

    def to_fields(self, unseen: Collection[str]) -> dict[str, Any]:
        """Fields of a round's record. Domains that nobody trains on are averaged separately."""
        scores, primary = self.scores(self.sums), self.task.primary
        seen = {domain: value for domain, value in scores.items() if domain not in unseen}
        apart = [domain for domain in scores if domain in unseen]
        together = {"": add_sums([self.sums[domain] for domain in seen])} if seen else {}
        further = {metric.name: self.scores(self.sums, metric.name) for metric in self.task.metrics_reported[1:]}
        return {
            "scores": scores or None,
            "score_mean": sum(seen.values()) / len(seen) if seen else None,
            "score_weighted": self.scores(together).get(""),
            "score_worst": primary.find_worst(seen.values()),
            "unseen": apart or None,
            "score_unseen": sum(scores[domain] for domain in apart) / len(apart) if apart else None,
            "validation": self.scores(self.aside) or None,
            "risk": self.risk or None,
            "metrics": (further if scores else None) or None,
            "metric": primary,
        }


def tally_evaluations(roster: Roster, replies: Iterable[AnyReply], dropped: dict[str, str]) -> EvaluationTotals:
    """Total the evaluation replies by domain; unusable ones go into `dropped`."""
    task, evaluators, sizes = roster.builder.task, roster.evaluators, roster.sizes
    tests = EvaluationTotals(task)
    for reply in _sort_replies(replies, sorted(evaluators)):
        if isinstance(reply, DroppedReply):
            dropped.setdefault(str(reply.client_id), f"evaluation: {reply.reason}")
            continue
        if (fault := find_evaluation_fault(reply, sizes.get(reply.client_id), task)) is not None:
            dropped.setdefault(str(reply.client_id), f"evaluation: {fault}")
            continue
        domain, metrics = evaluators[reply.client_id], reply.metrics
        tests.sums[domain] = _select_sums(metrics, "", task)
        if math.isfinite(loss := metrics.get("loss", math.nan)):
            tests.risk[domain] = loss
        if "validation/count" in metrics:
            tests.aside[domain] = _select_sums(metrics, "validation/", task)
        tests.replies.append(metrics)
        tests.tensors[domain] = reply.tensors
    return tests
