"""Cohorts, the epsilon of a run by Opacus' accountant of Renyi differential privacy, and the count of releases."""

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from fedcir.config import Config, LocalConfig, PrivacyConfig
from fedcir.data.federation import Roster
from fedcir.errors import InputError
from fedcir.files import add_checksum, check_regular_file, explain_read_errors, verify_checksum, write_file
from fedcir.rng import numpy_rng

ORDERS = (1.01, 1.02, 1.05, *(1 + tenth / 10 for tenth in range(1, 100)), *range(11, 65), 80, 96, 128, 192, 256, 512)
"""Renyi orders to search: any of them gives a valid epsilon, and the best of them is taken."""


Adjacency = Literal["zero-out", "replace-one"]
"""Difference between two adjacent runs: in one of them a unit counts as nothing, or has other data."""

SENSITIVITY: dict[Adjacency, float] = {"zero-out": 1.0, "replace-one": 2.0}
"""How far one unit moves a sum of clipped vectors, in multiples of the clip."""


@dataclass(frozen=True)
class Accountant:
    """Accountant of a Gaussian mechanism on a sum of clipped vectors."""

    noise: float
    """Standard deviation of the noise, in multiples of the clip."""
    delta: float
    rate: float = 1.0
    """Probability that a unit takes part in a step, each by a draw of its own (Poisson sampling)."""
    adjacency: Adjacency = "zero-out"

    def epsilon(self, steps: int) -> float:
        """Epsilon after `steps` noised sums."""
        return composed_epsilon([(self, steps)], self.delta)

    def divergences(self, steps: int) -> NDArray[np.float64]:
        """Renyi divergences by order after `steps` noised sums."""
        return steps * _step_divergences(self.noise / SENSITIVITY[self.adjacency], self.rate)


def composed_epsilon(releases: Iterable[tuple[Accountant, int]], delta: float) -> float:
    """Epsilon of several Gaussian mechanisms together, each with its number of noised sums.

    That of a single noised sum without sampling is exact.
    If a mechanism protects a whole client and another one image, epsilon is that of one image.
    """
    begun = [(accountant, steps) for accountant, steps in releases if steps]
    if not begun:
        return 0.0
    if len(begun) == 1 and begun[0][1] == 1 and begun[0][0].rate == 1:
        return min(_renyi_epsilon(begun, delta), _exact_epsilon(begun[0][0], delta))
    return _renyi_epsilon(begun, delta)


def _exact_epsilon(accountant: Accountant, delta: float) -> float:
    """Epsilon of one noised sum (Balle and Wang, ICML 2018, https://arxiv.org/abs/1805.06530); infinite if large."""
    from opacus.accountants.analysis import gdp

    mu = SENSITIVITY[accountant.adjacency] / accountant.noise
    if gdp.delta_eps_mu(eps=0.0, mu=mu) <= delta:
        return 0.0
    return float(gdp.eps_from_mu(mu=mu, delta=delta)) if mu < 20 else math.inf


def _renyi_epsilon(releases: Iterable[tuple[Accountant, int]], delta: float) -> float:
    divergences = [accountant.divergences(steps) for accountant, steps in releases]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # at an end of ORDERS epsilon is not the tightest, but valid
        epsilon, _ = _analysis().get_privacy_spent(orders=ORDERS, rdp=np.sum(divergences, axis=0), delta=delta)
    return float(epsilon)


def get_adjacency(privacy: PrivacyConfig) -> Adjacency:
    """Adjacency that the epsilon of these settings refers to.

    Who receives the upload of a client knows that the client took part. So leaving the client out is no secret that
    the noise could keep, and only its data can be protected: they are replaced.
    """
    return "replace-one" if privacy.by_clients else "zero-out"


def server_epsilon(privacy: PrivacyConfig, rate: float, rounds: int) -> float:
    """Epsilon of the models that the server gives out (`unit=client`, `place=server`), after `rounds` rounds.

    `rate` is the probability with which a client takes part in a round; nobody but the server may learn who did.
    """
    return Accountant(privacy.noise, privacy.delta, rate, get_adjacency(privacy)).epsilon(rounds)


def upload_epsilon(
    privacy: PrivacyConfig, local: LocalConfig, images: int, rounds: int, one_shot: bool = False
) -> float:
    """Epsilon of one client's uploads towards the server, after the client took part in `rounds` rounds.

    A client can compute it without the server. Where the server adds the noise, uploads have no bound. Sampling of
    clients never counts, since the server knows who took part. `images` is the client's number of training images.
    """
    if not privacy.noise or privacy.by_server:
        return math.inf if rounds else 0.0
    accountant, steps = upload_accountant(privacy, local, images, one_shot)
    return accountant.epsilon(rounds * steps)


def upload_accountant(
    privacy: PrivacyConfig, local: LocalConfig, images: int, one_shot: bool = False
) -> tuple[Accountant, int]:
    """Accountant of the noise that a client adds to its uploads, and the number of noised sums in one upload.

    With a `one_shot` method, an upload is one noised sum over all images instead of steps.
    """
    if privacy.by_clients or one_shot:
        return Accountant(privacy.noise, privacy.delta, adjacency=get_adjacency(privacy)), 1
    rate = min(1.0, local.batch_size / images)
    return Accountant(privacy.noise, privacy.delta, rate, get_adjacency(privacy)), local.steps


@cache
def _step_divergences(noise: float, rate: float) -> NDArray[np.float64]:
    """Renyi divergences by order, which add up over steps."""
    return _analysis().compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=ORDERS)  # type: ignore[no-any-return]


def _analysis() -> Any:
    try:
        from opacus.accountants.analysis import rdp
    except ImportError:
        raise InputError("privacy.noise needs Opacus' accountant: pip install 'fedcir[privacy]'") from None
    return rdp


class ReleaseCount(TypedDict):
    """The content of a file of releases."""

    begun: int
    run: str


@dataclass(frozen=True)
class ReleaseCounter:
    """Count of the rounds that a deployment has begun, in a file with a checksum.

    A round that is repeated after a crash gets fresh noise, and may get other replies. So it counts again.
    """

    path: Path
    run: str
    """Identity of the run that the count belongs to."""

    def start(self) -> None:
        """Begin at 0."""
        self._write(0)

    def add(self) -> None:
        self._write((self.count() if self.path.exists() else 0) + 1)

    def count(self) -> int:
        """Rounds begun so far. A file that is missing, damaged or of another run is an error."""
        fix = "restore it, or start anew in another folder: without it, epsilon would be too small"
        with explain_read_errors(self.path, fix):
            data = check_regular_file(self.path).read_bytes()
            if data == b"." * len(data):  # as earlier versions wrote it
                return len(data)
            saved: ReleaseCount = verify_checksum(json.loads(data), ReleaseCount, "releases")
            if saved["run"] != self.run:
                raise InputError("it belongs to another run")
        return saved["begun"]

    def _write(self, begun: int) -> None:
        write_file(self.path, json.dumps(add_checksum({"begun": begun, "run": self.run})) + "\n")


def sample_cohort(trainers: Sequence[int], active: int, seed: int, round: int, absent: Sequence[int] = ()) -> list[int]:
    """The clients of a round, in ascending order.

    Absent clients are drawn like the others and then replaced, so that a round without them has the same clients.
    """
    if active == len(trainers):
        return sorted(trainers)
    rng = numpy_rng(seed, "cohort", round)
    ordered = trainers if isinstance(trainers, range) else sorted(trainers)
    everyone = sorted((*trainers, *absent)) if absent else ordered
    chosen = [everyone[position] for position in rng.choice(len(everyone), size=active, replace=False).tolist()]
    if absent:
        present = set(chosen).difference(absent)
        others = [client for client in ordered if client not in present]
        extra = rng.choice(len(others), size=active - len(present), replace=False)
        chosen = [*present, *(others[position] for position in extra.tolist())]
    return sorted(chosen)


def sample_poisson_cohort(trainers: Sequence[int], rate: float, rng: np.random.Generator) -> list[int]:
    """Each client takes part by a draw of its own, as the accountant assumes; perhaps nobody does."""
    ordered = trainers if isinstance(trainers, range) else sorted(trainers)
    return [ordered[position] for position in np.flatnonzero(rng.random(len(ordered)) < rate).tolist()]


def epsilon_after(
    config: Config, roster: Roster, rounds: int, repeated: int = 0, one_shot: bool = False
) -> float | None:
    """Epsilon after `rounds` rounds of a resolved config, of which `repeated` more were begun; None without noise.

    A noised mean tells of every client in every round, and less if nobody knows who took part. A noised upload tells
    of a client only in rounds in which it took part, which the server knows: the largest epsilon of a client counts.
    """
    privacy, local, trainers = config.privacy, config.local, roster.trainers
    if not privacy.noise:
        return None
    active = config.server.active or len(trainers)
    if privacy.by_server:
        return server_epsilon(privacy, active / len(trainers), rounds + repeated)
    drawn = Counter(
        client
        for round in range(1, rounds + 1)
        for client in sample_cohort(trainers, active, config.run.seed, round, roster.absent)
    )
    images = {client: roster.images(client) for client in drawn} if privacy.by_steps else dict.fromkeys(drawn, 1)
    fewest = {times: min(images[client] for client in drawn if drawn[client] == times) for times in set(drawn.values())}
    return max(
        (upload_epsilon(privacy, local, size, times + repeated, one_shot) for times, size in fewest.items()),
        default=0.0,
    )
