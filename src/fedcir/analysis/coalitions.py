"""Heads of all coalitions of sites, from the sites' messages of FedCiROne, and their results on the test images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations
from operator import add
from statistics import median

import numpy as np
import torch
from torch import Tensor

from fedcir.algorithms.fedcirone import FedCiROne, select_sums, site_keys
from fedcir.analysis.contribution import COLUMNS, SiteWorth, Values, paired_interval, shapley_values
from fedcir.data.federation import Federation
from fedcir.errors import InputError
from fedcir.inference.evaluation import wilson_interval
from fedcir.machine import check_memory
from fedcir.models.closed_form import FeatureSums, LinearHead, RidgePath
from fedcir.runs.reader import RestoredModel
from fedcir.runs.statistics import Interval, bootstrap_mean
from fedcir.types import OnProgress

MAX_PLAYERS = 12
"""Most sites whose coalitions are all evaluated: 4,096."""
WORK = 1e12
"""Bound of the number of coalitions times the cube of the number of directions that their heads use."""

Members = tuple[int, ...]
"""Numbers of the sites of a coalition, ascending."""
WHAT = "solving heads of coalitions"


@dataclass(frozen=True)
class Site:
    """A client with training data: the sums of its message, standardised as in the run's model."""

    name: str
    domain: str
    train: FeatureSums
    validation: FeatureSums | None
    rows: slice
    """Its test images among those of all sites."""


@dataclass(frozen=True)
class Coalitions:
    """Sites whose sums can be added, and their test images. A head of some is that of a run that only they join."""

    algorithm: FedCiROne
    sites: Sequence[Site]
    features: Tensor  # (N, F), of the test images, standardised by their sites
    labels: Tensor  # (N,)

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

    def find_hits(self, head: LinearHead) -> Values:
        """Classify all test images: 1 where a head is right, else 0 (N,)."""
        logits = self.features @ head.weight.float().T + head.bias.float()
        return np.asarray((logits.argmax(1) == self.labels).numpy(), np.float32)

    def project(self, basis: Tensor) -> "Coalitions":
        """The same sites with features in a basis (F, D), to fit heads with given penalties."""
        sites = [replace(site, train=site.train.project(basis), validation=None) for site in self.sites]
        return replace(self, sites=sites, features=self.features @ basis.float())


@torch.no_grad()
def collect_messages(restored: RestoredModel, algorithm: FedCiROne, federation: Federation) -> Coalitions:
    """Compute the message of every client that trains, and the features of its test images."""
    trainer, features = restored.trainer, len(restored.received["model"]["encoder.mean"])
    clients = [federation.clients[number] for number in federation.trainers]
    if len(clients) < 2:
        raise InputError("worth compares sites, and this run has one client with training images: run it with more")
    check_memory(16 * features**2 * (len(clients) + 4), f"the sums of {len(clients)} clients of {features:,} features")
    encoder, domains = trainer.modules["model"].encoder, [client.domain for client in clients]
    sites: list[Site] = []
    tested: dict[tuple[str, bytes], tuple[slice, FeatureSums | None]] = {}
    inputs, labels = [torch.zeros(0, features)], [torch.zeros(0, dtype=torch.int64)]
    for client in clients:
        ctx = restored.load(client)
        sums = algorithm.local_summary(trainer.modules, trainer.iterate_batches(client.train), ctx)["sums"]
        mean, scale = encoder.statistics(site_keys(ctx))
        parts = {
            part: FeatureSums.from_exact(select_sums(sums, part), features).standardise(mean.double(), scale.double())
            for part in (("train", "validation") if ctx.validation else ("train",))
        }
        key = client.domain, mean.numpy().tobytes() + scale.numpy().tobytes()
        if key not in tested:  # clients with equal statistics have equal features of their domain's images
            if client.test is None or not len(client.test):
                raise InputError(f"{client.domain} has no test images to measure on: set data.test_fraction, run again")
            start = sum(map(len, labels))
            for x, y in trainer.iterate_batches(client.test):
                inputs.append(encoder(x, site_keys(ctx)))
                labels.append(y)
            tested[key] = slice(start, sum(map(len, labels))), parts.get("validation")
        rows, validation = tested[key]
        name = client.domain if domains.count(client.domain) == 1 else f"{client.id} ({client.domain})"
        sites.append(Site(name, client.domain, parts["train"], validation, rows))
    return Coalitions(algorithm, sites, torch.cat(inputs), torch.cat(labels))


def average_heads(heads: Sequence[LinearHead]) -> LinearHead:
    weights, biases = [head.weight for head in heads], [head.bias for head in heads]
    return LinearHead(torch.stack(weights).mean(0), torch.stack(biases).mean(0))


@dataclass(frozen=True)
class CoalitionHits:
    """Results of the heads of coalitions on all test images."""

    hits: dict[Members, Values]  # (N,), 0 or 1; of nobody, the chance of a guess
    averaged: list[Values]
    """Of the mean of the other sites' own heads, by site."""
    directions: int
    """Number of directions of the features that the heads of 2 to all but 2 sites use."""

    @property
    def everyone(self) -> Members:
        return tuple(range(len(self.averaged)))

    def without(self, number: int) -> Members:
        return tuple(other for other in self.everyone if other != number)

    @property
    def has_all(self) -> bool:
        return len(self.hits) == 1 << len(self.everyone)

    def contributions(self) -> Values:
        """Contribution of each site to the hits (sites, N): Shapley values, or what is lost without the site."""
        if not self.has_all:
            return np.array([self.hits[self.everyone] - self.hits[self.without(n)] for n in self.everyone])
        groups = (tuple(n for n in self.everyone if number >> n & 1) for number in range(len(self.hits)))
        return shapley_values([self.hits[members] for members in groups])


def solve_coalitions(coalitions: Coalitions, on_work: OnProgress) -> CoalitionHits:
    """Fit and test the heads of single sites, of all but one, of all, and up to MAX_PLAYERS sites of all coalitions."""
    everyone = tuple(range(len(coalitions.sites)))
    count, algorithm = len(everyone), coalitions.algorithm
    rests = [everyone[:number] + everyone[number + 1 :] for number in everyone]
    exact = list(dict.fromkeys([*((number,) for number in everyone), *rests, everyone]))
    sizes = range(2, count - 1) if count <= MAX_PLAYERS else ()
    between = [members for size in sizes for members in combinations(everyone, size)]
    heads: dict[Members, LinearHead] = {}
    penalties: dict[int, list[float]] = {}
    for members in exact:
        path = coalitions.path(members)
        penalty = coalitions.select_penalty(path, members)
        heads[members] = algorithm.fit_head(path, penalty)
        penalties.setdefault(len(members), []).append(penalty)
        on_work(len(heads), len(exact) + len(between), what=WHAT)
    hits = {members: coalitions.find_hits(head) for members, head in heads.items()}
    averaged = [coalitions.find_hits(average_heads([heads[(number,)] for number in rest])) for rest in rests]
    directions = len(path.mean)  # the path is that of everyone
    if between:
        directions = min(directions, int((WORK / len(between)) ** (1 / 3)))
        if directions < len(path.mean):
            coalitions = coalitions.project(path.eigen[1][:, -directions:])
        # From one site to all but one, the logarithm of the penalty is linear in that of the number of sites.
        first, last = (math.log(median(penalties[size])) for size in (1, count - 1))
        slope = (last - first) / math.log(count - 1)
    for members in between:
        penalty = math.exp(first + slope * math.log(len(members)))
        hits[members] = coalitions.find_hits(algorithm.fit_head(coalitions.path(members), penalty, once=True))
        on_work(len(hits), len(exact) + len(between), what=WHAT)
    if count <= MAX_PLAYERS:
        hits[()] = np.full(len(coalitions.labels), 1 / len(path.shares))
    return CoalitionHits(hits, averaged, directions)


def compare_sites(coalitions: Coalitions, results: CoalitionHits) -> tuple[list[SiteWorth], dict[str, Interval]]:
    """Compare the models at each site, and over domains. Domains count alike, and so do the sites of a domain."""
    sites, contributions, hits = coalitions.sites, results.contributions(), results.hits
    rows: dict[str, dict[int, slice]] = {}  # of each domain's images, as often as sites standardise them differently
    for site in sites:
        rows.setdefault(site.domain, {})[site.rows.start] = site.rows
    table = []
    by_domain: dict[str, dict[str, list[Values]]] = {name: {d: [] for d in rows} for name in (*COLUMNS, "gain")}
    for number, site in enumerate(sites):
        models = (hits[(number,)], results.averaged[number], hits[results.without(number)], hits[results.everyone])
        at_site = {name: model[site.rows] for name, model in zip(COLUMNS, models, strict=True)}
        accuracies = {name: wilson_interval(int(values.sum()), len(values)) for name, values in at_site.items()}
        at_site["gain"] = at_site["together"] - at_site["alone"]
        for name, values in at_site.items():
            by_domain[name][site.domain].append(values)
        shares = {d: np.mean([contributions[number, part] for part in parts.values()], 0) for d, parts in rows.items()}
        worth = {"gain": paired_interval(at_site["gain"]), "contribution": bootstrap_mean(shares)}
        table.append(SiteWorth(site.name, round(site.train.total), len(at_site["gain"]), **accuracies, **worth))
    means = {name: {d: np.mean(v, 0) for d, v in domains.items()} for name, domains in by_domain.items()}
    return table, {name: bootstrap_mean(values) for name, values in means.items()}
