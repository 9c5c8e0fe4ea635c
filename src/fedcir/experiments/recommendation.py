"""Recommend an algorithm for a dataset: a diagnosis and short pilot runs compared on validation images."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedcir.algorithms import make_algorithm, resolve_config
from fedcir.analysis.diagnosis import Diagnosis, diagnose_data, shift_config
from fedcir.analysis.findings import verdict
from fedcir.config import Config, ConfigRequest, dump_toml, merge_tables, nest_settings
from fedcir.data.domains import Domains
from fedcir.data.federation import build_federation, partition_dataset
from fedcir.data.partition import ClientPartition
from fedcir.errors import InputError
from fedcir.experiments.batch import check_seeds
from fedcir.files import write_file
from fedcir.runs.statistics import MIN_SEEDS, Estimate, MeanInterval, RunScores, hash_test_set, mean_interval
from fedcir.runtime.simulation import check_run, open_rounds
from fedcir.types import ACCURACY, Metric, OnNote, OnProgress, ignore_progress
from fedcir.validation import Between

TOO_FEW_IMAGES = "There are too few images to measure how far the domains are apart."
VALIDATION = 0.2
"""Share of training images that pilots are judged on, where the settings name none."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """An algorithm and its settings to try."""

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
"""Candidates to try; the others are compared with the first, the simplest."""

ONE_MESSAGE = "fedcirone"
ON_FROZEN = (
    Candidate(ONE_MESSAGE, ONE_MESSAGE, {}, "the best linear head in closed form, from one message"),
    Candidate("fedavg", "fedavg", {}, "plain averaging"),
    Candidate("fedcirplus", "fedcirplus", {}, "a loss corrected by each client's label shares"),
    Candidate("fedcir", "fedcir", {}, "the paper's method"),
)
"""Candidates for a frozen encoder, which keeps its norms: rounds have to beat one message."""


WITHOUT_CLASSES = (
    CANDIDATES[0],
    Candidate("fedprox", "fedprox", {"model.norm": "batch"}, "clients are held near the model that they received"),
    CANDIDATES[1],
)
"""Candidates for tasks without classes."""


@dataclass(frozen=True)
class CandidateResult:
    """Scores of a candidate on validation images over seeds; shares are fractions."""

    candidate: Candidate
    mean: Estimate
    """Plain mean over domains."""
    worst: Estimate
    """Worst domain of each seed."""
    difference: MeanInterval | None
    """Paired difference to the first candidate over seeds and validation images; None for the first itself."""
    metric: Metric = ACCURACY

    @property
    def gain(self) -> float:
        """How much better it is than the first candidate."""
        return 0.0 if self.difference is None else self.metric.gain(self.difference.mean, 0.0)

    @property
    def better(self) -> bool:
        """Whether it is better than the first candidate by more than chance, over at least three seeds."""
        return self.difference is not None and self.difference.is_beyond_chance and self.gain > 0


@dataclass(frozen=True)
class Recommendation:
    """The recommended candidate, and the evidence for it."""

    trials: Sequence[CandidateResult]
    choice: CandidateResult
    diagnosis: Diagnosis | None
    """None where there are too few images, and for tasks without classes."""
    findings: Sequence[str]
    """Sentences on the data."""
    tables: Mapping[str, Any]
    """The settings to run with, as sections of a TOML file."""
    rounds: int
    seeds: Sequence[int]

    @property
    def reason(self) -> str:
        """The reason for the choice in a sentence."""
        first, chosen = self.trials[0].candidate.name, self.choice
        if len(self.trials) == 1:
            return f"Use {first}: it is the only candidate that goes with these settings."
        if len(self.seeds) < MIN_SEEDS:
            return (
                f"No recommendation: {len(self.seeds)} seeds cannot tell a gain from chance, try `--seeds 0,1,2`. "
                f"The settings are those of {first}, the simplest candidate."
            )
        if chosen.difference is None:
            return (
                f"Use {first}: no other candidate beats it by more than chance, and it is the simplest. "
                "Where `fedcir init` names another method, it goes by the data alone; this pilot has tried both."
            )
        change, half = chosen.difference.mean, chosen.difference.half_width or 0.0
        interval = " to ".join(map(chosen.metric.format_change, (change - half, change + half)))
        return (
            f"Use {chosen.candidate.name}: it beats {first} by {chosen.metric.show_gap(change)} "
            f"(95 % interval {interval}) on validation images."
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
                "difference": trial.difference and trial.difference.mean,
                "half_width": trial.difference and trial.difference.half_width,
                "chosen": trial is self.choice,
            }
            for trial in self.trials
        ]

    def save(self, path: str | Path) -> None:
        """Write the settings to a new file for `fedcir run`, with the reason in comments."""
        if Path(path).exists():
            raise InputError(f"{path} exists: name a new file")
        lines = [self.reason, *self.findings, f"Pilot: {self.rounds} rounds, seeds {', '.join(map(str, self.seeds))}."]
        write_file(Path(path), "".join(f"# {line}\n" for line in lines) + "\n" + dump_toml(self.tables))


def recommend(
    *,
    pilot_rounds: int = 20,
    seeds: Sequence[int] = (0, 1, 2),
    preset: str | None = None,
    config: str | Path | None = None,
    set: Sequence[str] | Mapping[str, Any] = (),
    on_work: OnProgress = ignore_progress,
    on_note: OnNote = ignore_progress,
    **options: Any,
) -> Recommendation:
    """Recommend what to run on a dataset, as `fedcir recommend` does: train each candidate for a few rounds.

    `options` name the data, such as dataset="pacs" and data_root="data/pacs", and may fix other settings too. Some of
    each domain's training images are set aside, and the candidates are judged on them; test images are not used.
    """
    Between(1, 1_000_000).check("pilot_rounds", pilot_rounds)
    seeds = check_seeds(seeds)
    if len(seeds) < 2:
        raise InputError("recommend needs at least two seeds, to tell a gain from chance: try 0,1,2")
    request = ConfigRequest.from_options(options, preset, config, set, without=("algorithm", "seed", "norm", "prior"))
    candidates = _list_candidates(request)
    test_seed = request.resolve().run.seed  # of the run that follows: no pilot uses its test images
    diagnosis: Diagnosis | None = None
    scores: dict[str, list[RunScores]] = {}
    done = 0
    for seed in seeds:
        pilots = {candidate: _pilot_config(request, candidate, seed, pilot_rounds) for candidate in candidates}
        first = pilots[candidates[0]]  # all candidates have the same data
        domains, clients = use_validation_images(*partition_dataset(first, test_seed=test_seed))
        if seed == seeds[0]:
            if not domains.task.has_classes and candidates == list(CANDIDATES):
                candidates = [c for c in WITHOUT_CLASSES if domains.has_images or c is not CANDIDATES[1]]
                pilots = {candidate: _pilot_config(request, candidate, seed, pilot_rounds) for candidate in candidates}
            with suppress(InputError):  # one domain, or too few images
                if not domains.task.has_classes:
                    raise InputError("the shift of images is measured for classification")
                shift_settings = shift_config(replace(first, run=replace(first.run, seed=test_seed)))
                diagnosis = diagnose_data(shift_settings, on_distance=partial(on_work, what="measuring distances"))
            candidates = _exclude_refused(pilots, domains, clients, on_note)
        all_rounds = sum(pilots[candidate].server.rounds for candidate in candidates)
        for candidate in candidates:
            pilot = pilots[candidate]
            federation, algorithm = build_federation(pilot, domains, clients), make_algorithm(pilot.algorithm)
            with open_rounds(pilot, algorithm, federation, None, False) as (session, rounds):
                for _ in rounds:
                    done += 1
                    on_work(done, len(seeds) * all_rounds, f"trying {candidate.name}")
            scored, names = session.records[-1].scores, federation.manifest["test"]
            assert scored is not None
            hits = {} if session.hits is None else {name: d.correct for name, d in session.hits.domains.items()}
            metric = domains.task.primary
            images = {name: len(ids) for name, ids in names.items()} if metric == ACCURACY else {}
            score = RunScores(scored, images, hash_test_set(names), hits, metric)
            scores.setdefault(candidate.name, []).append(score)
    trials = compare_candidates(candidates, scores)
    choice = max((trial for trial in trials if trial.better), key=lambda trial: trial.gain, default=trials[0])
    findings = [TOO_FEW_IMAGES] if trials[0].metric == ACCURACY else []
    findings = findings if diagnosis is None else verdict(diagnosis)
    chosen = choice.candidate
    tables = merge_tables(request.with_options(algorithm=chosen.algorithm).tables(), nest_settings(chosen.settings))
    return Recommendation(trials, choice, diagnosis, findings, tables, pilot_rounds, seeds)


def use_validation_images(
    domains: Domains, clients: Sequence[ClientPartition]
) -> tuple[Domains, list[ClientPartition]]:
    """Replace test images by validation images. Domains without any, such as a held-out one, are dropped."""
    selected = [
        replace(domain, test=domain.validation, validation=None) for domain in domains if domain.validation is not None
    ]
    names = {domain.name for domain in selected}
    return replace(domains, domains=tuple(selected)), [client for client in clients if client.domain in names]


def with_validation(config: Config) -> Config:
    """Set the fraction of validation images where the config has none."""
    return config if config.data.val_fraction else replace(config, data=replace(config.data, val_fraction=VALIDATION))


def _pilot_config(request: ConfigRequest, candidate: Candidate, seed: int, rounds: int) -> Config:
    """Return the config of a short run of a candidate, evaluated after its last round."""
    request = request.with_options(algorithm=candidate.algorithm, seed=seed, rounds=rounds, eval_every=rounds)
    return with_validation(resolve_config(request, nest_settings(candidate.settings)))


def _list_candidates(request: ConfigRequest) -> list[Candidate]:
    """List the candidates that the encoder allows: the norms of a frozen one cannot be replaced."""
    model = request.resolve().model
    if model.freeze and model.hidden is None:
        return list(ON_FROZEN)
    if model.keeps_norm:
        return [replace(candidate, settings={}) for candidate in ON_FROZEN if candidate.name != ONE_MESSAGE]
    if (norm := request.tables().get("model", {}).get("norm")) is not None:
        raise InputError(f"recommend tries several norms, and model.norm={norm} leaves one: leave model.norm out")
    return list(CANDIDATES)


def _exclude_refused(
    pilots: Mapping[Candidate, Config], domains: Domains, clients: Sequence[ClientPartition], on_note: OnNote
) -> list[Candidate]:
    """Exclude candidates that cannot run with the other settings, such as privacy; a note names each and the reason."""
    refused: dict[Candidate, InputError] = {}
    for candidate, pilot in pilots.items():
        try:
            check_run(pilot, make_algorithm(pilot.algorithm), build_federation(pilot, domains, clients))
        except InputError as error:
            refused[candidate] = error
    if len(refused) == len(pilots):
        raise next(iter(refused.values()))
    for candidate, reason in refused.items():
        on_note(f"left out: {candidate.name}: {reason}")
    return [candidate for candidate in pilots if candidate not in refused]


def compare_candidates(
    candidates: Sequence[Candidate], scores: Mapping[str, Sequence[RunScores]]
) -> list[CandidateResult]:
    """Compare every candidate with the first, seed by seed."""
    first = scores[candidates[0].name]
    return [
        CandidateResult(
            candidate,
            Estimate.of([score.mean for score in scores[candidate.name]]),
            Estimate.of([score.worst for score in scores[candidate.name]]),
            None if candidate is candidates[0] else mean_interval(scores[candidate.name], first),
            first[0].metric,
        )
        for candidate in candidates
    ]
