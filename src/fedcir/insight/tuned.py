"""What a search came to: the trials, the best of them, a file to run it with, and a picture of what mattered."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedcir.algorithms import asked_config
from fedcir.config import Asked, Config, absolute_paths, differing, dump_toml, merged, nested
from fedcir.engine.files import write
from fedcir.insight.attempts import Attempt
from fedcir.insight.search import importances
from fedcir.insight.space import Space, own_settings, with_settings


@dataclass(frozen=True)
class Tuning:
    """The trials of a search. Accuracies are fractions, on validation images, the mean over domains."""

    out: Path
    config: Config
    """What all trials share."""
    space: Space
    """The values that were tried, by setting."""
    trials: Sequence[Attempt]

    @property
    def best(self) -> Attempt | None:
        """The most accurate trial that ran all its rounds; the first of equals."""
        done = (trial for trial in self.trials if trial.state == "done")
        return max(done, key=lambda trial: (trial.score, -trial.number), default=None)

    @property
    def settings(self) -> Config:
        """The settings of the best trial."""
        return self.config if self.best is None else with_settings(self.config, self.best.settings)

    @cached_property
    def importances(self) -> dict[str, float]:
        """The share of each setting in how accuracies differ, the largest first; empty with fewer than 8 trials."""
        return importances(self.trials, self.space)

    @property
    def reason(self) -> str:
        """What came out, in sentences."""
        best, first = self.best, self.trials[0]
        assert best is not None
        said = f"Trial {best.number} of {len(self.trials)} is the best: {best.score:.1%} on validation images"
        if first.state != "done" or first.settings != own_settings(self.config, self.space):
            return f"{said}."
        if best is first:
            return f"{said}. It has the settings that you gave: no other trial beats them."
        gain = 100 * (best.score - first.score)
        return (
            f"{said}, {gain:.1f} points above the settings that you gave. "
            f"It is the best of {len(self.trials)} on these images, so expect a smaller gain on others."
        )

    def to_rows(self) -> list[dict[str, Any]]:
        """A dict of plain values for each trial: `pandas.DataFrame` takes them."""
        return [
            {
                "trial": trial.number,
                **trial.settings,
                "accuracy": trial.accuracy[-1] if trial.accuracy else None,
                "worst": trial.worst,
                "rounds": trial.rounds[-1] if trial.rounds else 0,
                "state": trial.state,
                "why": trial.why,
                "best": trial is self.best,
            }
            for trial in self.trials
        ]

    def toml(self) -> str:
        """A file of settings for `fedcir run`, which repeats the best trial to the bit."""
        why = [
            self.reason,
            f"Tried: {'; '.join(f'{place} {values}' for place, values in self.space.items())}.",
            "This run repeats the trial to the bit. Without data.val_fraction, it trains on the validation images too.",
        ]
        return "".join(f"# {line}\n" for line in why) + "\n" + dump_toml(absolute_paths(_brief(self.settings)))

    def save_best(self) -> None:
        """Write best.toml, once there is a best."""
        if self.best is not None:
            write(self.out / "best.toml", self.toml())

    def draw(self) -> Path:
        """Draw trials.png: accuracy against each setting, and what mattered."""
        from fedcir.insight.report.trials import draw_trials

        return draw_trials(self.trials, self.space, self.importances, self.out / "trials.png")


def _brief(config: Config) -> dict[str, Any]:
    """The settings that are not the defaults of the algorithm, as tables; another machine has other workers."""
    usual = asked_config(Asked(options={"algorithm": config.algorithm.name}))
    differ = differing(usual, replace(config, run=replace(config.run, workers=None)))
    other = {place: value for place, (_, value) in differ.items() if value is not None}
    name = {"data": {"name": config.data.name}, "algorithm": {"name": config.algorithm.name}}
    return merged(name, nested(other))
