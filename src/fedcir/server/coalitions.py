"""Heads of all coalitions of sites, from the sites' messages of FedCiROne."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations
from operator import add
from statistics import median

import torch

from fedcir.algorithms.fedcirone import FedCiROne, select_sums
from fedcir.client.head_bank import HeadBank
from fedcir.errors import InputError
from fedcir.machine import check_memory
from fedcir.models.closed_form import FeatureSums, LinearHead, RidgePath
from fedcir.models.site_statistics import StandardisedEncoder
from fedcir.types import OnProgress, Tensors

MAX_PLAYERS = 12
"""Most sites whose coalitions are all evaluated: 4,096."""
WORK = 1e12
"""Bound of the number of coalitions times the cube of the number of directions that their heads use."""

Members = tuple[int, ...]
"""Numbers of the sites of a coalition, ascending."""
WHAT = "solving heads of coalitions"


@dataclass(frozen=True)
class Message:
    """A client's message, and the keys under which the run's model may have statistics of it."""

    domain: str
    sums: Tensors
    keys: Sequence[int]


@dataclass(frozen=True)
class SiteSums:
    """The sums of a client's message, standardised as in the run's model."""

    domain: str
    train: FeatureSums
    validation: FeatureSums | None


@dataclass(frozen=True)
class Coalitions:
    """Sites whose sums can be added. A head of some is that of a run that only they join."""

    algorithm: FedCiROne
    sites: Sequence[SiteSums]

    def path(self, members: Members) -> RidgePath:
        sites = [self.sites[number] for number in members]
        parts = [site.train for site in sites]
        if self.algorithm.balance == "domains":
            totals = {site.domain: sum(s.train.total for s in sites if s.domain == site.domain) for site in sites}
            mean = sum(totals.values()) / len(totals)
            parts = [site.train * (mean / totals[site.domain]) for site in sites]
        return RidgePath(reduce(add, parts))

    def select_penalty(self, path: RidgePath, members: Members) -> float:
        """Choose the penalty on the validation sums of the members' domains, or by generalised cross-validation."""
        by_domain = {self.sites[number].domain: self.sites[number].validation for number in members}
        sums = [part for part in by_domain.values() if part is not None]
        return self.algorithm.select_penalty(path, reduce(add, sums) if sums else None)

    def project(self, basis: torch.Tensor) -> "Coalitions":
        """The same sites with features in a basis (F, D), to fit heads with given penalties."""
        sites = [replace(site, train=site.train.project(basis), validation=None) for site in self.sites]
        return replace(self, sites=sites)


def check_sites(count: int, features: int) -> None:
    """Refuse too few sites, or more than the memory holds."""
    if count < 2:
        raise InputError("worth compares sites, and this run has one client with training images: run it with more")
    check_memory(16 * features**2 * (count + 4), f"the sums of {count} clients of {features:,} features")


def standardise_messages(algorithm: FedCiROne, encoder: StandardisedEncoder, messages: Iterable[Message]) -> Coalitions:
    """Standardise the sums of messages as the run's model does; the first of a domain has its validation sums."""
    sites: list[SiteSums] = []
    held: dict[tuple[str, bytes], FeatureSums] = {}
    for message in messages:
        mean, scale = (values.double() for values in encoder.statistics(message.keys))
        train, validation = (
            FeatureSums.from_exact(select_sums(message.sums, part), len(mean)).standardise(mean, scale)
            if f"{part}_high" in message.sums
            else None
            for part in ("train", "validation")
        )
        assert train is not None
        if validation is not None:  # clients with equal statistics share their domain's
            validation = held.setdefault((message.domain, mean.numpy().tobytes()), validation)
        sites.append(SiteSums(message.domain, train, validation))
    return Coalitions(algorithm, sites)


def list_coalitions(count: int) -> tuple[list[Members], list[Members]]:
    """List the coalitions of sites whose heads use all features, and those in between.

    The first are single sites, all but one, and all; the others are all others of up to MAX_PLAYERS sites.
    """
    everyone = tuple(range(count))
    rests = [everyone[:number] + everyone[number + 1 :] for number in everyone]
    exact = list(dict.fromkeys([*((number,) for number in everyone), *rests, everyone]))
    sizes = range(2, count - 1) if count <= MAX_PLAYERS else ()
    return exact, [members for size in sizes for members in combinations(everyone, size)]


def solve_heads(coalitions: Coalitions, on_work: OnProgress) -> HeadBank:
    """Fit the heads of `list_coalitions`; between its two lists, the mean of the others' own heads for each site."""
    count, algorithm = len(coalitions.sites), coalitions.algorithm
    exact, between = list_coalitions(count)
    heads: dict[Members, LinearHead] = {}
    penalties: dict[int, list[float]] = {}
    for members in exact:
        path = coalitions.path(members)
        penalty = coalitions.select_penalty(path, members)
        heads[members] = algorithm.fit_head(path, penalty)
        penalties.setdefault(len(members), []).append(penalty)
        on_work(len(heads), len(exact) + len(between), what=WHAT)
    alone = [heads[number,] for number in range(count)]
    averaged = [average_heads([head for other, head in enumerate(alone) if other != site]) for site in range(count)]
    basis = None
    if between:
        directions = int((WORK / len(between)) ** (1 / 3))
        if directions < len(path.mean):  # the path is that of everyone
            basis = path.eigen[1][:, -directions:]
            coalitions = coalitions.project(basis)
        # From one site to all but one, the logarithm of the penalty is linear in that of the number of sites.
        first, last = (math.log(median(penalties[size])) for size in (1, count - 1))
        slope = (last - first) / math.log(count - 1)
    others: list[LinearHead] = []
    for members in between:
        penalty = math.exp(first + slope * math.log(len(members)))
        others.append(algorithm.fit_head(coalitions.path(members), penalty, once=True))
        on_work(len(exact) + len(others), len(exact) + len(between), what=WHAT)
    return HeadBank.from_heads([*heads.values(), *averaged], others, basis)


def average_heads(heads: Sequence[LinearHead]) -> LinearHead:
    weights, biases = [head.weight for head in heads], [head.bias for head in heads]
    return LinearHead(torch.stack(weights).mean(0), torch.stack(biases).mean(0))


def name_sites(clients: Sequence[tuple[int, str]]) -> dict[int, str]:
    """Name clients, given as number and domain, by their domain, or by their number too if they share it."""
    domains = [domain for _, domain in clients]
    return {number: domain if domains.count(domain) == 1 else f"{number} ({domain})" for number, domain in clients}
