"""Search for good settings of one algorithm with Optuna: short runs, judged on validation images only."""

import contextlib
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import numpy as np

from fedcir.algorithms import find_algorithm, make_algorithm, resolve_config
from fedcir.config import SECTIONS, Choices, Config, ConfigRequest, NumberRange, SearchRange, parse_range, toml
from fedcir.data.federation import Federation, build_federation, partition_dataset
from fedcir.data.manifest import build_manifest
from fedcir.errors import FedcirError, InputError, RunError
from fedcir.experiments.batch import choose_folder, run_name
from fedcir.experiments.recommendation import use_validation_images, with_validation
from fedcir.files import LOCK_TIMEOUT, RESTORE_HINT, acquire_lock, explain_read_errors, open_append, write_file
from fedcir.reporting.drawing import save_figure
from fedcir.rng import numpy_rng, seed_for
from fedcir.runtime.resume import MAY_DIFFER, resolve_resumed_config
from fedcir.runtime.simulation import check_run, open_rounds
from fedcir.types import ACCURACY, Metric, OnNote, OnProgress, ignore_progress
from fedcir.validation import Between, check_type

if TYPE_CHECKING:
    import optuna

DEFAULT_TRIALS = 12
DEFAULT_SPACE = {"local.lr": "1e-3..1e-1"}
"""Settings that are varied for every algorithm."""
FIXED_SETTINGS = ("data.", "partition.", "run.", "server.rounds", "server.eval_every", "algorithm.name")
"""Settings that all trials must share to be comparable."""
MAY_CHANGE = MAY_DIFFER - {"server.rounds"}
"""Settings that may change on resume: the trials stay comparable."""
STARTUP_TRIALS = 5
"""Random trials before the search uses earlier results, and before any trial is stopped early."""
MIN_TRIALS_FOR_IMPORTANCES = 8
PLAN, JOURNAL = "settings.toml", "study.journal"
"""Files in the folder of a search: its request, and Optuna's journal of the trials."""

Space = dict[str, SearchRange]
"""Values to try, by setting."""
Settings = dict[str, Any]
"""One value of each setting."""
SpaceRequest = Sequence[str] | Mapping[str, str]


@dataclass(frozen=True)
class Trial:
    """A trial that has ended."""

    number: int
    """Number of the trial, from 1."""
    settings: Settings
    state: Literal["done", "stopped", "failed"]
    """Whether it ran all rounds, was stopped early, or raised an error."""
    rounds: list[int]
    """Rounds after which it was evaluated."""
    scores: list[float]
    """Mean score over domains on validation images after each of these rounds."""
    worst: float | None
    """Score of the worst domain after the last of these rounds."""
    why: str = ""
    """Error message of a failed trial."""
    metric: Metric = ACCURACY
    """What the scores are."""

    @property
    def score(self) -> float | None:
        """Score after its last evaluation; None if it has none."""
        return self.scores[-1] if self.scores else None

    @property
    def accuracy(self) -> list[float]:
        """Former name of `scores`, for one version."""
        return self.scores

    def to_values(self) -> dict[str, Any]:
        """Return the fields, the scores by the name of their metric: a line of trials.jsonl."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "metric"}
        return {self.metric.name if name == "scores" else name: value for name, value in values.items()}


@dataclass(frozen=True)
class Tuning:
    """The result of a search. Scores are on validation images, the mean over domains; shares are fractions."""

    out: Path
    config: Config
    """Settings that all trials share."""
    space: Space
    """The values that were tried, by setting."""
    study: "optuna.Study"
    """Optuna's study, which also holds trials that were interrupted."""
    metric: Metric = ACCURACY
    """What trials are judged by."""

    @cached_property
    def trials(self) -> list[Trial]:
        trials = []
        for number, trial in enumerate(finished_trials(self.study), start=1):
            scores, error = dict(sorted(trial.intermediate_values.items())), trial.user_attrs.get("error", "")
            state: Any = "done" if trial.state.name == "COMPLETE" else "failed" if error else "stopped"
            settings, curve = suggest_settings(trial, self.space), (list(scores), list(scores.values()))
            trials.append(Trial(number, settings, state, *curve, trial.user_attrs.get("worst"), error, self.metric))
        return trials

    @property
    def best(self) -> Trial | None:
        """The trial with the best score that ran all rounds; the first of equals."""
        done = (trial for trial in self.trials if trial.state == "done" and trial.score is not None)
        return max(done, key=lambda trial: (self.metric.gain(trial.score or 0.0, 0.0), -trial.number), default=None)

    @cached_property
    def importances(self) -> dict[str, float]:
        """Share of each setting in the variance of scores (fANOVA), largest first; empty with too few trials."""
        done = [trial for trial in self.trials if trial.state == "done"]
        varied = sorted(name for name in self.space if len({repr(trial.settings[name]) for trial in done}) > 1)
        is_enough = len(self.trials) >= MIN_TRIALS_FOR_IMPORTANCES and len(done) >= STARTUP_TRIALS
        if not is_enough or not varied or len({trial.score for trial in done}) < 2:
            return {}
        from optuna.importance import FanovaImportanceEvaluator, get_param_importances

        shares = get_param_importances(self.study, evaluator=FanovaImportanceEvaluator(seed=0), params=varied)
        return {name: float(share) for name, share in shares.items()}

    @property
    def reason(self) -> str:
        """The result in sentences."""
        best, first = self.best, self.trials[0]
        assert best is not None
        assert best.score is not None
        what = "" if self.metric == ACCURACY else f"{self.metric.title} "
        text = f"Trial {best.number} of {len(self.trials)} is the best: {what}{self.metric.show(best.score)}"
        text += " on validation images"
        if first.state != "done" or first.score is None or first.settings != current_settings(self.config, self.space):
            return f"{text}."
        if best is first:
            return f"{text}. It has the settings that you gave: no other trial beats them."
        gap = f"{self.metric.show_gap(best.score - first.score)} {'above' if best.score > first.score else 'below'}"
        return (
            f"{text}, {gap} the settings that you gave. "
            f"It is the best of {len(self.trials)} on these images, so expect a smaller gain on others."
        )

    def to_rows(self) -> list[dict[str, Any]]:
        """A dict of plain values for each trial: `pandas.DataFrame` takes them."""
        return [
            {
                "trial": trial.number,
                **trial.settings,
                self.metric.name: trial.score,
                "worst": trial.worst,
                "rounds": trial.rounds[-1] if trial.rounds else 0,
                "state": trial.state,
                "why": trial.why,
                "best": trial is self.best,
            }
            for trial in self.trials
        ]

    def save(self) -> None:
        """Write trials.jsonl, and once a trial has run all rounds best.toml, which repeats the best one to the bit."""
        lines = [json.dumps(trial.to_values(), ensure_ascii=False) for trial in self.trials]
        write_file(self.out / "trials.jsonl", "".join(f"{line}\n" for line in lines))
        if self.best is None:
            return
        config = apply_settings(self.config, self.best.settings)
        config = replace(config, run=replace(config.run, workers=None))
        defaults = resolve_config(ConfigRequest(options={"algorithm": config.algorithm.name}))
        changed = {name: new for name, (_, new) in toml.find_differences(defaults, config).items() if new is not None}
        names = {"data": {"name": config.data.name}, "algorithm": {"name": config.algorithm.name}}
        comments = (
            f"# {self.reason}\n# Tried: {'; '.join(f'{name} {values}' for name, values in self.space.items())}.\n"
            "# This run repeats the trial to the bit. Without data.val_fraction, it trains on the validation images "
            "too.\n\n"
        )
        tables = toml.make_paths_absolute(toml.merge_tables(names, toml.nest_settings(changed)))
        write_file(self.out / "best.toml", comments + toml.dump_toml(tables))

    def draw(self) -> None:
        """Draw trials.png, the score by setting, and importances.png where there are importances."""
        from matplotlib import pyplot

        with warnings.catch_warnings(action="ignore"), pyplot.style.context("default"):
            from optuna.importance import FanovaImportanceEvaluator
            from optuna.visualization import matplotlib as plots

            axes = plots.plot_slice(self.study, list(self.space), target_name=f"validation {self.metric.title}")
            pictures = {"trials.png": np.ravel(np.array(axes))[0].figure}
            if self.importances:
                evaluator = FanovaImportanceEvaluator(seed=0)
                axes = plots.plot_param_importances(self.study, evaluator, params=sorted(self.importances))
                pictures["importances.png"] = axes.figure
            for name, figure in pictures.items():
                save_figure(figure, self.out / name)
                pyplot.close(figure)


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Silence Optuna's log of every trial; refuse if it is not installed."""
    try:
        from optuna import logging
    except ImportError:
        raise InputError("`fedcir tune` needs Optuna: pip install 'fedcir[tune]'") from None
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@quiet_optuna()
def tune(
    *,
    trials: int | None = None,
    space: SpaceRequest = (),
    out: str | Path | None = None,
    resume: bool = False,
    preset: str | None = None,
    config: str | Path | None = None,
    set: Sequence[str] | Mapping[str, Any] = (),
    on_work: OnProgress = ignore_progress,
    on_note: OnNote = ignore_progress,
    on_trial: Callable[[Trial], None] = ignore_progress,
    **options: Any,
) -> Tuning:
    """Search for good settings of one algorithm, as `fedcir tune` does.

    `options` are those of the command, such as algorithm="fedprox", dataset="pacs", data_root="data/pacs" or rounds=20.
    `space` adds settings to vary or replaces the ranges that the algorithm declares: {"local.lr": "1e-3..1e-1",
    "algorithm.mu": "0.1,0.5,0.9"}. All trials have the same seed, clients and batches. They are judged on validation
    images, a fifth of the training images unless data.val_fraction says otherwise; test images are not used.
    The trials go into `out`, a new folder in runs/ if not given; `resume` continues there, also after a kill.
    """
    if trials is not None:
        Between(1, 100_000).check("trials", trials)
    request = ConfigRequest.from_options(options, preset, config, set)
    default = Path() if out is not None else Path("runs", f"tune-{run_name(resolve_config(request))}")
    folder = choose_folder(out, default, resume, "trials", lambda folder: (folder / PLAN).is_file())
    plan = SearchPlan.resume(folder, request, space) if resume else SearchPlan.start(folder, request, space)
    ranges = parse_space(plan.config, plan.space)
    domains, clients = use_validation_images(*partition_dataset(plan.config, partial(on_work, what="decoding images")))
    data = build_manifest(domains, clients)["hash"]
    if plan.data not in ("", data):
        raise InputError(f"{folder} was started on other data: choose another folder")
    plan = replace(plan, trials=trials or plan.trials, data=data)
    check_run(plan.config, make_algorithm(plan.config.algorithm), build_federation(plan.config, domains, clients))
    lock = acquire_lock(folder / ".lock", LOCK_TIMEOUT)
    if lock is None:
        raise InputError(f"another process is tuning in {folder}: wait for it, or choose another folder")
    with lock:
        plan.save(folder)
        on_note(f"trials are saved in {folder}")
        metric, rounds = domains.task.primary, plan.config.server.rounds
        tuning = Tuning(folder, plan.config, ranges, open_journal(folder, metric), metric)
        open_data = partial(build_federation, domains=domains, clients=clients)
        while (number := len(tuning.trials)) < plan.trials and prepare_trial(tuning.study, plan.config, ranges):

            def report_round(round: int, done: int = number) -> None:
                on_work(done * rounds + round, plan.trials * rounds, f"trial {done + 1} of {plan.trials}")

            objective = partial(
                train_trial, config=plan.config, space=ranges, open_data=open_data, on_round=report_round
            )
            tuning.study.optimize(objective, n_trials=1)
            tuning = replace(tuning)  # without the cached trials
            tuning.save()
            on_trial(tuning.trials[-1])
    if number < plan.trials:
        on_note(f"all {number} combinations have been tried")
    if tuning.best is None:
        raise RunError(f"no trial came to an end: {next(trial.why for trial in tuning.trials if trial.why)}")
    tuning.draw()
    return tuning


@dataclass(frozen=True)
class SearchPlan:
    """The request of a search, saved in its folder."""

    config: Config
    """Settings that all trials share, and those of the first trial."""
    space: dict[str, str]
    trials: int = DEFAULT_TRIALS
    data: str = ""
    """Hash of the manifest: trials on other data are not comparable."""

    @classmethod
    def start(cls, folder: Path, request: ConfigRequest, space: SpaceRequest) -> "SearchPlan":
        if (folder / PLAN).is_file():
            raise InputError(f"{folder} already holds trials: resume them, or choose another folder")
        config = with_validation(resolve_config(request))
        return cls(config, {name: str(values) for name, values in parse_space(config, space).items()})

    @classmethod
    def resume(cls, folder: Path, request: ConfigRequest, space: SpaceRequest) -> "SearchPlan":
        """Read the saved plan, with the settings that may change; other changes are refused."""
        if not (folder / PLAN).is_file():
            raise InputError(f"{folder} holds no trials to continue: start without resume")
        tables = toml.read_toml(folder / PLAN)
        with explain_read_errors(folder / PLAN, RESTORE_HINT):
            values = check_type(tables.get("fedcir", {}), dict, "fedcir")
            hints: dict[str, Any] = {"space": dict[str, str], "trials": int, "data": str}
            checked = {name: check_type(values.get(name), hint, f"fedcir.{name}") for name, hint in hints.items()}
            saved = cls(toml.config_from_tables(tables), **checked)
        if (folder / "trials.jsonl").exists() and not (folder / JOURNAL).exists():
            raise InputError(f"{folder} holds trials of an earlier version, which cannot go on: start a new search")
        try:
            resolve_resumed_config(saved.config, request.tables(), folder, trust_code=False)
        except InputError as error:  # the folder holds no copy of the code
            raise InputError(f"{str(error).partition(': if ')[0]}: if it is yours, name it again") from None
        config = with_validation(request.resolve_over(saved.config))
        ranges = parse_space(config, {**saved.space, **split_space(space)})
        differences = toml.find_differences(saved.config, config)
        changes = {name: pair for name, pair in differences.items() if name not in MAY_CHANGE}
        changes |= {f"the space {name}": (saved.space.get(name), str(values)) for name, values in ranges.items()}
        for name, (old, new) in changes.items():
            if old != new:
                raise InputError(f"{folder} was started with {name}={old}, not {new}: choose another folder")
        return replace(saved, config=config)

    def save(self, folder: Path) -> None:
        from fedcir import __version__

        values = {"version": __version__, "trials": self.trials, "data": self.data, "space": self.space}
        tables = toml.make_paths_absolute(toml.config_to_tables(self.config))
        write_file(folder / PLAN, toml.dump_toml({"fedcir": values, **tables}))


def parse_space(config: Config, requested: SpaceRequest = ()) -> Space:
    """Parse the ranges of a config's algorithm; requested ranges replace declared ones.

    Raises InputError if a setting cannot be varied, or does not accept the ends of its range.
    """
    algorithm = find_algorithm(config.algorithm.name)
    settable = {field.name for field in fields(algorithm) if field.init}
    declared = {f"algorithm.{name}": text for name, text in algorithm.ranges.items() if name in settable}
    space: Space = {}
    for name, text in {**DEFAULT_SPACE, **declared, **split_space(requested)}.items():
        values = parse_range(text, name)
        if name.startswith(FIXED_SETTINGS):
            raise InputError(f"{name} cannot be tuned: all trials must share it to be comparable")
        section, _, field = name.partition(".")
        cls = algorithm if section == "algorithm" else SECTIONS.get(section, object)
        if isinstance(values, NumberRange) and get_type_hints(cls).get(field) in (int, int | None):
            if values.low % 1 or values.high % 1:
                raise InputError(f"{name} takes whole numbers, got {values}")
            values = replace(values, whole=True)
        for value in values.ends:
            make_algorithm(apply_settings(config, {name: value}).algorithm)
        space[name] = values
    return space


def split_space(requested: SpaceRequest) -> dict[str, str]:
    """Ranges by setting, from a dict or from texts such as `local.lr=1e-3..1e-1`."""
    if isinstance(requested, str):
        raise InputError(f"space takes a dict or a list such as ['local.lr=1e-3..1e-1'], got {requested!r}")
    if isinstance(requested, Mapping):
        return {name: str(text) for name, text in requested.items()}
    pairs = [text.partition("=") for text in requested]
    if wrong := next((name for name, equals, _ in pairs if not equals or "." not in name), None):
        raise InputError(f"space takes section.field=values, such as local.lr=1e-3..1e-1, got {wrong!r}")
    return {name.strip(): values.strip() for name, _, values in pairs}


def apply_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    return toml.config_from_tables(toml.merge_tables(toml.config_to_tables(config), toml.nest_settings(settings)))


def current_settings(config: Config, space: Space) -> Settings:
    """The config's own values of the settings in the space, where they are within their ranges."""
    settings = {}
    for setting, values in space.items():
        section, name = setting.split(".")
        value = getattr(make_algorithm(config.algorithm) if section == "algorithm" else getattr(config, section), name)
        if value in values:
            settings[setting] = value
    return settings


def list_combinations(space: Space, seed: int) -> list[Settings] | None:
    """List every combination once, in random order; None if a setting has a range or there are too many."""
    choices = [values.values for values in space.values() if isinstance(values, Choices)]
    if len(choices) < len(space) or math.prod(map(len, choices)) > 10**6:
        return None
    combinations = [dict(zip(space, values, strict=True)) for values in itertools.product(*choices)]
    return [combinations[row] for row in numpy_rng(seed, "combinations").permutation(len(combinations))]


def open_journal(folder: Path, metric: Metric) -> "optuna.Study":
    """Open or start Optuna's journal of trials; repair the line, lock or running trial that a killed process left."""
    from optuna import create_study
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
    from optuna.trial import TrialState

    path = folder / JOURNAL
    open_append(path).close()
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        write_file(path, content[: content.rfind(b"\n") + 1])
    (folder / f"{JOURNAL}.lock").unlink(missing_ok=True)  # of a killed process: this one holds the folder's lock
    with explain_read_errors(path, RESTORE_HINT):
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path))))
        direction: Literal["maximize", "minimize"] = "maximize" if metric.higher_is_better else "minimize"
        study = create_study(storage=storage, study_name="tune", direction=direction, load_if_exists=True)
        for trial in study.get_trials(states=(TrialState.RUNNING,)):  # of a killed process
            study.tell(trial.number, state=TrialState.FAIL)
        return study


def finished_trials(study: "optuna.Study") -> "list[optuna.trial.FrozenTrial]":
    from optuna.trial import TrialState

    return study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))


def prepare_trial(study: "optuna.Study", config: Config, space: Space) -> bool:
    """Prepare the next trial of a study; False when all combinations have been tried.

    The first has the config's settings. Proposals depend on the seed and the finished trials only, so that a search
    goes on with the same values after a kill.
    """
    from optuna.pruners import MedianPruner
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    finished, seed, first = finished_trials(study), config.run.seed, current_settings(config, space)
    study.sampler = TPESampler(n_startup_trials=STARTUP_TRIALS, seed=seed_for(seed, "tune", len(finished)) % 2**32)
    study.pruner = MedianPruner(n_startup_trials=STARTUP_TRIALS, n_warmup_steps=config.server.rounds // 4)
    if study.get_trials(states=(TrialState.WAITING,)):  # prepared by a process that was killed
        return True
    combinations = list_combinations(space, seed)
    if not finished and first:
        study.enqueue_trial(first)
    elif combinations is not None:
        tried = [trial.params for trial in finished]
        remaining = next((settings for settings in combinations if settings not in tried), None)
        if remaining is None:
            return False
        study.enqueue_trial(remaining)
    return True


def suggest_settings(trial: "optuna.Trial | optuna.trial.FrozenTrial", space: Space) -> Settings:
    """Ask Optuna for a value of each setting; numbers are rounded to three digits."""
    settings: Settings = {}
    for name, values in space.items():
        if isinstance(values, Choices):
            settings[name] = trial.suggest_categorical(name, values.values)
        elif values.whole:
            settings[name] = trial.suggest_int(name, *values.ends, log=values.log)
        else:
            settings[name] = values.rounded(trial.suggest_float(name, *values.ends, log=values.log))
    return settings


def train_trial(
    trial: "optuna.Trial",
    config: Config,
    space: Space,
    open_data: Callable[[Config], Federation],
    on_round: Callable[[int], None],
) -> float:
    """Train one trial and return its last score, the objective of the search.

    Optuna prunes it where its score is worse than the median of the finished trials. One that fails counts as pruned,
    and so does one whose metric the validation images of no domain define.
    """
    from optuna import TrialPruned

    score: float | None = None
    try:
        config = apply_settings(config, suggest_settings(trial, space))
        with open_rounds(config, make_algorithm(config.algorithm), open_data(config), None, False) as (_, rounds):
            for record in rounds:
                on_round(record.round)
                if record.score_mean is None:
                    continue
                score = record.score_mean
                trial.set_user_attr("worst", record.score_worst)
                trial.report(score, record.round)
                if trial.should_prune() and record.round < config.server.rounds:
                    raise TrialPruned
    except FedcirError as error:  # it diverged, or its values do not go together
        trial.set_user_attr("error", str(error))
        raise TrialPruned from None
    if score is None:
        trial.set_user_attr("error", "the validation examples of no domain define the metric")
        raise TrialPruned
    return score
