"""Which clients take part in a round, and what that costs of their privacy."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedcir.config import (
    Config,
)
from fedcir.data.federation import Roster
from fedcir.engine.accounting import Accountant
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
    """Of so many rounds of a settled config; None without noise.

    A noised mean says something of every client in every round, and less if nobody knows who took part. A noised
    upload says something of a client only where it took part, which the server knows: the most active one counts.
    Where a unit is an example, the one counts whose chance to be drawn, in all steps of its client, is the highest.
    """
    privacy, trainers = config.privacy, roster.trainers
    if not privacy.noise:
        return None
    active = config.server.active or len(trainers)
    if privacy.by_server:
        return Accountant(privacy.noise, privacy.delta, active / len(trainers)).epsilon(rounds + repeated)
    drawn = Counter(
        client for round in range(1, rounds + 1) for client in sample_cohort(trainers, active, config.run.seed, round)
    )
    if privacy.by_clients:
        return Accountant(privacy.noise, privacy.delta).epsilon(max(drawn.values(), default=0) + repeated)
    held = {client: roster.images(client) for client in drawn}
    fewest = {times: min(held[client] for client in drawn if drawn[client] == times) for times in set(drawn.values())}
    return max(
        Accountant(privacy.noise, privacy.delta, min(1.0, config.local.batch_size / images)).epsilon(
            (times + repeated) * config.local.steps
        )
        for times, images in fewest.items()
    )
