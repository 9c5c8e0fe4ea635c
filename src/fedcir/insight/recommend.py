"""What to run on these data: a diagnosis and a short pilot, neither of which looks at a test image."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedcir.algorithms import asked_config, make_algorithm
from fedcir.analysis.diagnose import Diagnosis, diagnose_data, shift_config, verdict
from fedcir.config import Asked, Between, Config, dump_toml, merged, nested
from fedcir.data.domains import Domains
from fedcir.data.federation import deal, federation_from
from fedcir.data.partition.shares import Share
from fedcir.engine.files import write
from fedcir.engine.simulate import check_run, open_rounds
from fedcir.runs.batch import OnNote, OnWork, chosen_seeds, unheard
from fedcir.runs.compare import Estimate
from fedcir.runs.intervals import MIN_SEEDS, MeanInterval, RunAccuracy, hash_test_set, mean_interval
from fedcir.types import InputError

VALIDATION = 0.2
"""The share of the training images that the pilot is judged on, where the settings name none."""


@dataclass(frozen=True)
class Candidate:
    """Something to try: an algorithm, and the settings that make it this candidate."""

    name: str
    algorithm: str
    settings: Mapping[str, Any]
    about: str


CANDIDATES = (
    Candidate("fedavg", "fedavg", {"model.norm": "batch"}, "plain averaging, with BatchNorm"),
    Candidate("fedavg, invariant", "fedavg", {"model.norm": "invariant"}, "no statistics of the data in the network"),
    Candidate("fedcirplus", "fedcirplus", {}, "the same, and a loss corrected by each client's label shares"),
    Candidate("fedcir", "fedcir", {"model.norm": "batch"}, "the paper's method"),
)
"""The simplest first: others are compared with it."""

ON_FROZEN = {"fedavg": "plain averaging", "fedcirplus": "a loss corrected by each client's label shares"}
"""What candidates are where the encoder keeps its norms: no candidate changes them."""


@dataclass(frozen=True)
class Trial:
    """What a candidate came to on validation images, over seeds. Accuracies are fractions."""

    candidate: Candidate
    mean: Estimate
    """The plain mean over domains."""
    worst: Estimate
    """The worst domain of each seed."""
    difference: MeanInterval | None
    """To the means of the first candidate, seed by seed, over seeds and validation images; None for that one."""

    @property
    def better(self) -> bool:
        """Whether it beats the first candidate by more than chance, over at least three seeds."""
        return self.difference is not None and self.difference.is_beyond_chance and self.difference.mean > 0

    @property
    def half_width(self) -> float | None:
        """Half of the difference's 95 % interval."""
        return None if self.difference is None else self.difference.half_width


@dataclass(frozen=True)
class Recommendation:
    """The candidate to use, and the evidence for it."""

    trials: Sequence[Trial]
    choice: Trial
    diagnosis: Diagnosis | None
    """None where there are too few images for one."""
    findings: Sequence[str]
    """What the data look like, in sentences."""
    tables: Mapping[str, Any]
    """The settings to run with, as sections of a TOML file."""
    rounds: int
    seeds: Sequence[int]

    @property
    def reason(self) -> str:
        """Why this one, in a sentence."""
        first, chosen = self.trials[0].candidate.name, self.choice
        if len(self.trials) == 1:
            return f"Use {first}: it is the only candidate that goes with these settings."
        if len(self.seeds) < MIN_SEEDS:
            return (
                f"No recommendation: {len(self.seeds)} seeds cannot tell a gain from chance, try `--seeds 0,1,2`. "
                f"The settings are those of {first}, the simplest candidate."
            )
        if chosen.difference is None or chosen.half_width is None:
            return (
                f"Use {first}: no other candidate beats it by more than chance, and it is the simplest. "
                "Where `fedcir init` names another method, it goes by the data alone; this pilot has tried both."
            )
        gain, half = 100 * chosen.difference.mean, 100 * chosen.half_width
        return (
            f"Use {chosen.candidate.name}: it beats {first} by {gain:.1f} points "
            f"(95 % interval {gain - half:+.1f} to {gain + half:+.1f}) on validation images."
        )

    def to_rows(self) -> list[dict[str, Any]]:
        """A dict of plain values for each candidate: `pandas.DataFrame` takes them."""
        return [
            {
                "candidate": trial.candidate.name,
                "algorithm": trial.candidate.algorithm,
                **trial.candidate.settings,
                "mean": trial.mean.mean,
                "std": trial.mean.std,
                "worst": trial.worst.mean,
                "difference": None if trial.difference is None else trial.difference.mean,
                "half_width": trial.half_width,
                "chosen": trial is self.choice,
            }
            for trial in self.trials
        ]

    def toml(self) -> str:
        """A file of settings for `fedcir run`, which says why."""
        lines = [self.reason, *self.findings, f"Pilot: {self.rounds} rounds, seeds {', '.join(map(str, self.seeds))}."]
        return "".join(f"# {line}\n" for line in lines) + "\n" + dump_toml(self.tables)

    def save(self, path: str | Path) -> None:
        """Write the settings to a new file."""
        if Path(path).exists():
            raise InputError(f"{path} exists: name a new file")
        write(Path(path), self.toml())


def recommend(
    *,
    pilot_rounds: int = 20,
    seeds: Sequence[int] = (0, 1, 2),
    preset: str | None = None,
    config: str | Path | None = None,
    set: Sequence[str] | Mapping[str, Any] = (),
    on_work: OnWork = unheard,
    on_note: OnNote = unheard,
    **options: Any,
) -> Recommendation:
    """Find out what to run on some data, as `fedcir recommend` does: try each candidate for a few rounds.

    `options` say which data, such as dataset="pacs" and data_root="data/pacs", and may fix other settings too. Some of
    each domain's training images are set aside, and the candidates are judged on them; test images are not looked at.
    """
    Between(1, 1_000_000).check("pilot_rounds", pilot_rounds)
    numbers = chosen_seeds(seeds)
    if len(numbers) < 2:
        raise InputError("recommend needs at least two seeds, to tell a gain from chance: try 0,1,2")
    asked = Asked.of(options, preset, config, set, without=("algorithm", "seed", "norm", "prior"))
    candidates = _candidates(asked)
    test_seed = asked.config().run.seed  # of the run that follows: no pilot looks at its test images
    found: dict[str, list[RunAccuracy]] = {}
    diagnosis: Diagnosis | None = None
    done = 0
    for seed in numbers:
        first = _pilot(asked, candidates[0], seed, pilot_rounds)  # the data are the same for all
        domains, shares = without_test_images(*deal(first, test_seed=test_seed))
        if seed == numbers[0]:
            pilots = [_pilot(asked, candidate, seed, pilot_rounds) for candidate in candidates]
            candidates = _fitting(candidates, pilots, domains, shares, on_note)
            with suppress(InputError):  # one domain, or too few images
                measuring = partial(on_work, what="measuring distances")
                following = replace(first, run=replace(first.run, seed=test_seed))
                diagnosis = diagnose_data(shift_config(following), on_distance=measuring)
        for candidate in candidates:
            trying = _pilot(asked, candidate, seed, pilot_rounds)
            federation, algorithm = federation_from(trying, domains, shares), make_algorithm(trying.algorithm)
            with open_rounds(trying, algorithm, federation, None, False) as (session, rounds):
                for _ in rounds:
                    done += 1
                    total = len(candidates) * len(numbers) * pilot_rounds
                    on_work(done, total, f"trying {candidate.name}")
            accuracy = session.records[-1].accuracy
            assert accuracy is not None
            hits = {} if session.hits is None else {name: d.correct for name, d in session.hits.domains.items()}
            names = federation.manifest["test"]
            images = {name: len(ids) for name, ids in names.items()}
            score = RunAccuracy(accuracy, images, hash_test_set(names), hits)
            found.setdefault(candidate.name, []).append(score)
    described = {candidate.name: candidate for candidate in candidates}
    trials = [replace(trial, candidate=described[trial.candidate.name]) for trial in _trials(found)]
    choice = max((trial for trial in trials if trial.better), key=lambda trial: trial.mean.mean, default=trials[0])
    findings = ["There are too few images to measure how far the domains are apart."]
    if diagnosis is not None:
        findings = verdict(diagnosis)
    tables = _tables(asked, choice.candidate)
    return Recommendation(trials, choice, diagnosis, findings, tables, pilot_rounds, numbers)


def without_test_images(domains: Domains, shares: Sequence[Share]) -> tuple[Domains, list[Share]]:
    """The domains that have validation images, tested on those; a held-out one has none and is left out."""
    kept = [
        replace(domain, test=domain.validation, validation=None) for domain in domains if domain.validation is not None
    ]
    names = {domain.name for domain in kept}
    return replace(domains, domains=tuple(kept)), [share for share in shares if share.domain in names]


def _pilot(asked: Asked, candidate: Candidate, seed: int, rounds: int) -> Config:
    """Settings of a short run of a candidate, tested once, at its end."""
    said = asked.over(algorithm=candidate.algorithm, seed=seed, rounds=rounds, eval_every=rounds)
    config = asked_config(said, nested(candidate.settings))
    return config if config.data.val_fraction else replace(config, data=replace(config.data, val_fraction=VALIDATION))


def _candidates(asked: Asked) -> list[Candidate]:
    """Those that the encoder allows: the norms of a frozen one cannot be replaced."""
    stays, norm = asked.config().model.keeps_norm, asked.tables().get("model", {}).get("norm")
    if norm is not None and not stays:
        raise InputError(f"recommend tries several norms, and model.norm={norm} leaves one: leave model.norm out")
    if not stays:
        return list(CANDIDATES)
    allowed = [candidate for candidate in CANDIDATES if candidate.settings.get("model.norm", "batch") == "batch"]
    return [replace(candidate, about=ON_FROZEN.get(candidate.name, candidate.about)) for candidate in allowed]


def _fitting(
    candidates: Sequence[Candidate],
    pilots: Sequence[Config],
    domains: Domains,
    shares: Sequence[Share],
    on_note: OnNote,
) -> list[Candidate]:
    """Those that the other settings allow, such as privacy; a note says why one is left out."""
    refused: dict[str, InputError] = {}
    for candidate, pilot in zip(candidates, pilots, strict=True):
        try:
            check_run(pilot, make_algorithm(pilot.algorithm), federation_from(pilot, domains, shares))
        except InputError as error:
            refused[candidate.name] = error
    if len(refused) == len(candidates):
        raise next(iter(refused.values()))
    for name, why in refused.items():
        on_note(f"left out: {name}: {why}")
    return [candidate for candidate in candidates if candidate.name not in refused]


def _trials(found: Mapping[str, Sequence[RunAccuracy]]) -> list[Trial]:
    candidates = [candidate for candidate in CANDIDATES if candidate.name in found]
    trials = []
    for candidate in candidates:
        own, first = found[candidate.name], found[candidates[0].name]
        worst = Estimate.of([min(score.accuracy.values()) for score in own])
        difference = None if candidate is candidates[0] else mean_interval(own, first)
        trials.append(Trial(candidate, Estimate.of([score.mean for score in own]), worst, difference))
    return trials


def _tables(asked: Asked, candidate: Candidate) -> dict[str, Any]:
    """What was asked for, and what makes this candidate."""
    return merged(asked.over(algorithm=candidate.algorithm).tables(), nested(candidate.settings))
