"""What clients answer: checked, put in client order and counted; what cannot be used is dropped and named."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedcir.data.federation import Roster, Sizes
from fedcir.engine.norms import Screen
from fedcir.engine.uploads import decoded
from fedcir.engine.valid import evaluation_fault, training_fault
from fedcir.models.tensors import difference, tensor_bytes
from fedcir.types import ClientReply, Dropped, Groups, RunError

Counts = dict[str, tuple[int, int]]
"""Correct answers and samples by domain."""


class Collected:
    """What is counted while replies pass on their way to the server's step."""

    def __init__(
        self,
        round: int,
        template: Groups,
        min_replies: int,
        sizes: Mapping[int, Sizes],
        screen: Screen,
        received: Groups | None = None,
        secret: bool = False,
    ) -> None:
        self.round, self.template, self.min_replies = round, template, min_replies
        self.sizes, self.screen = sizes, screen
        self.received = received
        """What clients started from, if they answer with changes to it in fewer bytes."""
        self.secret = secret
        """Whether no error may tell which clients take part, or how many."""
        self.dropped: dict[str, str] = {}
        self.bytes_up = self.flops = self.count = 0
        self._losses: dict[str, list[float]] = {}

    def usable(self, replies: Iterable[ClientReply | Dropped], cohort: Sequence[int]) -> Iterator[ClientReply]:
        """The valid replies, in client order; the others are dropped and counted."""
        for reply in self.screen.screened(map(self._checked, _in_order(replies, cohort))):
            if isinstance(reply, Dropped):
                self.dropped[str(reply.client_id)] = reply.reason
                continue
            self.count += 1
            self.bytes_up += tensor_bytes(self.template)  # a valid reply is as large
            self.flops += int(reply.metrics.get("flops", 0))
            for name, value in reply.metrics.items():
                if name.startswith("loss/"):
                    self._losses.setdefault(name.removeprefix("loss/"), []).append(value)
            yield reply
        least = min(self.min_replies, len(cohort))
        if self.count < least and self.secret:
            known = "; ".join(sorted(set(self.dropped.values())))
            raise RunError(
                f"round {self.round}: too few replies are usable for server.min_replies={self.min_replies} ({known})"
            )
        if self.count < least:
            reasons = "; ".join(
                f"{_clients(client for client, other in self.dropped.items() if other == reason)}: {reason}"
                for reason in dict.fromkeys(self.dropped.values())
            )
            raise RunError(
                f"round {self.round}: {self.count} of {len(cohort)} replies are usable, {least} are needed ({reasons})"
            )

    def losses(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self._losses.items()}

    def _checked(self, reply: ClientReply | Dropped) -> ClientReply | Dropped:
        """The reply with its tensors as the server's step takes them, or why it is of no use."""
        if isinstance(reply, Dropped):
            return reply
        if (reason := difference(reply.arrays, self.template)) is not None:
            return Dropped(reply.client_id, reason)
        if self.received is not None:
            reply = replace(reply, arrays=decoded(reply.arrays, self.received))
        reason = training_fault(reply, self.sizes.get(reply.client_id))
        return reply if reason is None else Dropped(reply.client_id, reason)


def _clients(numbers: Iterable[str]) -> str:
    named = list(numbers)
    return f"client{'s' * (len(named) > 1)} {', '.join(named)}"


def _in_order(replies: Iterable[ClientReply | Dropped], cohort: Sequence[int]) -> Iterator[ClientReply | Dropped]:
    """Replies in cohort order, each as soon as those before it are there; a client that never answered is dropped."""
    waiting: dict[int, ClientReply | Dropped] = {}
    place = 0
    for reply in replies:
        waiting.setdefault(reply.client_id, reply)
        while place < len(cohort) and cohort[place] in waiting:
            yield waiting.pop(cohort[place])
            place += 1
    for client in cohort[place:]:
        yield waiting.pop(client, Dropped(client, "no reply"))
    for client in set(waiting) - set(cohort):
        yield Dropped(client, "not in this round's cohort")


@dataclass
class Tests:
    """Correct answers and samples by domain, in the order of the clients that test."""

    counts: Counts = field(default_factory=dict)
    aside: Counts = field(default_factory=dict)
    """Of the validation images."""
    risk: dict[str, float] = field(default_factory=dict)
    """Mean loss on the test images."""
    sums: list[Mapping[str, float]] = field(default_factory=list)
    """What each client told, sums for the calibration among it."""
    arrays: dict[str, Groups] = field(default_factory=dict)
    """Tensors of the replies by domain."""

    def accuracy(self) -> dict[str, float]:
        return {domain: correct / count for domain, (correct, count) in self.counts.items()}

    def accuracies(self, unseen: Collection[str]) -> dict[str, Any]:
        """The fields of a round's record. Domains that nobody trains on have a mean of their own."""
        each = self.accuracy()
        seen = {domain: value for domain, value in each.items() if domain not in unseen}
        apart = [domain for domain in each if domain in unseen]
        every = sum(self.counts[domain][1] for domain in seen)
        return {
            "accuracy": each or None,
            "accuracy_mean": sum(seen.values()) / len(seen) if seen else None,
            "accuracy_weighted": sum(self.counts[domain][0] for domain in seen) / every if every else None,
            "accuracy_worst": min(seen.values(), default=None),
            "unseen": apart or None,
            "accuracy_unseen": sum(each[domain] for domain in apart) / len(apart) if apart else None,
        }


def tally(roster: Roster, replies: Iterable[ClientReply | Dropped], dropped: dict[str, str]) -> Tests:
    """What the clients that test, by their domains, have found; those that could not be used go into `dropped`."""
    tests, evaluators, sizes = Tests(), roster.evaluators, roster.sizes
    for reply in _in_order(replies, sorted(evaluators)):
        reason = reply.reason if isinstance(reply, Dropped) else evaluation_fault(reply, sizes.get(reply.client_id))
        if reason is not None or isinstance(reply, Dropped):
            dropped.setdefault(str(reply.client_id), f"evaluation: {reason}")
            continue
        domain, metrics = evaluators[reply.client_id], reply.metrics
        tests.counts[domain] = int(metrics["correct"]), int(metrics["count"])
        if math.isfinite(loss := metrics.get("loss", math.nan)):
            tests.risk[domain] = loss
        if "validation/count" in metrics:
            tests.aside[domain] = int(metrics["validation/correct"]), int(metrics["validation/count"])
        tests.sums.append(metrics)
        tests.arrays[domain] = reply.arrays
    return tests
