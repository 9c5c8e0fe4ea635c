"""Flower's ServerApp: the round loop of every run, with Flower's nodes as clients.

The run folder is that of a run in process, so a ServerApp that was killed resumes from its checkpoint: Flower itself
cannot resume.
"""

import logging
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcir.algorithms import make_algorithm, resolve_config
from fedcir.algorithms.algorithm import Algorithm
from fedcir.client.state import check_local_data, find_local_cause
from fedcir.config import Config, ConfigRequest
from fedcir.data.federation import SampleCounts, build_roster
from fedcir.errors import FedcirError, InputError, RunError
from fedcir.files import send_event
from fedcir.flower.client_app import state_folder
from fedcir.flower.flwr_adapter import hide_traceback
from fedcir.flower.site_data import AuditLog
from fedcir.flower.site_manifest import build_site_manifest, release_keys
from fedcir.flower.transport import ROUND_TIMEOUT, SITES, WAIT_SECONDS, Clock, GridTransport, NodeRegistry
from fedcir.flower.wire import TaskHeader
from fedcir.machine import retain_freed_memory, use_threads
from fedcir.models.hugging_face import find_folder
from fedcir.runs.reader import describe_saved_model
from fedcir.runtime.resume import attach_run_folder
from fedcir.runtime.rounds import Rounds, run_rounds
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.session import Session, open_session
from fedcir.types import RoundRecord
from fedcir.validation import check_type

app = ServerApp()
log = logging.getLogger("flwr")


@dataclass(frozen=True)
class DeploymentSettings:
    """The settings of Flower's run-config."""

    config: Config
    out: Path
    resume: bool = False
    sites: int = SITES
    """Number of sites that must be connected before the run begins."""
    wait: float = WAIT_SECONDS
    """Seconds to wait for them."""
    timeout: float = ROUND_TIMEOUT
    """Seconds that the clients of a round have to reply."""
    report: bool = True
    """Whether the run folder gets a report.html."""
    new_keys: tuple[str, ...] = ()
    """Sites that may reconnect with another key than the one that their name is bound to, or `all`."""
    from_round: int | None = None
    """Latest round that a resumed run goes back to."""

    @classmethod
    def from_run_config(cls, values: Mapping[str, Any]) -> "DeploymentSettings":
        file, preset = str(values.get("config", "")), str(values.get("preset", ""))
        assignments = shlex.split(str(values.get("set", "")))
        request = ConfigRequest(preset or None, _find_file(file) if file else None, assignments=assignments)
        numbers: dict[str, Any] = {"sites": SITES, "wait": WAIT_SECONDS, "timeout": ROUND_TIMEOUT}
        for name, default in numbers.items():
            numbers[name] = number = values.get(name, default)
            whole = isinstance(default, int)
            if isinstance(number, bool) or not isinstance(number, int if whole else int | float) or number <= 0:
                raise InputError(f"{name} must be a {'whole ' * whole}number above 0, got {number!r}")
        from_round = check_type(values.get("from-round", -1), int, "from-round")
        return cls(
            resolve_config(request),
            Path(str(values.get("out") or "runs/flower")).expanduser(),
            bool(values.get("resume", False)),
            report=bool(values.get("report", True)),
            new_keys=tuple(shlex.split(str(values.get("new-keys", "")))),
            from_round=from_round if from_round >= 0 else None,
            **numbers,
        )


def _find_file(name: str) -> Path:
    """Find a TOML file by its path, or in the app's folder, which Flower puts on Python's path."""
    for folder in ("", *sys.path):
        if (path := Path(folder, name).expanduser()).is_file():
            return path
    raise InputError(f"config: there is no file {name}, neither at that path nor in the app's folder")


@app.main()
def main(grid: Grid, context: Context) -> None:
    try:
        settings = DeploymentSettings.from_run_config(context.run_config)
        with open_deployment(grid, settings) as (session, rounds):
            for note in session.notes:
                log.warning("note: %s", note)
            for record in rounds:
                log.info(_describe_round(record, session.config.server.rounds))
    except (FedcirError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:
            raise
        failure = RunError(f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error))
        send_event("failed", str(failure))
        log.error("fedcir stopped: %s", failure)
        hide_traceback(log, failure)
        raise failure from None
    from fedcir.reporting.run_report import try_report  # matplotlib, and only at the end

    page = settings.out / "report.html"
    wrote = settings.report and try_report([settings.out], page, on_note=lambda note: log.warning("note: %s", note))
    log.info(describe_saved_model(RunFolder(settings.out).summary()))
    log.info("saved in %s%s", settings.out, ", with a report.html to open" if wrote else "")


@contextmanager
def open_deployment(
    grid: Grid, settings: DeploymentSettings, clock: Clock | None = None
) -> Iterator[tuple[Session, Rounds]]:
    """Open a run across the sites of a grid, and its rounds for the caller to iterate over."""
    config = settings.config
    algorithm = make_algorithm(config.algorithm)
    check_deployable(config, algorithm)
    folder = RunFolder(settings.out)
    audit = AuditLog(state_folder(), {"by": "server", "run": str(grid.run.run_id)})
    with folder.lock(), _audit_run(audit, settings), use_threads(config.run.threads):
        retain_freed_memory()
        registry = NodeRegistry(grid, TaskHeader(config, {}), audit, clock or Clock())
        manifest = _load_manifest(folder, settings.resume)
        if manifest is not None:
            release_keys(manifest["clients"], settings.new_keys)
            registry.bind_keys(manifest["clients"])
        registry.wait(settings.sites, settings.wait)
        notes = [f"node {node} takes no part: {reason}" for node, reason in registry.failures.items()]
        if manifest is None:
            manifest, more_notes = build_site_manifest(registry.sites.values(), config)
            notes += more_notes
        registry.bind_keys(manifest["clients"])
        for client in manifest["clients"]:
            check_local_data(config, algorithm, client["domain"], client["train"] > 0)
        session = open_session(config, algorithm, build_roster(manifest, config, notes))
        session.deployed = True
        attach_run_folder(session, settings.out, settings.resume, settings.from_round)
        agreed: dict[str, Any] = {name: manifest[name] for name in ("task", "table") if name in manifest}
        registry.header = replace(registry.header, classes=tuple(manifest["classes"]), agreed=agreed)
        transport = GridTransport(registry, session, manifest["clients"], manifest["key"], settings.timeout)
        with closing(_audit_rounds(run_rounds(session, transport), audit, manifest)) as rounds:
            yield session, rounds


@contextmanager
def _audit_run(audit: AuditLog, settings: DeploymentSettings) -> Iterator[None]:
    """Record when a run begins, and how it ends."""
    audit.record("began", algorithm=settings.config.algorithm.name, out=str(settings.out), resume=settings.resume)
    try:
        yield
    except BaseException as error:
        with suppress(RunError):  # the error that stopped the run matters more
            audit.record("stopped", reason=str(error) or type(error).__name__)
        raise
    audit.record("ended", finished=RunFolder(settings.out).finished)


def _audit_rounds(rounds: Rounds, audit: AuditLog, manifest: Mapping[str, Any]) -> Rounds:
    """Yield the same rounds, recording each with the clients that were dropped from it."""
    domains = {str(client["id"]): client["domain"] for client in manifest["clients"]}
    with closing(rounds):  # saves the last complete round if the caller stops early
        for record in rounds:
            audit.record("round", round=record.round, bytes_down=record.bytes_down, bytes_up=record.bytes_up)
            for client, reason in record.dropped.items():
                audit.record("dropped", round=record.round, client=client, site=domains.get(client), reason=reason)
            yield record


def check_deployable(config: Config, algorithm: Algorithm) -> None:
    """Refuse what needs all data in one place, and experiments with malicious clients."""
    if config.attack.kind != "none":
        raise InputError(f"attack.kind={config.attack.kind} is for experiments on one machine: use `fedcir run`")
    if config.partition.exclude:
        raise InputError("partition.exclude is for runs on one machine: start every site except those")
    if config.model.start != "none":
        raise InputError(f"model.start={config.model.start} is for runs on one machine: leave it out")
    if algorithm.pools:
        raise InputError(f"{config.algorithm.name} trains on all data in one place, not across sites: use `fedcir run`")
    if find_folder(config.model) is not None:  # every site has a copy
        return
    if config.model.weights is not None and config.model.frozen_by is not None:
        raise InputError(
            f"model.weights cannot be used with {config.model.frozen_by} across sites, which do not have the file: "
            "let the encoder load its weights itself (model.name=./mine.py:make)"
        )
    if config.model.weights is not None and (setting := find_local_cause(config, algorithm)):
        raise InputError(f"model.weights cannot be used with {setting} across sites: leave one of them out")


def _load_manifest(folder: RunFolder, resume: bool) -> dict[str, Any] | None:
    """Load the manifest of a run to resume; errors are raised before any waiting for sites."""
    folder.check_start(resume)
    if not folder.exists:
        return None
    manifest = folder.manifest()
    if "key" not in manifest:
        raise InputError(f"{folder.path} was started on one machine, not across sites: choose another folder")
    counts = [client.get(part) for client in manifest["clients"] for part in SampleCounts._fields]
    if not all(isinstance(count, int) for count in counts):
        raise InputError(f"{folder.path} was started by an older fedcir: finish it with that, or choose another folder")
    return manifest


def _describe_round(record: RoundRecord, total: int) -> str:
    parts = [f"round {record.round}/{total}"]
    if scores := record.describe_scores():
        parts.append(scores)
    if record.epsilon is not None:
        parts.append(f"epsilon {record.epsilon:.3g}")
    parts += [f"client {client} dropped: {reason}" for client, reason in record.dropped.items()]
    return "  ".join(parts)
