"""The words that the numbers of a diagnosis support, each with the numbers it rests on."""

from collections.abc import Sequence

import numpy as np

from fedcir.analysis.bootstrap import Interval, interval, mean_of
from fedcir.analysis.diagnosis import Diagnosis
from fedcir.types import InputError

SHIFT = ((0.5, "small"), (1.2, "moderate"), (2.01, "large"))
"""Words for a proxy A-distance."""
SKEW = ((0.1, "small"), (0.3, "moderate"), (1.01, "large"))
"""Words for a total variation between label distributions."""
NEAR = ((0.1, "close to"), (0.5, "some way from"), (float("inf"), "far from"))
"""Words for a KL in nats for each dimension of z, where a mean that is off by one standard deviation is 0.5."""


def shift_word(distance: float) -> str:
    """Small, moderate or large, for a mean proxy A-distance between domains."""
    return _word(distance, SHIFT)


def skew_word(skew: float) -> str:
    """Small, moderate or large, for a mean total variation between label distributions."""
    return _word(skew, SKEW)


def verdict(found: Diagnosis, other: Diagnosis | None = None) -> list[str]:
    """Sentences on one diagnosis, and on what changed from it to a second run on the same data."""
    said = apart_in_words(found)
    if found.of_run:
        worst = min(found.views, key=lambda view: view.accuracy).domain
        named = f"{worst}, which nobody trains on" if worst in found.unseen else worst
        said.append(f"The model is least accurate on {named}: {found.accuracy[worst]:.1%}.")
    if found.bound is not None:
        said.append(
            f"The average risk of the global model is {found.bound.global_risk_interval:.3f}. It stands in for the "
            "first term of the paper's bound, the average risk of the local models, which a run does not keep. The "
            f"second term, the mean distance to the mixture, is {found.bound.divergence_interval:.2f}."
        )
    said += aligned_in_words(found)
    if other is not None:
        said += [*aligned_in_words(other), *_compared(found, other)]
    return said


def apart_in_words(found: Diagnosis) -> list[str]:
    """How much domains differ in their images, and clients in their labels."""
    if not found.measured:
        return [_skew(found)]
    shift, far = found.apart.mean_pair, found.apart.to_mixture[found.furthest]
    under = f"the model of {found.name}" if found.of_run else found.encoder
    measure = "Feature shift" if found.is_shift else "The distance of representations"
    said = [
        f"{measure} is {shift_word(shift.value)}: under {under}, the mean proxy A-distance between two domains "
        f"is {shift:.2f}. At 0 a classifier cannot tell two domains apart; at 2 it always can.",
        _skew(found),
        f"{found.furthest} is furthest from the mixture of all domains: {far:.2f}.",
    ]
    if (differ := max(found.test_skew.values())) >= SKEW[0][0]:
        said.append(
            f"The measured images also differ in their labels, by up to {differ:.0%}: "
            "part of the distance comes from the labels and not from the images."
        )
    return said


def _skew(found: Diagnosis) -> str:
    skew = found.skew
    if len(skew) == 1:
        return f"There is no label skew: {next(iter(skew))} is the only client that trains."
    most = max(skew, key=lambda name: skew[name])
    if skew[most] < 0.005:
        return "There is no label skew: all clients hold the classes in the same shares."
    mean = float(np.mean(list(skew.values())))
    who = f"client {most} of {found.domain_of[most]}" if found.shared else most
    return (
        f"Label skew is {skew_word(mean)}: to match the average of all {len(skew)} clients, a client would have to "
        f"change {mean:.0%} of its training labels on average. The most skewed is {who}, with {skew[most]:.0%}."
    )


def aligned_in_words(found: Diagnosis) -> list[str]:
    """How close representations are to the generator's, where the method has one."""
    if found.aligned is None:
        return []
    aligned = found.aligned
    each = aligned.mean.value / aligned.dimensions
    said = (
        f"In {found.name}, representations are {_word(each, NEAR)} the generator's q(z|y): the mean KL divergence is "
        f"{aligned.mean:,.0f} nats, {each:.2g} per dimension of z. A mean that is one standard deviation off gives 0.5."
    )
    if aligned.generator_interval is None:
        return [said]
    return [f"{said} The true class Gaussians are {aligned.generator_interval:,.0f} nats from the generator's."]


def change_of_distance(found: Diagnosis, other: Diagnosis) -> Interval:
    """How much further apart two domains are in the second, on average over pairs; the same images are resampled."""
    _check_same(found, other)
    value = other.apart.mean_pair.value - found.apart.mean_pair.value
    return interval(value, other.apart.pair_draws - found.apart.pair_draws)


def change_of_accuracy(found: Diagnosis, other: Diagnosis) -> Interval:
    """How much more accurate the second is, on average over domains, image by image."""
    _check_same(found, other)
    gains = {
        one.domain: (two.predicted == two.labels).astype(float) - (one.predicted == one.labels)
        for one, two in zip(found.seen, other.seen, strict=True)
    }
    return mean_of(gains, found.seed)


def _check_same(found: Diagnosis, other: Diagnosis) -> None:
    if found.domains != other.domains or any(
        not np.array_equal(one.labels, two.labels) for one, two in zip(found.views, other.views, strict=True)
    ):
        raise InputError(f"{found.name} and {other.name} were tested on different images, so they cannot be compared")


def _compared(found: Diagnosis, other: Diagnosis) -> list[str]:
    better = change_of_accuracy(found, other)
    points = better.scaled(100)
    accuracy = found.mean_accuracy.value, other.mean_accuracy.value
    gained = (
        f"Mean accuracy went from {accuracy[0]:.1%} to {accuracy[1]:.1%}: {points:+.1f} points on the same images, "
        f"{_chance(better)}."
    )
    if not (found.measured and other.measured):
        return [gained]
    further = change_of_distance(found, other)
    before, after = found.apart.pairs, other.apart.pairs
    came = sum(after[pair].value < before[pair].value for pair in before)
    count = "" if len(before) == 1 else f" {came} of {len(before)} pairs moved closer."
    return [
        f"From {found.name} to {other.name}, the mean distance between domains changed by {further:+.2f}, "
        f"{_chance(further)}.{count}",
        gained,
        _together(-_sign(further), _sign(better)),
    ]


def _together(closer: int, better: int) -> str:
    """The two changes in one sentence, each 1, -1, or 0 where it may be chance."""
    domains = {1: "domains are closer", 0: "distances changed within chance", -1: "domains are further apart"}
    model = {1: "the model is more accurate", 0: "accuracy changed within chance", -1: "the model is less accurate"}
    if closer == 1:
        helped = {1: "Alignment helped", 0: "Alignment worked, but accuracy did not follow"}
        lead = helped.get(better, "Alignment worked, at the cost of accuracy")
    else:
        no = "Alignment did not help" if min(closer, better) < 0 else "There is no sign that alignment helped"
        lead = "Accuracy rose, but not because of alignment" if better == 1 else no
    changes = f"{domains[closer]}, and {model[better]}" if closer or better else "both changes could be chance"
    return f"{lead}: {changes}. This is one seed only: `fedcir compare --seeds 0,1,2` runs several."


def _sign(change: Interval) -> int:
    return int(np.sign(change.value)) if change.beyond_chance else 0


def _chance(change: Interval) -> str:
    return "which is more than chance" if change.beyond_chance else "which could be chance"


def _word(value: float, words: Sequence[tuple[float, str]]) -> str:
    return next(word for below, word in words if value < below)
