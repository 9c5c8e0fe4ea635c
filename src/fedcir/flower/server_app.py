"""What runs beside the SuperLink: the one round loop, with Flower's nodes for clients.

The run folder is that of a run in process, so a ServerApp that was killed goes on where it was: Flower has no resume.
"""

import logging
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcir.algorithms import asked_config, make_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import Asked, Config
from fedcir.data.federation import Sizes
from fedcir.engine.folder import RunFolder
from fedcir.engine.machine import keep_memory, threads
from fedcir.engine.own import check_own, own_batchnorm
from fedcir.engine.resume import kept_in
from fedcir.engine.rounds import Rounds, run
from fedcir.engine.session import Session, open_session
from fedcir.flower.agreement import agree, roster_of
from fedcir.flower.audit_log import AuditLog
from fedcir.flower.keys import forget_keys
from fedcir.flower.patience import SITES, TIMEOUT, WAIT, Clock
from fedcir.flower.sites import Sites
from fedcir.flower.state import state_folder
from fedcir.flower.transport import GridTransport
from fedcir.flower.wire import Order
from fedcir.runs.events import tell
from fedcir.runs.run import describe_saved
from fedcir.types import FedcirError, InputError, RoundRecord, RunError

app = ServerApp()
log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Settings:
    """The run-config."""

    config: Config
    out: Path
    resume: bool
    sites: int
    """How many must be there before the run begins."""
    wait: float
    """Seconds to wait for them."""
    timeout: float
    """Seconds that the clients of a round have to answer."""
    report: bool = True
    """Whether the run folder gets a report.html."""
    new_keys: tuple[str, ...] = ()
    """Sites that may come back with another key than the one that their name is bound to, or `all`."""
    from_round: int | None = None
    """Where a resumed run goes back to, at most."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Settings":
        file, preset = str(given.get("config", "")), str(given.get("preset", ""))
        assignments = shlex.split(str(given.get("set", "")))
        asked = Asked(preset or None, _find(file) if file else None, assignments=assignments)
        out = Path(str(given.get("out") or "runs/flower")).expanduser()
        usual = {"sites": SITES, "wait": WAIT, "timeout": TIMEOUT}
        numbers = {name: given.get(name, default) for name, default in usual.items()}
        for name, number in numbers.items():
            whole = name != "sites" or isinstance(number, int)
            if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0 or not whole:
                raise InputError(f"{name} must be a {'whole ' * (name == 'sites')}number above 0, got {number!r}")
        back = given.get("from-round", -1)
        if isinstance(back, bool) or not isinstance(back, int):
            raise InputError(f"from-round must be a whole number, got {back!r}")
        resume, page = bool(given.get("resume", False)), bool(given.get("report", True))
        sites, wait, timeout = numbers.values()
        new_keys = tuple(shlex.split(str(given.get("new-keys", ""))))
        return cls(
            asked_config(asked),
            out,
            resume,
            int(sites),
            float(wait),
            float(timeout),
            page,
            new_keys,
            back if back >= 0 else None,
        )


@app.main()
def main(grid: Grid, context: Context) -> None:
    try:
        settings = Settings.of(context.run_config)
        with open_deployment(grid, settings) as (session, rounds):
            for note in session.notes:
                log.warning("note: %s", note)
            for record in rounds:
                log.info(_line(record, session.config.server.rounds))
    except (FedcirError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:
            raise
        stopped = RunError(_said(error))
        tell("failed", str(stopped))
        log.error("fedcir stopped: %s", stopped)
        _say_no_more(stopped)
        raise stopped from None
    page = ", with a report.html to open" if settings.report and _wrote_report(settings.out) else ""
    log.info(describe_saved(RunFolder(settings.out).summary()))
    log.info("saved in %s%s", settings.out, page)


@contextmanager
def open_deployment(grid: Grid, settings: Settings, clock: Clock | None = None) -> Iterator[tuple[Session, Rounds]]:
    """A run across the sites of a grid, and its rounds for the caller to go through."""
    config = settings.config
    algorithm = make_algorithm(config.algorithm)
    check_deployable(config, algorithm)
    folder = RunFolder(settings.out)
    audit = AuditLog(state_folder(), {"by": "server", "run": str(grid.run.run_id)})
    with folder.locked(), _noted(audit, settings), threads(config.run.threads):
        keep_memory()
        sites = Sites(grid, Order(config, {}), audit=audit, clock=clock or Clock())
        manifest = _saved_manifest(folder, settings.resume)
        if manifest is not None:
            forget_keys(manifest["clients"], settings.new_keys)
            sites.bind(manifest["clients"])
        sites.wait(settings.sites, settings.wait)
        notes = [f"node {node} takes no part: {reason}" for node, reason in sites.failures.items()]
        if manifest is None:
            manifest, more = agree(sites.introductions.values(), config)
            notes += more
        sites.bind(manifest["clients"])
        for client in manifest["clients"]:
            check_own(config, algorithm, client["domain"], client["train"] > 0)
        roster = roster_of(manifest, config, notes)
        session = open_session(config, algorithm, roster)
        session.deployed = True
        kept_in(session, settings.out, settings.resume, settings.from_round)
        sites.order = replace(sites.order, classes=tuple(manifest["classes"]))
        transport = GridTransport(sites, session, manifest["clients"], manifest["key"], settings.timeout)
        rounds = _each_noted(run(session, transport), audit, manifest)
        try:
            yield session, rounds
        finally:
            rounds.close()


@contextmanager
def _noted(audit: AuditLog, settings: Settings) -> Iterator[None]:
    """Note in the audit log when a run begins, and how it ends."""
    audit.note("began", algorithm=settings.config.algorithm.name, out=str(settings.out), resume=settings.resume)
    try:
        yield
    except BaseException as error:
        with suppress(RunError):  # what stopped the run is the news
            audit.note("stopped", reason=str(error) or type(error).__name__)
        raise
    audit.note("ended", finished=RunFolder(settings.out).finished)


def _each_noted(rounds: Rounds, audit: AuditLog, manifest: Mapping[str, Any]) -> Rounds:
    """The same rounds, each in the audit log, with the clients that were dropped from it."""
    names = {str(client["id"]): client["domain"] for client in manifest["clients"]}
    try:
        for record in rounds:
            audit.note("round", round=record.round, bytes_down=record.bytes_down, bytes_up=record.bytes_up)
            for client, reason in record.dropped.items():
                audit.note("dropped", round=record.round, client=client, site=names.get(client), reason=reason)
            yield record
    finally:
        rounds.close()  # saves the last whole round if the caller stops early


def check_deployable(config: Config, algorithm: Algorithm) -> None:
    """Refuse what cannot be done without moving data, and experiments with bad clients."""
    if config.attack.kind != "none":
        raise InputError(
            f"attack.kind={config.attack.kind} is for experiments on one machine, not across sites: use `fedcir run`"
        )
    if algorithm.pools:
        raise InputError(
            f"{config.algorithm.name} trains on all data in one place, so it cannot run across sites: "
            "use `fedcir run`, or another algorithm"
        )
    if config.model.weights is not None and config.model.freeze:
        raise InputError(
            "model.weights cannot be used with model.freeze across sites, which do not have the file: "
            "let the encoder load its weights itself (model.name=./mine.py:make)"
        )
    if config.model.weights is not None and (what := own_batchnorm(config, algorithm)):
        raise InputError(f"model.weights cannot be used with {what} across sites: leave one of them out")


def _said(error: FedcirError | OSError) -> str:
    return f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)


def _say_no_more(stopped: RunError) -> None:
    """Keep Flower's traceback and exit code from the log, which has one line on it already. The run still fails."""

    def is_news(record: logging.LogRecord) -> bool:
        told = record.exc_info is not None and record.exc_info[1] is stopped
        return not told and not record.getMessage().startswith("Exit Code")

    log.addFilter(is_news)


def _wrote_report(out: Path) -> bool:
    """Write the report of a finished run. What is wrong with it is a note: the run is done."""
    try:
        from fedcir.insight.report.report import (
            report,  # not for every message at every site, which imports this module
        )

        report([out], out / "report.html", trust_code=True)
    except Exception as error:
        log.warning("note: cannot write report.html: %s", error)
        return False
    return True


def _saved_manifest(folder: RunFolder, resume: bool) -> dict[str, Any] | None:
    """The manifest of a run to continue. What is wrong with it is reported before any waiting for sites."""
    if not folder.exists:
        return None
    if not resume:
        raise InputError(f"{folder.path} already holds a run: resume it, or choose another folder")
    manifest = folder.manifest()
    if "key" not in manifest:
        raise InputError(f"{folder.path} was started on one machine, not across sites: choose another folder")
    counts = [client.get(part) for client in manifest["clients"] for part in Sizes._fields]
    if not all(isinstance(count, int) for count in counts):
        raise InputError(f"{folder.path} was started by an older fedcir: finish it with that, or choose another folder")
    return manifest


def _find(name: str) -> Path:
    """A TOML file by its path, or in the app's folder, which Flower puts on Python's path."""
    for folder in ("", *sys.path):
        if (path := Path(folder, name).expanduser()).is_file():
            return path
    raise InputError(f"config: there is no file {name}, neither at that path nor in the app's folder")


def _line(record: RoundRecord, total: int) -> str:
    parts = [f"round {record.round}/{total}"]
    if record.accuracy_mean is not None:
        unseen = "" if record.accuracy_unseen is None else f", unseen {record.accuracy_unseen:.1%}"
        parts.append(f"acc {record.accuracy_mean:.1%}, worst {record.accuracy_worst:.1%}{unseen}")
    if record.epsilon is not None:
        parts.append(f"epsilon {record.epsilon:.3g}")
    parts += [f"client {client} dropped: {reason}" for client, reason in record.dropped.items()]
    return "  ".join(parts)
