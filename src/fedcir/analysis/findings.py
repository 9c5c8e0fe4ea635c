"""Describe a diagnosis in sentences, each with the numbers that support it."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedcir.analysis.diagnosis import Diagnosis
from fedcir.data.columns import ColumnComparison
from fedcir.errors import InputError
from fedcir.runs.statistics import Interval, bootstrap_mean, percentile_interval

SHIFT = ((0.5, "small"), (1.2, "moderate"), (2.01, "large"))
"""Upper ends of the grades of a mean proxy A-distance."""
SKEW = ((0.1, "small"), (0.3, "moderate"), (1.01, "large"))
"""Upper ends of the grades of a mean total variation between label distributions."""
MOST_TARGETS = 6
"""Most numbers on targets that are described in sentences."""
ALIGNMENT = ((0.1, "close to"), (0.5, "some way from"), (float("inf"), "far from"))
"""Grades of a KL in nats per dimension of z; a mean that is one standard deviation off gives 0.5."""


def grade_shift(distance: float) -> str:
    """Grade a mean proxy A-distance between domains as small, moderate or large."""
    return _grade(distance, SHIFT)


def grade_skew(skew: float) -> str:
    """Grade a mean label skew as small, moderate or large."""
    return _grade(skew, SKEW)


def verdict(diagnosis: Diagnosis, compared: Diagnosis | None = None) -> list[str]:
    """Describe one diagnosis, and what changed from it to a second run on the same data."""
    sentences = describe_shift(diagnosis)
    if diagnosis.is_run:
        worst = min(diagnosis.predictions, key=lambda domain: domain.accuracy).domain
        name = f"{worst}, which no client trains on" if worst in diagnosis.unseen else worst
        sentences.append(f"The model is least accurate on {name}: {diagnosis.accuracy[worst]:.1%}.")
    if diagnosis.bound is not None:
        sentences.append(
            f"The average risk of the global model is {diagnosis.bound.global_risk_interval:.3f}. It replaces the "
            "first term of the paper's bound, the average risk of the local models, which a run does not keep. The "
            f"second term, the mean distance to the mixture, is {diagnosis.bound.divergence_interval:.2f}."
        )
    sentences += describe_alignment(diagnosis)
    if compared is not None:
        sentences += [*describe_alignment(compared), *_compare_runs(diagnosis, compared)]
    return sentences


def describe_shift(diagnosis: Diagnosis) -> list[str]:
    """Describe feature shift between domains and label skew between clients."""
    if not diagnosis.measured:
        return [_describe_skew(diagnosis)]
    shift, furthest = diagnosis.divergences.mean_pair, diagnosis.furthest
    encoder = f"the model of {diagnosis.name}" if diagnosis.is_run else diagnosis.encoder
    under = f"under {encoder}, " if encoder else ""
    measure = "Feature shift" if diagnosis.is_shift else "The distance of representations"
    sentences = [
        f"{measure} is {grade_shift(shift.value)}: {under}the mean proxy A-distance between two domains "
        f"is {shift:.2f}. At 0 a classifier cannot tell two domains apart; at 2 it always can.",
        _describe_skew(diagnosis),
        f"{furthest} is furthest from the mixture of all domains: {diagnosis.divergences.to_mixture[furthest]:.2f}.",
    ]
    if (skew := max(diagnosis.test_skew.values(), default=0.0)) >= SKEW[0][0]:
        sentences.append(
            f"The measured {diagnosis.noun}s also differ in their labels, by up to {skew:.0%}: "
            f"part of the distance comes from the labels and not from the {diagnosis.noun}s."
        )
    return [*sentences, *describe_columns(diagnosis.columns)]


def describe_columns(columns: Sequence[ColumnComparison]) -> list[str]:
    """Name the columns of tables in which a site differs most from the others."""
    furthest = sorted((column for column in columns if len(column.distances) > 1), key=lambda c: -c.largest)[:3]
    if not furthest:
        return []
    places = [(c.name, max(c.distances, key=lambda site: c.distances[site]), c.largest) for c in furthest]
    names = "; ".join(f"{name} at {site} ({distance:.2f})" for name, site, distance in places)
    return [f"Columns in which a site differs most from the others, from 0 to 1: {names}."]


def describe_targets(targets: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Describe how the targets of tasks without classes differ between domains."""
    sentences = []
    for name in list(next(iter(targets.values()), {}))[:MOST_TARGETS]:
        values = {domain: summary[name] for domain, summary in targets.items()}
        low, high = min(values, key=lambda d: values[d]), max(values, key=lambda d: values[d])
        sentences.append(f"{name} ranges from {values[low]:.4g} ({low}) to {values[high]:.4g} ({high}).")
    return sentences


def _describe_skew(diagnosis: Diagnosis) -> str:
    if diagnosis.targets:
        return f"Targets: {' '.join(describe_targets(diagnosis.targets))}"
    skew = diagnosis.skew
    if len(skew) == 1:
        return f"There is no label skew: {next(iter(skew))} is the only client that trains."
    most = max(skew, key=lambda name: skew[name])
    if skew[most] < 0.005:
        return "There is no label skew: all clients hold the classes in the same shares."
    mean = float(np.mean(list(skew.values())))
    name = f"client {most} of {diagnosis.client_domains[most]}" if diagnosis.shared else most
    return (
        f"Label skew is {grade_skew(mean)}: to match the average of all {len(skew)} clients, a client would have to "
        f"change {mean:.0%} of its training labels on average. The most skewed is {name}, with {skew[most]:.0%}."
    )


def describe_alignment(diagnosis: Diagnosis) -> list[str]:
    """Describe how close representations are to the generator's Gaussians, if the method has a generator."""
    if (alignment := diagnosis.alignment) is None:
        return []
    per_dimension = alignment.mean.value / alignment.dimensions
    text = (
        f"In {diagnosis.name}, representations are {_grade(per_dimension, ALIGNMENT)} the generator's q(z|y): the mean "
        f"KL divergence is {alignment.mean:,.0f} nats, {per_dimension:.2g} per dimension of z. A mean that is one "
        "standard deviation off gives 0.5."
    )
    if alignment.generator_interval is None:
        return [text]
    return [f"{text} The true class Gaussians are {alignment.generator_interval:,.0f} nats from the generator's."]


def change_of_distance(before: Diagnosis, after: Diagnosis) -> Interval:
    """Measure the change of the mean distance over pairs, with the same images in each resample."""
    _check_same_images(before, after)
    value = after.divergences.mean_pair.value - before.divergences.mean_pair.value
    return percentile_interval(value, after.divergences.pair_draws - before.divergences.pair_draws)


def change_of_accuracy(before: Diagnosis, after: Diagnosis) -> Interval:
    """Measure the change of the mean accuracy over domains, paired by image."""
    _check_same_images(before, after)
    pairs = zip(before.seen, after.seen, strict=True)
    return bootstrap_mean({a.domain: b.is_correct.astype(float) - a.is_correct for a, b in pairs}, before.seed)


def _check_same_images(before: Diagnosis, after: Diagnosis) -> None:
    pairs = zip(before.predictions, after.predictions, strict=False)
    if before.domains != after.domains or any(not np.array_equal(a.labels, b.labels) for a, b in pairs):
        raise InputError(f"{before.name} and {after.name} were tested on different images, so they cannot be compared")


def _compare_runs(before: Diagnosis, after: Diagnosis) -> list[str]:
    gain = change_of_accuracy(before, after)
    accuracies = f"from {before.mean_accuracy.value:.1%} to {after.mean_accuracy.value:.1%}"
    accuracy = (
        f"Mean accuracy went {accuracies}: {gain.scaled(100):+.1f} points on the same images, {_describe_chance(gain)}."
    )
    if not (before.measured and after.measured):
        return [accuracy]
    change = change_of_distance(before, after)
    pairs = before.divergences.pairs
    closer = sum(after.divergences.pairs[pair].value < pairs[pair].value for pair in pairs)
    count = "" if len(pairs) == 1 else f" {closer} of {len(pairs)} pairs moved closer."
    return [
        f"From {before.name} to {after.name}, the mean distance between domains changed by {change:+.2f}, "
        f"{_describe_chance(change)}.{count}",
        accuracy,
        _conclude(-_sign(change), _sign(gain)),
    ]


def _conclude(closer: int, better: int) -> str:
    """Conclude from both changes, each 1, -1, or 0 if it could be chance."""
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


def _describe_chance(change: Interval) -> str:
    return "which is more than chance" if change.beyond_chance else "which could be chance"


def _grade(value: float, grades: Sequence[tuple[float, str]]) -> str:
    return next(word for upper, word in grades if value < upper)
