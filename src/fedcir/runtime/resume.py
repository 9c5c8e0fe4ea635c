"""Attach a session to a run folder: begin a run there, or check and resume the one that it holds."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedcir.algorithms.algorithm import Algorithm
from fedcir.client.state import GENERATIONS, ClientStore, has_client_state
from fedcir.config import Config, ModelConfig, TaskConfig, find_differences
from fedcir.data.federation import Roster
from fedcir.errors import InputError
from fedcir.files import RESTORE_HINT, hash_file
from fedcir.models.site_statistics import drop_site_statistics
from fedcir.models.tensors import find_mismatch
from fedcir.plugins import is_file_plugin
from fedcir.runtime.file_formats import find_custom_files, hash_weights
from fedcir.runtime.resolution import get_hyper_parameters
from fedcir.runtime.rounds import summarise
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.session import Session
from fedcir.types import ServerState


def use_saved_code(config: Config, folder: Path, trust_code: bool) -> Config:
    """Point the config of a run at the copies of custom code in its folder; refuse code that is not trusted."""
    algorithm = replace(config.algorithm, name=use_saved_algorithm(config.algorithm.name, folder, trust_code))
    model, task = use_saved_model(config.model, folder, trust_code), use_saved_task(config.task, folder, trust_code)
    return replace(config, algorithm=algorithm, model=model, task=task)


def use_saved_algorithm(name: str, folder: Path, trust_code: bool) -> str:
    if not name.endswith(".py"):
        return name
    _require_trust(trust_code, folder, "algorithm", name)
    return str(folder / Path(name).name)


def use_saved_data(config: Config, folder: Path, trust_code: bool) -> Config:
    """Point the config of a run at the saved code of its task; refuse it and that of its dataset if not trusted."""
    if is_file_plugin(config.data.name):
        _require_trust(trust_code, folder, "dataset", config.data.name)
    return replace(config, task=use_saved_task(config.task, folder, trust_code))


def use_saved_task(task: TaskConfig, folder: Path, trust_code: bool) -> TaskConfig:
    if task.name is None or not is_file_plugin(task.name):
        return task
    _require_trust(trust_code, folder, "task", task.name)
    return replace(task, name=str(folder / Path(task.name).name))


def use_saved_model(model: ModelConfig, folder: Path, trust_code: bool) -> ModelConfig:
    if not model.foreign:
        return model
    _require_trust(trust_code, folder, "model", model.name)
    return model if model.file is None else replace(model, name=str(folder / Path(model.name).name))


def resolve_resumed_config(saved: Config, overrides: Mapping[str, Any], folder: Path, trust_code: bool) -> Config:
    """Return the saved config of a run to resume. Code that `overrides` names is the user's own and needs no trust."""
    if not overrides.get("algorithm", {}).get("name"):
        name = use_saved_algorithm(saved.algorithm.name, folder, trust_code)
        saved = replace(saved, algorithm=replace(saved.algorithm, name=name))
    if not overrides.get("model", {}).get("name"):
        saved = replace(saved, model=use_saved_model(saved.model, folder, trust_code))
    if not overrides.get("task", {}).get("name"):
        saved = replace(saved, task=use_saved_task(saved.task, folder, trust_code))
    for section, field, name in (
        ("server", "aggregation", saved.server.aggregation),
        ("data", "name", saved.data.name),
    ):
        if is_file_plugin(name) and not overrides.get(section, {}).get(field):
            _require_trust(trust_code, folder, f"{section}.{field}", name)
    return saved


def has_custom_code(config: Config) -> bool:
    names = (config.algorithm.name, config.task.name or "", config.data.name)
    return config.model.foreign or any(map(is_file_plugin, names))


def _require_trust(trust_code: bool, folder: Path, role: str, name: str) -> None:
    if not trust_code:
        code = f"code of its own, {name}, which was not run"
        raise InputError(f"the {role} of {folder} is {code}: if you trust it, set trust_code")


MAY_DIFFER = {
    "server.rounds",
    "server.checkpoint_every",
    "data.root",
    "data.lists",
    "data.table",
    "partition.file",
    "privacy.epsilon",
    "run.device",
    "run.workers",
}
"""Settings that a resume may change."""

SETTINGS_WITH_CODE = ("algorithm.name", "model.name", "model.arguments", "task.name")
"""Settings that may name custom code."""

UNRESOLVED = {"server.active": None, "run.layout": "auto"}
"""Settings that are resolved only when a run is opened."""


def attach_run_folder(session: Session, out: Path, resume: bool, from_round: int | None = None) -> None:
    """Attach a session to a folder: begin a run in it, or resume the one that it holds.

    With `from_round`, the run continues from the newest checkpoint at or before that round. Later records are backed
    up, because across sites a repeated round may give other results.
    """
    config, roster = session.config, session.roster
    session.folder = folder = RunFolder(out, session.identity)
    folder.check_start(resume, from_round)
    if not folder.exists:
        if session.releases is not None:
            session.releases.start()
        folder.create(config, roster.manifest, roster.hash_images(), session.frozen_hash)
        return
    check_resumed_settings(folder, config, session.algorithm)
    check_data(folder, config, roster)
    if folder.file_hash("frozen") not in (None, session.frozen_hash):
        reason = "with other weights in the frozen part of its encoder than are here now"
        raise InputError(f"{out} was started {reason}: restore them, or choose another folder")
    _check_epsilon(session, folder)
    store, damage = ClientStore(out / "clients"), list[str]()
    if (state := _find_resume_state(folder, store, from_round, damage)) is not None:
        if state.round < config.server.rounds:
            check_tensors(folder, state, session)
        session.state = state
    elif from_round:
        saved = " and ".join(map(str, folder.checkpoint_rounds())) or "none"
        reason = f" ({'; '.join(damage)})" if damage else ""
        lacking = f"no checkpoint at or before round {from_round}, but of {saved}{reason}"
        raise InputError(f"{out} has {lacking}: choose a later round, or 0 to begin again")
    round = session.state.round
    _check_site_states(session, folder, from_round)
    _add_notes(session, *(f"{fault}; continuing from round {round}" for fault in damage))
    if not _has_ended(session, folder):
        if from_round is not None:
            store.rewind(round)
        if (repeated := session.count_repeated(round)) > 0:
            _add_notes(session, f"{repeated} rounds after round {round} were begun before, and epsilon counts them too")
        session.records = folder.rewind(round, backup=from_round is not None)
        folder.create(config, roster.manifest, roster.hash_images(), session.frozen_hash)  # server.rounds may be larger
        return
    session.records = folder.records()
    if _is_summary_stale(folder, session):
        folder.finish(summarise(session), session.model, session.card)
        _add_notes(session, f"{out}/summary.json did not belong to rounds.jsonl, and was written again from it")
    elif not folder.has_model():
        folder.save_model(session.model, session.card)
        note = f"{out}/model.safetensors was missing or damaged, and was written again from the last checkpoint"
        _add_notes(session, note)


def _has_ended(session: Session, folder: RunFolder) -> bool:
    """Check whether the session's state is that after the last round, which patience may have ended early."""
    if not folder.finished:
        return False
    records = folder.records()
    if records and records[-1].round == session.state.round:
        session.records = records
    return session.finished


def _add_notes(session: Session, *notes: str) -> None:
    session.notes = (*session.notes, *notes)


def _check_epsilon(session: Session, folder: RunFolder) -> None:
    """Refuse to resume if epsilon would be smaller than on record; add a note if it is larger."""
    config, records = session.config, folder.records()
    last = records[-1] if records else None
    rounds_begun = 0 if session.releases is None else session.releases.count()
    if last is None or last.epsilon is None:
        return
    if session.releases is not None and rounds_begun < last.round:
        counts = f"counts {rounds_begun} rounds, but {last.round} are on record"
        raise InputError(f"{session.releases.path} {counts}: {RESTORE_HINT}")
    epsilon = session.epsilon_after(last.round, max(0, rounds_begun - last.round)) or 0.0
    recorded = f"{folder.path}/rounds.jsonl has epsilon {last.epsilon:.3g} after round {last.round}"
    if epsilon < last.epsilon * (1 - 1e-6):
        counted = "its settings add no noise" if not config.privacy.noise else f"its settings give {epsilon:.3g}"
        source = "" if session.releases is None else f" and {rounds_begun} rounds that `releases` counts"
        raise InputError(f"{recorded}, but {counted}{source}: one of its files was replaced; {RESTORE_HINT}")
    if epsilon > last.epsilon * (1 + 1e-6):
        _add_notes(session, f"{recorded}, and it counts as {epsilon:.3g} from now on")


def _is_summary_stale(folder: RunFolder, session: Session) -> bool:
    """Check whether the summary is damaged or differs from the rounds on record."""

    name = session.roster.builder.task.primary.name

    def key(summary: Mapping[str, Any]) -> tuple[Any, ...]:
        return summary["rounds"], (summary["final"] or {}).get(name), summary.get("privacy", {}).get("epsilon")

    try:
        return key(folder.summary()) != key(summarise(session))
    except InputError:
        return True


def _find_resume_state(
    folder: RunFolder, store: ClientStore, from_round: int | None, damage: list[str]
) -> ServerState | None:
    """Find the newest undamaged checkpoint, at most of `from_round`, whose client states are undamaged too."""
    for state, client_rounds in folder.checkpoints(damage.append):
        if from_round is not None and state.round > from_round:
            continue
        if (fault := store.fault(state.round, client_rounds)) is None:
            return state
        damage.append(fault.removesuffix(f"; {RESTORE_HINT}"))
    return None


def _check_site_states(session: Session, folder: RunFolder, from_round: int | None) -> None:
    """Refuse to go back further than the client states that sites still have."""
    reach = len(folder.records()) - GENERATIONS * session.config.server.checkpoint_every
    sites = "key" in session.roster.manifest and has_client_state(session.config, session.algorithm)
    if from_round is not None and sites and 0 < session.state.round < reach:
        raise InputError(
            f"sites keep what {session.config.algorithm.name} needs of earlier rounds, but no longer that of round "
            f"{session.state.round}: go back to round {reach} at most, or to 0 to begin again"
        )


def check_resumed_settings(folder: RunFolder, config: Config, algorithm: Algorithm) -> None:
    """Refuse to resume a run with other settings than it was started with."""
    requested = replace(config, algorithm=replace(config.algorithm, fields=get_hyper_parameters(algorithm)))
    _check_files(folder, config)
    for key, (old, new) in find_differences(folder.config(), requested).items():
        if (
            key not in MAY_DIFFER
            and not (key in UNRESOLVED and new == UNRESOLVED[key])
            and not _is_same_file(key, old, new)
            and not (key == "model.weights" and old and new and folder.file_hash("weights") is not None)  # equal files
        ):
            raise InputError(f"{folder.path} was started with {key}={old}, not {new}: choose another folder")
    old_rounds, new_rounds = folder.config().server.rounds, config.server.rounds
    if new_rounds < old_rounds:
        reason = f"was started with {old_rounds} rounds, so it cannot end after {new_rounds}"
        raise InputError(f"{folder.path} {reason}: ask for more")
    if new_rounds > old_rounds and (algorithm.uses_total_rounds or config.local.schedule != "constant"):
        cause = config.algorithm.name if algorithm.uses_total_rounds else f"the {config.local.schedule} schedule"
        reason = f"because {cause} depends on their number"
        raise InputError(f"{folder.path} cannot be extended to {new_rounds} rounds, {reason}: choose another folder")


def check_tensors(folder: RunFolder, state: ServerState, session: Session) -> None:
    """Refuse to resume from a checkpoint whose networks have other tensors than this version builds."""
    for saved, built in ((state.shared, session.state.shared), (state.private, session.state.private)):
        for name in session.modules.keys() & saved.keys() & built.keys():
            if (
                fault := find_mismatch(*({name: drop_site_statistics(groups[name])} for groups in (saved, built)))
            ) is not None:
                raise InputError(
                    f"{folder.path} was begun by another version of fedcir, which built its {name} differently "
                    f"({fault}): start anew in another folder, or resume it with that version"
                )


def check_data(folder: RunFolder, config: Config, roster: Roster) -> None:
    """Refuse to resume a run on other data than it was started on."""
    if folder.manifest().get("hash") != roster.manifest["hash"]:
        raise InputError(
            f"{folder.path} was started on other data than {config.data.name} holds now: choose another folder"
        )


def _check_files(folder: RunFolder, config: Config) -> None:
    """Refuse custom code or weights that have changed since the run's first round; files may have moved."""
    original, weights = folder.file_hash("weights"), hash_weights(config.model)
    if original is not None and weights is not None and weights != original:
        source = config.model.weights or config.model.name
        raise InputError(f"{source} has changed since {folder.path} was started: choose another folder")
    copies = {kind: folder.path / file.name for kind, file in find_custom_files(folder.config()).items()}
    for kind, path in find_custom_files(config).items():
        original, copy = folder.file_hash(kind), copies.get(kind)
        if original is None or copy is None:
            continue
        if path.is_file() and hash_file(path) != original and folder.records():
            raise InputError(
                f"{path} has changed since {folder.path} was started: choose another folder (that run's copy is {copy})"
            )
        if copy.is_file() and hash_file(copy) != original:
            raise InputError(f"{copy} has changed since the run was started: restore it, or choose another folder")


def is_same_code(config: Config, out: Path) -> bool:
    """Check whether a run uses the same custom code as the config, which makes it trusted."""
    saved = RunFolder(out).config()
    changes = {key: pair for key, pair in find_differences(saved, config).items() if key in SETTINGS_WITH_CODE}
    if any(not _is_same_file(key, *pair) for key, pair in changes.items()):
        return False
    return all(hash_file(out / path.name) == hash_file(path) for path in find_custom_files(config).values())


def _is_same_file(key: str, old: Any, new: Any) -> bool:
    """Check whether both name one file of custom code; its content is checked elsewhere."""
    if key not in ("algorithm.name", "model.name", "task.name") or not isinstance(old, str) or not isinstance(new, str):
        return False
    return ".py" in Path(old).name and Path(old).name == Path(new).name  # ./mine.py or ./mine.py:make
