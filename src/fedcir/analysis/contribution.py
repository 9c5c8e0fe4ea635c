"""What each site of a federation gains from it and contributes to it.

A contribution is a Shapley value (L. S. Shapley, 1953, A value for n-person games): the mean gain that a site brings,
over all orders in which the sites can join.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri

from fedcir.algorithms.fedcirone import FedCiROne, site_key, site_keys
from fedcir.client.head_bank import collect_features
from fedcir.data.federation import Federation
from fedcir.data.manifest import count_names
from fedcir.errors import InputError
from fedcir.inference.evaluation import wilson_interval
from fedcir.runs.reader import RestoredModel, Run
from fedcir.runs.statistics import LEVEL, Interval, bootstrap_mean
from fedcir.runtime.stored_sums import load_hits
from fedcir.server.coalitions import (
    MAX_PLAYERS,
    Members,
    Message,
    check_sites,
    list_coalitions,
    name_sites,
    solve_heads,
    standardise_messages,
)
from fedcir.types import OnProgress

MARGIN = 0.01
"""A site loses nothing if the interval of its gain begins at minus one point or above."""
COLUMNS = ("alone", "averaged", "others", "together")
"""Models that are compared at a site: fields of SiteWorth."""

Values = NDArray[np.floating]


def shapley_weights(players: int) -> Values:
    """Weights (P, 2^P) by which the values of all coalitions add up to each player's Shapley value.

    The bits of a coalition's number are its members.
    """
    numbers = np.arange(1 << players)
    is_member = (numbers >> np.arange(players)[:, None] & 1).astype(bool)  # (P, 2^P)
    sizes = is_member.sum(0)
    joins = np.array([1 / (players * math.comb(players - 1, size)) for size in range(players)] + [0.0])
    weights: Values = np.where(is_member, joins[sizes - 1], -joins[sizes])
    return weights


def shapley_values(values: Sequence[Any]) -> Values:
    """Shapley values (P, ...) of a game from the value (...) of every coalition, in the order of their numbers."""
    weights = shapley_weights(len(values).bit_length() - 1)
    total = np.zeros((len(weights), *np.shape(values[0])))
    for column, value in zip(weights.T, values, strict=True):
        total += np.multiply.outer(column, value)
    return total


def paired_interval(differences: Values) -> Interval:
    """Mean of paired differences of hits, each -1, 0 or 1, with an interval that holds for few images too.

    D. G. Bonett, R. M. Price, 2012, Adjusted Wald confidence interval for a difference of binomial proportions based
    on paired data: it adds an image with 1 and one with -1.
    """
    value, count = float(differences.mean()), len(differences) + 2
    centre, squares = float(differences.sum()) / count, (float(np.square(differences).sum()) + 2) / count
    half = float(ndtri((1 + LEVEL) / 2)) * math.sqrt((squares - centre**2) / count)
    return Interval(value, max(-1.0, min(value, centre - half)), min(1.0, max(value, centre + half)))


@dataclass(frozen=True)
class TestedSite:
    """A client with training data, and where its test images are among those of all sites."""

    name: str
    domain: str
    images: int
    """Training images."""
    rows: slice


@dataclass(frozen=True)
class CoalitionHits:
    """Results of the heads of coalitions on all test images."""

    sites: Sequence[TestedSite]
    hits: Mapping[Members, Values]  # (N,), 0 or 1; of nobody, the chance of a guess
    averaged: Sequence[Values]
    """Of the mean of the other sites' own heads, by site."""
    features: int
    directions: int
    """Number of directions of the features that the heads of 2 to all but 2 sites use."""

    @classmethod
    def of(cls, sites: Sequence[TestedSite], values: Values, classes: int, features: int, directions: int) -> Self:
        """Name the results (H, N) of the heads of `solve_heads` by their coalitions."""
        exact, between = list_coalitions(len(sites))
        whole, averaged, others = np.split(values.astype(np.float32), [len(exact), len(exact) + len(sites)])
        hits = {**dict(zip(exact, whole, strict=True)), **dict(zip(between, others, strict=True))}
        if len(sites) <= MAX_PLAYERS:
            hits[()] = np.full(values.shape[1], 1 / classes)
        return cls(sites, hits, list(averaged), features, directions)

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


@dataclass(frozen=True)
class SiteWorth:
    """Accuracies on the test images of one site, its gain from the federation and its contribution to it."""

    site: str
    images: int
    """Training images."""
    tested: int
    """Test images."""
    alone: Interval
    """Accuracy of the head from the site's own sums."""
    averaged: Interval
    """Accuracy of the mean of the other sites' own heads, as model averaging makes it."""
    others: Interval
    """Accuracy of the head from the sums of the others: of a federation that this site never joined."""
    together: Interval
    """Accuracy of the head from the sums of all."""
    gain: Interval
    """`together` minus `alone`, paired by image."""
    contribution: Interval
    """Part of the mean accuracy of the federation that is due to this site."""

    @property
    def verdict(self) -> str:
        points = self.gain.scaled(100)
        if self.gain.beyond_chance:
            lost = Interval(-points.value, -points.high, -points.low)
            does, change = ("gains", points) if points.value > 0 else ("loses", lost)
            return f"{does} {change.value:.1f} points ({change.low:.1f} to {change.high:.1f}) from federating"
        difference = f"{points.value:+.1f} points ({points.low:+.1f} to {points.high:+.1f})"
        if self.gain.low >= -MARGIN:
            return f"loses nothing from federating: {difference}"
        return f"cannot be told from {self.tested:,} test images: {difference}"


@dataclass(frozen=True)
class Worth:
    """Whether federating is worth it for the sites of a run, and the files that were written."""

    name: str
    dataset: str
    sites: tuple[SiteWorth, ...]
    means: Mapping[str, Interval]
    """Means over domains of COLUMNS and of `gain`."""
    is_shapley: bool
    """Whether contributions are Shapley values, or what the mean accuracy loses without the site."""
    notes: tuple[str, ...] = ()
    page: Path | None = None
    numbers: Path | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.name,
            "dataset": self.dataset,
            "contribution": "shapley" if self.is_shapley else "leave_one_out",
            "means": {name: asdict(interval) for name, interval in self.means.items()},
            "sites": {row.site: {**asdict(row), "verdict": row.verdict} for row in self.sites},
            "notes": list(self.notes),
        }


@torch.no_grad()
def measure_coalitions(
    restored: RestoredModel, algorithm: FedCiROne, federation: Federation, on_work: OnProgress
) -> CoalitionHits:
    """Compute the message of every client that trains, and test the heads of all coalitions on their test images."""
    trainer, features = restored.trainer, len(restored.received["model"]["encoder.mean"])
    clients = [federation.clients[number] for number in federation.trainers]
    check_sites(len(clients), features)
    encoder = trainer.modules["model"].encoder
    names = name_sites([(client.id, client.domain) for client in clients])
    sites: list[TestedSite] = []
    messages: list[Message] = []
    tested: dict[tuple[str, bytes], slice] = {}
    inputs, labels = [torch.zeros(0, features)], [torch.zeros(0, dtype=torch.int64)]
    for client in clients:
        ctx = restored.load(client)
        sums = algorithm.local_summary(trainer.modules, trainer.iterate_batches(client.train), ctx)["sums"]
        messages.append(Message(client.domain, sums, site_keys(ctx)))
        key = client.domain, encoder.statistics(site_keys(ctx))[0].numpy().tobytes()
        if key not in tested:  # clients with equal statistics have equal features of their domain's images
            if client.test is None or not len(client.test):
                raise InputError(f"{client.domain} has no test images to measure on: set data.test_fraction, run again")
            x, y = collect_features(trainer, client.test, ctx)
            start = sum(map(len, labels))
            tested[key] = slice(start, start + len(y))
            inputs.append(x)
            labels.append(y)
        sites.append(TestedSite(names[client.id], client.domain, len(client.train or ()), tested[key]))
    bank = solve_heads(standardise_messages(algorithm, encoder, messages), on_work)
    hits = bank.find_hits(torch.cat(inputs), torch.cat(labels)).numpy()
    return CoalitionHits.of(sites, hits, trainer.task.outputs, features, bank.directions)


def read_coalitions(run: Run) -> CoalitionHits:
    """Read what the clients of a run replied about the heads of all coalitions."""
    members, bits, *widths = load_hits(run.path)
    clients = {client["id"]: client for client in run.manifest["clients"]}
    names = name_sites([(number, clients[number]["domain"]) for number in members])
    keys, domains = run.weights()["encoder.site_keys"].tolist(), Counter(clients[n]["domain"] for n in members)
    for number in members:
        domain = clients[number]["domain"]
        if domains[domain] > 1 and site_key("client", domain, number) in keys:
            reason = f"standardises the images of {domain!r} for each client, but one client tested the heads for all"
            raise InputError(f"{run.path} {reason}: give data_root")
    rows: dict[str, slice] = {}
    parts: list[Values] = []
    sites: list[TestedSite] = []
    for number in members:
        client, domain = clients[number], clients[number]["domain"]
        if domain not in bits:
            raise InputError(f"{domain} did not test the heads of {run.path}: give data_root, or run again")
        if domain not in rows:
            tested = client["test"] if "test" in client else len(run.manifest["test"][domain])
            start = sum(part.shape[1] for part in parts)
            rows[domain] = slice(start, start + tested)
            parts.append(np.unpackbits(bits[domain].numpy(), axis=1, count=tested).astype(np.float32))
        sites.append(TestedSite(names[number], domain, count_names(client["train"]), rows[domain]))
    return CoalitionHits.of(sites, np.concatenate(parts, axis=1), len(run.card["classes"]), *widths)


def compare_sites(results: CoalitionHits) -> tuple[list[SiteWorth], dict[str, Interval]]:
    """Compare the models at each site, and over domains. Domains count alike, and so do the sites of a domain."""
    sites, contributions, hits = results.sites, results.contributions(), results.hits
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
        table.append(SiteWorth(site.name, site.images, len(at_site["gain"]), **accuracies, **worth))
    means = {name: {d: np.mean(v, 0) for d, v in domains.items()} for name, domains in by_domain.items()}
    return table, {name: bootstrap_mean(values) for name, values in means.items()}
