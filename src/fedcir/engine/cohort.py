"""Which clients take part in a round, and what that costs of their privacy."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedcir.config import (
    Config,
)
from fedcir.data.federation import Roster
from fedcir.engine.accounting import server_epsilon, upload_epsilon
from fedcir.rng import numpy_rng


def sample_cohort(trainers: Sequence[int], active: int, seed: int, round: int) -> list[int]:
    """The clients of a round, in ascending order."""
    if active == len(trainers):
        return sorted(trainers)
    ordered = trainers if isinstance(trainers, range) else sorted(trainers)
    chosen = numpy_rng(seed, "cohort", round).choice(len(ordered), size=active, replace=False)
    return sorted(ordered[place] for place in chosen.tolist())


def poisson_cohort(trainers: Sequence[int], rate: float, rng: np.random.Generator) -> list[int]:
    """Each client takes part by a draw of its own, as the accountant assumes; perhaps nobody does."""
    ordered = trainers if isinstance(trainers, range) else sorted(trainers)
    return [ordered[place] for place in np.flatnonzero(rng.random(len(ordered)) < rate).tolist()]


def epsilon_after(config: Config, roster: Roster, rounds: int, repeated: int = 0) -> float | None:
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
        client for round in range(1, rounds + 1) for client in sample_cohort(trainers, active, config.run.seed, round)
    )
    images = {client: roster.images(client) for client in drawn} if privacy.by_steps else dict.fromkeys(drawn, 1)
    fewest = {times: min(images[client] for client in drawn if drawn[client] == times) for times in set(drawn.values())}
    return max((upload_epsilon(privacy, local, held, times + repeated) for times, held in fewest.items()), default=0.0)
