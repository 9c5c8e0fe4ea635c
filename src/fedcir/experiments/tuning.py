"""Search for good settings of one algorithm with Optuna: short runs, judged on validation images only."""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedcir.algorithms import make_algorithm, resolve_config
from fedcir.config import (
    Config,
    ConfigRequest,
    dump_toml,
    find_differences,
    make_paths_absolute,
    merge_tables,
    nest_settings,
)
from fedcir.data.federation import build_federation, partition_dataset
from fedcir.data.manifest import build_manifest
from fedcir.errors import InputError, RunError
from fedcir.experiments.batch import latest_path, run_name, unused_path
from fedcir.experiments.recommendation import use_validation_images, with_validation
from fedcir.experiments.search import (
    JOURNAL,
    STARTUP_TRIALS,
    SearchPlan,
    Settings,
    Space,
    SpaceRequest,
    apply_settings,
    current_settings,
    open_study,
    parse_space,
    propose_trial,
    quiet_optuna,
    run_trial,
    split_space,
    store_trial,
)
from fedcir.files import LOCK_TIMEOUT, acquire_lock, check_no_links, write_file
from fedcir.reporting.charts import save_figure
from fedcir.runtime.resume import MAY_DIFFER, resolve_resumed_config
from fedcir.runtime.simulation import check_run
from fedcir.types import OnNote, OnProgress, ignore_progress
from fedcir.validation import Between

if TYPE_CHECKING:
    import optuna

DEFAULT_TRIALS = 12
MAY_CHANGE = MAY_DIFFER - {"server.rounds"}
"""Settings that may change on resume: the trials stay comparable."""
MIN_TRIALS_FOR_IMPORTANCES = 8


@dataclass(frozen=True)
class Trial:
    """A trial that has ended."""

    number: int
    """From 1."""
    settings: Settings
    state: Literal["done", "stopped", "failed"]
    """It ran all rounds, was stopped early, or raised an error."""
    rounds: list[int]
    """Rounds after which it was evaluated."""
    accuracy: list[float]
    """Mean accuracy over domains on validation images after each of these rounds."""
    worst: float | None
    """Accuracy of the worst domain after the last of these rounds."""
    why: str = ""
    """Error message of a failed trial."""

    @property
    def score(self) -> float:
        """Accuracy after its last evaluation; 0 if it has none."""
        return self.accuracy[-1] if self.accuracy else 0.0


OnTrial = Callable[[Trial], None]
"""Receives every trial that has ended."""


@dataclass(frozen=True)
class Tuning:
    """The result of a search. Accuracies are fractions, on validation images, the mean over domains."""

    out: Path
    config: Config
    """Settings that all trials share."""
    space: Space
    """The values that were tried, by setting."""
    study: "optuna.Study"
    """Optuna's study of the finished trials."""

    @cached_property
    def trials(self) -> list[Trial]:
        return [_trial_from_optuna(trial, self.space) for trial in self.study.get_trials()]

    @property
    def best(self) -> Trial | None:
        """The most accurate trial that ran all rounds; the first of equals."""
        done = (trial for trial in self.trials if trial.state == "done")
        return max(done, key=lambda trial: (trial.score, -trial.number), default=None)

    @property
    def settings(self) -> Config:
        """The settings of the best trial."""
        return self.config if self.best is None else apply_settings(self.config, self.best.settings)

    @cached_property
    def importances(self) -> dict[str, float]:
        """Share of each setting in the variance of accuracies (fANOVA), largest first; empty with too few trials."""
        done = [trial for trial in self.trials if trial.state == "done"]
        varied = [name for name in self.space if len({repr(trial.settings[name]) for trial in done}) > 1]
        is_enough = len(self.trials) >= MIN_TRIALS_FOR_IMPORTANCES and len(done) >= STARTUP_TRIALS
        if not is_enough or not varied or len({trial.score for trial in done}) < 2:
            return {}
        with quiet_optuna() as optuna:
            evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
            shares = optuna.importance.get_param_importances(self.study, evaluator=evaluator, params=sorted(varied))
            return {name: float(share) for name, share in shares.items()}

    @property
    def reason(self) -> str:
        """The result in sentences."""
        best, first = self.best, self.trials[0]
        assert best is not None
        text = f"Trial {best.number} of {len(self.trials)} is the best: {best.score:.1%} on validation images"
        if first.state != "done" or first.settings != current_settings(self.config, self.space):
            return f"{text}."
        if best is first:
            return f"{text}. It has the settings that you gave: no other trial beats them."
        gain = 100 * (best.score - first.score)
        return (
            f"{text}, {gain:.1f} points above the settings that you gave. "
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
        """A settings file for `fedcir run` that repeats the best trial to the bit."""
        comments = [
            self.reason,
            f"Tried: {'; '.join(f'{name} {values}' for name, values in self.space.items())}.",
            "This run repeats the trial to the bit. Without data.val_fraction, it trains on the validation images too.",
        ]
        config = replace(self.settings, run=replace(self.settings.run, workers=None))
        defaults = resolve_config(ConfigRequest(options={"algorithm": config.algorithm.name}))
        changed = {name: new for name, (_, new) in find_differences(defaults, config).items() if new is not None}
        names = {"data": {"name": config.data.name}, "algorithm": {"name": config.algorithm.name}}
        tables = make_paths_absolute(merge_tables(names, nest_settings(changed)))
        return "".join(f"# {line}\n" for line in comments) + "\n" + dump_toml(tables)

    def save(self) -> None:
        """Write trials.jsonl, and best.toml once a trial has run all rounds."""
        lines = [json.dumps(asdict(trial), ensure_ascii=False) for trial in self.trials]
        write_file(self.out / "trials.jsonl", "".join(f"{line}\n" for line in lines))
        if self.best is not None:
            write_file(self.out / "best.toml", self.toml())

    def draw(self) -> None:
        """Draw trials.png, accuracy by setting, and importances.png where there are importances."""
        from matplotlib import pyplot

        with quiet_optuna() as optuna, warnings.catch_warnings(action="ignore"), pyplot.style.context("default"):
            from optuna.visualization import matplotlib as plots

            axes = plots.plot_slice(self.study, list(self.space), target_name="validation accuracy")
            pictures = {"trials.png": np.ravel(np.array(axes))[0].figure}
            if self.importances:
                evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
                axes = plots.plot_param_importances(self.study, evaluator, params=sorted(self.importances))
                pictures["importances.png"] = axes.figure
            for name, figure in pictures.items():
                save_figure(figure, self.out / name)
                pyplot.close(figure)


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
    on_trial: OnTrial = ignore_progress,
    **options: Any,
) -> Tuning:
    """Search for good settings of one algorithm, as `fedcir tune` does.

    `options` are those of the command, such as algorithm="fedprox", dataset="pacs", data_root="data/pacs" or rounds=20.
    `space` adds settings to vary or replaces the ranges that the algorithm declares: {"local.lr": "1e-3..1e-1",
    "algorithm.mu": "0.1,0.5,0.9"}. All trials have the same seed, clients and batches. They are judged on validation
    images, a fifth of the training images unless data.val_fraction says otherwise; test images are not used.
    The trials go into `out`, a new folder in runs/ if not given; `resume` continues there, also after a kill.
    """
    with quiet_optuna():  # refuse early if it is not installed
        pass
    if trials is not None:
        Between(1, 100_000).check("trials", trials)
    request = ConfigRequest.from_options(options, preset, config, set)
    folder = _choose_folder(request, out, resume)
    with _lock_folder(folder):
        plan = _resume_plan(folder, request, space, trials) if resume else _new_plan(folder, request, space, trials)
        ranges = parse_space(plan.config, plan.space)
        partition = partition_dataset(plan.config, partial(on_work, what="decoding images"))
        domains, clients = use_validation_images(*partition)
        data = build_manifest(domains, clients)["hash"]
        if plan.data not in ("", data):
            raise InputError(f"{folder} was started on other data: choose another folder")
        check_run(plan.config, make_algorithm(plan.config.algorithm), build_federation(plan.config, domains, clients))
        replace(plan, data=data).save(folder)
        on_note(f"trials are saved in {folder}")
        tuning = Tuning(folder, plan.config, ranges, open_study(folder))
        rounds = plan.config.server.rounds
        while (number := len(tuning.trials)) < plan.trials:
            proposal = propose_trial(tuning.study, plan.config, ranges)
            if proposal is None:
                on_note(f"all {number} combinations have been tried")
                break
            trial, settings = proposal

            def report_round(round: int, done: int = number) -> None:
                on_work(done * rounds + round, plan.trials * rounds, f"trial {done + 1} of {plan.trials}")

            accuracy, result = run_trial(trial, plan.config, settings, domains, clients, report_round)
            store_trial(tuning.study, ranges, settings, accuracy, result)
            tuning = replace(tuning)  # without the cached trials
            tuning.save()
            on_trial(tuning.trials[-1])
    if tuning.best is None:
        raise RunError(f"no trial came to an end: {next(trial.why for trial in tuning.trials if trial.why)}")
    tuning.draw()
    return tuning


def _choose_folder(request: ConfigRequest, out: str | Path | None, resume: bool) -> Path:
    if out is not None:
        return Path(out)
    default = Path("runs", f"tune-{run_name(resolve_config(request))}")
    return latest_path(default) if resume else unused_path(default)


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder of a search; remove it again if nothing was saved in it."""
    plan = folder / "settings.toml"
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: choose another folder")
    if not plan.is_file() and folder.is_dir() and any(path.name[0] != "." for path in folder.iterdir()):
        raise InputError(f"{folder} holds other files and no trials: choose another folder")
    check_no_links(folder)
    lock = acquire_lock(folder / ".lock", LOCK_TIMEOUT)
    if lock is None:
        raise InputError(f"another process is tuning in {folder}: wait for it, or choose another folder")
    with lock:
        try:
            yield
        finally:
            if not plan.is_file():
                with contextlib.suppress(OSError):
                    (folder / ".lock").unlink()
                    folder.rmdir()


def _new_plan(folder: Path, request: ConfigRequest, space: SpaceRequest, trials: int | None) -> SearchPlan:
    if (folder / "settings.toml").is_file():
        raise InputError(f"{folder} already holds trials: resume them, or choose another folder")
    config = with_validation(resolve_config(request))
    return SearchPlan(config, _to_texts(parse_space(config, space)), trials or DEFAULT_TRIALS)


def _resume_plan(folder: Path, request: ConfigRequest, space: SpaceRequest, trials: int | None) -> SearchPlan:
    """The saved plan with the settings that may change; other changes are refused."""
    if not (folder / "settings.toml").is_file():
        raise InputError(f"{folder} holds no trials to continue: start without resume")
    saved = SearchPlan.load(folder)
    if (folder / "trials.jsonl").exists() and not (folder / JOURNAL).exists():
        raise InputError(f"{folder} holds trials of an earlier version, which cannot be continued: start a new search")
    try:
        resolve_resumed_config(saved.config, request.tables(), folder, trust_code=False)
    except InputError as error:  # the folder holds no copy of the code
        raise InputError(f"{str(error).partition(': if ')[0]}: if it is yours, name it again") from None
    config = with_validation(request.resolve_over(saved.config))
    for name, (old, new) in find_differences(saved.config, config).items():
        if name not in MAY_CHANGE:
            raise InputError(f"{folder} was started with {name}={old}, not {new}: choose another folder")
    for name, text in _to_texts(parse_space(config, {**saved.space, **split_space(space)})).items():
        if (old := saved.space.get(name)) != text:
            raise InputError(f"{folder} was started with the space {name}={old}, not {text}: choose another folder")
    return replace(saved, config=config, trials=trials or saved.trials)


def _trial_from_optuna(trial: "optuna.trial.FrozenTrial", space: Space) -> Trial:
    accuracy, attributes = dict(sorted(trial.intermediate_values.items())), trial.user_attrs
    settings = {name: trial.params[name] for name in space}
    state, worst, error = attributes["state"], attributes["worst"], attributes["error"]
    return Trial(trial.number + 1, settings, state, list(accuracy), list(accuracy.values()), worst, error)


def _to_texts(space: Space) -> dict[str, str]:
    return {name: str(values) for name, values in space.items()}
