"""What to try next, and when to give up on it: Optuna, asked anew for each trial from what is on record.

So a search that was killed goes on as if nothing had happened. Only this file imports optuna.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedcir.config import Range, Span
from fedcir.insight.attempts import Attempt
from fedcir.insight.space import Settings, Space, combinations
from fedcir.rng import seed_for
from fedcir.types import InputError

if TYPE_CHECKING:
    import optuna

AT_RANDOM = 5
"""Trials before the search learns from them, and before any is stopped early."""
FEWEST = 8
"""Trials that a look at what mattered needs."""


class Proposal:
    """Settings to try, and whether to go on with them."""

    def __init__(self, trial: "optuna.Trial", settings: Settings) -> None:
        self._trial, self.settings = trial, settings

    def hopeless(self, round: int, accuracy: float) -> bool:
        """Whether its accuracy after a round is below the median of the finished trials at that round."""
        self._trial.report(accuracy, round)
        return self._trial.should_prune()


def propose(done: Sequence[Attempt], space: Space, first: Settings, seed: int, rounds: int) -> Proposal | None:
    """The next trial. The first tries the settings that the user has. None when every combination has been tried."""
    with _optuna() as optuna:
        study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(
                n_startup_trials=AT_RANDOM, seed=seed_for(seed, "tune", len(done)) % 2**32
            ),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=AT_RANDOM, n_warmup_steps=rounds // 4),
        )
        ranges = {place: _distribution(values) for place, values in space.items()}
        for attempt in done:
            study.add_trial(_told(attempt, ranges))
        if not done and first:
            study.enqueue_trial(first)
        elif (every := combinations(space, seed)) is not None:
            tried = [attempt.settings for attempt in done]
            if (left := next((each for each in every if each not in tried), None)) is None:
                return None
            study.enqueue_trial(left)
        trial = study.ask(ranges)
        return Proposal(trial, {place: _plain(values, trial.params[place]) for place, values in space.items()})


def importances(done: Sequence[Attempt], space: Space) -> dict[str, float]:
    """The share of each setting in how accuracies differ (fANOVA); empty where there are too few trials to tell."""
    finished = [attempt for attempt in done if attempt.state == "done"]
    varied = {place for place in space if len({repr(attempt.settings[place]) for attempt in finished}) > 1}
    if (
        len(done) < FEWEST
        or len(finished) < AT_RANDOM
        or len({attempt.score for attempt in finished}) < 2
        or not varied
    ):
        return {}
    with _optuna() as optuna:
        study = optuna.create_study(direction="maximize")
        ranges = {place: _distribution(values) for place, values in space.items()}
        for attempt in finished:
            study.add_trial(_told(attempt, ranges))
        shares = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0), params=sorted(varied)
        )
        return {place: float(share) for place, share in shares.items()}


def require_optuna() -> None:
    with _optuna():
        pass


@contextmanager
def _optuna() -> Iterator[Any]:
    """The library, which is silent meanwhile: it logs every study that it makes."""
    try:
        import optuna
    except ImportError:
        raise InputError("`fedcir tune` needs Optuna: pip install 'fedcir[tune]'") from None
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield optuna
    finally:
        optuna.logging.set_verbosity(before)


def _distribution(values: Range) -> "optuna.distributions.BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Span):
        return CategoricalDistribution(values.values)
    if values.whole:
        return IntDistribution(int(values.low), int(values.high), log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)


def _plain(values: Range, value: Any) -> Any:
    return values.rounded(value) if isinstance(values, Span) else value


def _told(attempt: Attempt, ranges: "dict[str, optuna.distributions.BaseDistribution]") -> "optuna.trial.FrozenTrial":
    """A trial as Optuna knows it. One that failed counts as one that was stopped: the worst of all."""
    from optuna.trial import TrialState, create_trial

    done = attempt.state == "done"
    return create_trial(
        state=TrialState.COMPLETE if done else TrialState.PRUNED,
        params=attempt.settings,
        distributions=ranges,
        value=attempt.score if done else None,
        intermediate_values=dict(zip(attempt.rounds, attempt.accuracy, strict=True)),
    )
