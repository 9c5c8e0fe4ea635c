"""The search behind `fedcir tune`: the settings to try, and Optuna's proposals, pruning and storage."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from fedcir.algorithms import find_algorithm, make_algorithm
from fedcir.config import (
    SECTIONS,
    Choices,
    Config,
    NumberRange,
    SearchRange,
    config_from_tables,
    config_to_tables,
    dump_toml,
    make_paths_absolute,
    merge_tables,
    nest_settings,
    parse_range,
    read_toml,
)
from fedcir.data.domains import Domains
from fedcir.data.federation import build_federation
from fedcir.data.partition import ClientPartition
from fedcir.errors import FedcirError, InputError
from fedcir.files import RESTORE_HINT, explain_read_errors, open_append, write_file
from fedcir.rng import numpy_rng, seed_for
from fedcir.runtime.simulation import open_rounds
from fedcir.validation import check_type

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution

DEFAULT_SPACE = {"local.lr": "1e-3..1e-1"}
"""Settings that are varied for every algorithm."""
FIXED_SETTINGS = ("data.", "partition.", "run.", "server.rounds", "server.eval_every", "algorithm.name")
"""Settings that all trials must share to be comparable."""
STARTUP_TRIALS = 5
"""Random trials before the search uses earlier results, and before any trial is stopped early."""
JOURNAL = "study.journal"
"""File of Optuna's journal in the folder of a search."""

Space = dict[str, SearchRange]
"""Values to try, by setting."""
Settings = dict[str, Any]
"""One value of each setting."""
SpaceRequest = Sequence[str] | Mapping[str, str]


@dataclass(frozen=True)
class SearchPlan:
    """The request of a search, saved as settings.toml in its folder."""

    config: Config
    """Settings that all trials share, and those of the first trial."""
    space: dict[str, str]
    trials: int
    data: str = ""
    """Hash of the manifest: trials on other data are not comparable."""

    @classmethod
    def load(cls, folder: Path) -> "SearchPlan":
        tables = read_toml(folder / "settings.toml")
        with explain_read_errors(folder / "settings.toml", RESTORE_HINT):
            values = check_type(tables.get("fedcir", {}), dict, "fedcir")
            space = check_type(values.get("space"), dict[str, str], "fedcir.space")
            trials = check_type(values.get("trials"), int, "fedcir.trials")
            return cls(config_from_tables(tables), space, trials, check_type(values.get("data"), str, "fedcir.data"))

    def save(self, folder: Path) -> None:
        from fedcir import __version__

        values = {"version": __version__, "trials": self.trials, "data": self.data, "space": self.space}
        tables = make_paths_absolute(config_to_tables(self.config))
        write_file(folder / "settings.toml", dump_toml({"fedcir": values, **tables}))


def parse_space(config: Config, requested: SpaceRequest = ()) -> Space:
    """The ranges of a config's algorithm; requested ranges replace declared ones."""
    algorithm = find_algorithm(config.algorithm.name)
    settable = {field.name for field in fields(algorithm) if field.init}
    declared = {f"algorithm.{name}": text for name, text in algorithm.ranges.items() if name in settable}
    texts = {**DEFAULT_SPACE, **declared, **split_space(requested)}
    return {name: _check_range(config, name, parse_range(text, name)) for name, text in texts.items()}


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


def _check_range(config: Config, name: str, values: SearchRange) -> SearchRange:
    """Check that a setting can be varied and accepts the ends of its range."""
    if name.startswith(FIXED_SETTINGS):
        raise InputError(f"{name} cannot be tuned: all trials must share it to be comparable")
    if isinstance(values, NumberRange) and _takes_integers(config, name):
        if values.low % 1 or values.high % 1:
            raise InputError(f"{name} takes whole numbers, got {values}")
        values = replace(values, whole=True)
    for value in values.ends:
        make_algorithm(apply_settings(config, {name: value}).algorithm)
    return values


def _takes_integers(config: Config, setting: str) -> bool:
    section, _, name = setting.partition(".")
    cls = find_algorithm(config.algorithm.name) if section == "algorithm" else SECTIONS.get(section, object)
    hint = get_type_hints(cls).get(name)
    if isinstance(hint, UnionType):
        (hint,) = (arg for arg in get_args(hint) if arg is not NoneType)
    return hint is int


def apply_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    return config_from_tables(merge_tables(config_to_tables(config), nest_settings(settings)))


def current_settings(config: Config, space: Space) -> Settings:
    """The config's own values of the settings in the space, where they are within their ranges."""
    algorithm = make_algorithm(config.algorithm)
    settings = {}
    for setting, values in space.items():
        section, name = setting.split(".")
        value = getattr(algorithm if section == "algorithm" else getattr(config, section), name)
        if value in values:
            settings[setting] = value
    return settings


def list_combinations(space: Space, seed: int) -> list[Settings] | None:
    """Every combination once, in random order; None if a setting has a range or there are too many."""
    choices = [values.values for values in space.values() if isinstance(values, Choices)]
    if len(choices) < len(space) or math.prod(map(len, choices)) > 10**6:
        return None
    combinations = [dict(zip(space, values, strict=True)) for values in itertools.product(*choices)]
    return [combinations[row] for row in numpy_rng(seed, "combinations").permutation(len(combinations))]


@contextlib.contextmanager
def quiet_optuna() -> Iterator[Any]:
    """Import Optuna and silence its log of every study."""
    try:
        import optuna
    except ImportError:
        raise InputError("`fedcir tune` needs Optuna: pip install 'fedcir[tune]'") from None
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield optuna
    finally:
        optuna.logging.set_verbosity(verbosity)


def open_study(folder: Path) -> "Study":
    """Open Optuna's journal of finished trials, or start one. An incomplete last line, left by a kill, is removed."""
    path = folder / JOURNAL
    open_append(path).close()
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        write_file(path, content[: content.rfind(b"\n") + 1])
    (folder / f"{JOURNAL}.lock").unlink(missing_ok=True)  # of a killed process: this one holds the folder's lock
    with quiet_optuna() as optuna, explain_read_errors(path, RESTORE_HINT):
        journal = optuna.storages.journal
        backend = journal.JournalFileBackend(str(path), lock_obj=journal.JournalFileOpenLock(str(path)))
        storage = optuna.storages.JournalStorage(backend)
        study: Study = optuna.create_study(
            storage=storage, study_name="tune", direction="maximize", load_if_exists=True
        )
        return study


def to_distributions(space: Space) -> "dict[str, BaseDistribution]":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    distributions: dict[str, BaseDistribution] = {}
    for name, values in space.items():
        if not isinstance(values, NumberRange):
            distributions[name] = CategoricalDistribution(values.values)
        elif values.whole:
            distributions[name] = IntDistribution(int(values.low), int(values.high), log=values.log)
        else:
            distributions[name] = FloatDistribution(values.low, values.high, log=values.log)
    return distributions


def propose_trial(study: "Study", config: Config, space: Space) -> "tuple[Trial, Settings] | None":
    """Ask Optuna for the next trial. The first has the config's settings. None when all combinations have been tried.

    It is asked of a copy in memory: the stored study gets a trial when it has ended, so that a trial of a killed
    process is repeated with the same values.
    """
    finished, seed, first = study.get_trials(), config.run.seed, current_settings(config, space)
    with quiet_optuna() as optuna:
        sampler_seed = seed_for(seed, "tune", len(finished)) % 2**32
        warmup = config.server.rounds // 4
        copy = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(n_startup_trials=STARTUP_TRIALS, seed=sampler_seed),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS, n_warmup_steps=warmup),
        )
        copy.add_trials(finished)
        if not finished and first:
            copy.enqueue_trial(first)
        elif (combinations := list_combinations(space, seed)) is not None:
            tried = [trial.params for trial in finished]
            remaining = next((settings for settings in combinations if settings not in tried), None)
            if remaining is None:
                return None
            copy.enqueue_trial(remaining)
        trial = copy.ask(to_distributions(space))
    settings = {
        name: values.rounded(trial.params[name]) if isinstance(values, NumberRange) else trial.params[name]
        for name, values in space.items()
    }
    return trial, settings


def run_trial(
    trial: "Trial",
    config: Config,
    settings: Settings,
    domains: Domains,
    clients: Sequence[ClientPartition],
    on_round: Callable[[int], None],
) -> tuple[dict[int, float], dict[str, Any]]:
    """Train until the last round, or until the accuracy is below the median of the finished trials.

    Returns accuracies by round, and the trial's state, worst domain and error. A trial that fails is not an error.
    """
    accuracy: dict[int, float] = {}
    result: dict[str, Any] = {"state": "done", "worst": None, "error": ""}
    try:
        config = apply_settings(config, settings)
        federation, algorithm = build_federation(config, domains, clients), make_algorithm(config.algorithm)
        with open_rounds(config, algorithm, federation, None, False) as (_, rounds):
            for record in rounds:
                on_round(record.round)
                if record.accuracy is None or record.accuracy_mean is None:
                    continue
                accuracy[record.round], result["worst"] = record.accuracy_mean, min(record.accuracy.values())
                trial.report(record.accuracy_mean, record.round)
                if trial.should_prune() and record.round < config.server.rounds:
                    return accuracy, {**result, "state": "stopped"}
    except FedcirError as error:  # it diverged, or its values do not go together
        return accuracy, {**result, "state": "failed", "error": str(error)}
    return accuracy, result


def store_trial(
    study: "Study", space: Space, settings: Settings, accuracy: Mapping[int, float], result: Mapping[str, Any]
) -> None:
    """Add a finished trial to a study. Optuna counts a failed trial as pruned, the worst of all."""
    from optuna.trial import TrialState, create_trial

    done = result["state"] == "done"
    study.add_trial(
        create_trial(
            state=TrialState.COMPLETE if done else TrialState.PRUNED,
            value=accuracy[max(accuracy)] if done else None,
            params=settings,
            distributions=to_distributions(space),
            intermediate_values=dict(accuracy),
            user_attrs=dict(result),
        )
    )
