"""When a strategy of Flower's wraps ours, as those for differential privacy do: what it may, and what it gets to see.

Flower tells a wrapped strategy nothing of its wrapper, and hands the replies to the wrapper first.
"""

import sys
from collections.abc import Callable, Iterable
from types import FrameType

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)

from fedcir.algorithms.algorithm import Algorithm
from fedcir.flower.wire import NORM_BIT
from fedcir.types import InputError

PRIVATE = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)


def wrapper_of(strategy: Strategy) -> Strategy | None:
    """The outermost of the strategies that are calling this one; they are found on the stack."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Strategy) and caller is not strategy:
            found = caller
        frame = frame.f_back
    return found


def check_private(wrapper: Strategy, algorithm: Algorithm, name: str) -> None:
    """Refuse a wrapper that clips and adds noise to the mean, where a method makes more of replies than the mean."""
    hooks = ("server_step", "merge")
    averages = all(getattr(type(algorithm), hook) is getattr(Algorithm, hook) for hook in hooks)
    if isinstance(wrapper, PRIVATE) and (algorithm.sends or not averages):
        raise InputError(
            f"{name} makes more from replies than their mean, and {type(wrapper).__name__} protects only the mean: "
            "use the [privacy] settings of fedcir in its place, or a method that only averages, such as fedavg"
        )


def guard(wrapper: Strategy, inner: Strategy, usable: Callable[[Message], bool]) -> None:
    """Let a wrapper see only replies that can be used: it would end the run over a tensor that is missing."""
    aggregate = wrapper.aggregate_train

    def guarded(server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        kept = [reply for reply in replies if usable(reply)]
        return (aggregate if kept else inner.aggregate_train)(server_round, kept)

    wrapper.aggregate_train = guarded  # type: ignore[method-assign]


def wrapper_fault(wrapper: Strategy, reply: Message, asked: Message) -> str | None:
    """What a wrapper cannot work with in a reply that we could use: it goes by the order of tensors, not by name."""
    (told,), (sent,) = (list(message.content.array_records.values()) for message in (reply, asked))
    if list(told) != list(sent):
        return "its tensors are not in the order in which they were sent"
    (metrics,) = reply.content.metric_records.values()
    if isinstance(wrapper, DifferentialPrivacyClientSideAdaptiveClipping) and NORM_BIT not in metrics:
        return f"{NORM_BIT} is missing: the site does not use Flower's adaptiveclipping_mod"
    return None
