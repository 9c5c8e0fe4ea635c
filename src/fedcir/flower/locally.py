"""A configured run on a federation of this machine, as its user sees it: rounds, one by one."""

import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path

from fedcir.algorithms import make_algorithm
from fedcir.config import Config, config_tables, dump_toml
from fedcir.data.catalogue import BUNDLED, find
from fedcir.data.federation import open_federation
from fedcir.data.pictures.decode import OnFile
from fedcir.engine.folder import RunFolder
from fedcir.flower.keys import EVERY
from fedcir.flower.patience import TIMEOUT
from fedcir.flower.processes import LocalFederation
from fedcir.flower.server_app import check_deployable
from fedcir.flower.watcher import PREFIX, end_abandoned, watched
from fedcir.runs.events import told
from fedcir.types import InputError, RoundRecord, RunError

LOOK = 0.5
"""Seconds between two looks at the run folder."""


def run_locally(
    config: Config,
    out: Path,
    resume: bool = False,
    sites: int | None = None,
    timeout: float | None = None,
    on_file: OnFile | None = None,
    on_note: Callable[[str], None] = lambda note: None,
    from_round: int | None = None,
) -> Generator[RoundRecord, None, None]:
    """Train across a SuperNode for each client, with TLS and authentication; gives each round once it is on disk.

    Everything is torn down when it ends, or when it is closed.
    """
    timeout = TIMEOUT if timeout is None else timeout
    if timeout <= 0:
        raise InputError(f"timeout must be above 0, got {timeout:g}")
    folder = RunFolder(out)
    check_deployable(config, make_algorithm(config.algorithm))
    if from_round is not None and not (resume and folder.exists):
        raise InputError(f"{out} is not resumed, so it cannot go back to round {from_round}: resume it, or start anew")
    if folder.exists and not resume:
        raise InputError(f"{out} already holds a run: resume it, or choose another folder")
    with folder.locked():  # what is wrong with the folder is said before anything is started
        pass
    federation = open_federation(config, on_file)
    clients = len(federation.clients)
    sites = clients if sites is None else sites
    if not 1 <= sites <= clients:
        raise InputError(f"sites must be from 1 to {clients}, the number of clients, got {sites}")
    federation.load_features()  # once, for all sites
    for note in federation.notes:
        on_note(note)
    config = _absolute(config)
    own = {"algorithm": config.algorithm.name} if config.algorithm.name.endswith(".py") else {}
    if config.model.foreign:
        own["encoder"] = config.model.name
    if config.data.name not in BUNDLED:
        own["data-root"] = str(find(config.data)[1])
    state = {"state": str((out / "clients").resolve()), "device": config.run.device}
    nodes = [{"partition-id": number, **state, **own} for number in range(sites)]
    end_abandoned()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as work:
        settings = Path(work, "fedcir.toml")
        settings.write_text(dump_toml(config_tables(config)), encoding="utf-8")
        asked = {"config": str(settings), "out": str(out.resolve()), "resume": True, "sites": sites, "timeout": timeout}
        if from_round is not None:
            asked["from-round"] = from_round
        asked["report"] = False  # whoever watches the rounds writes it
        asked["new-keys"] = EVERY  # they are made anew each time
        with watched(Path(work)), LocalFederation(Path(work), nodes) as flower:
            on_note(f"started a SuperLink at {flower.address} and {sites} SuperNodes, with TLS and authentication")
            yield from _watch(flower, flower.submit("run", asked), folder, from_round is not None)


def _watch(
    flower: LocalFederation, process: "subprocess.Popen[bytes]", folder: RunFolder, back: bool
) -> Iterator[RoundRecord]:
    """The rounds as they come; where the run goes back, those that come again too."""
    shown = len(folder.records())
    running = True
    while running:
        running = process.poll() is None and _serves(flower)
        records = folder.records()
        if back and len(records) < shown:
            shown = len(records)
        yield from records[shown:]
        shown = max(shown, len(records))
        if running:
            time.sleep(LOOK)
    if why := [each["text"] for each in told(flower.events) if each["event"] == "failed"]:
        raise RunError(why[-1])
    if not folder.finished and not _serves(flower):
        code = flower.superlink.returncode if flower.superlink is not None else 0
        reason = f"signal {-code}" if code < 0 else flower.last_words("superlink")
        raise RunError(f"Flower's SuperLink has ended: {reason}{'; continue with --resume' if folder.exists else ''}")
    if not folder.finished:
        raise RunError(f"Flower's run ended early: {flower.last_words('run')}")


def _serves(flower: LocalFederation) -> bool:
    """Whether the SuperLink runs."""
    return flower.superlink is not None and flower.superlink.poll() is None


def _absolute(config: Config) -> Config:
    """Paths as the server and the sites find them, wherever they run."""

    def of(path: str | None) -> str | None:
        return None if path is None else str(Path(path).resolve())

    data = replace(config.data, lists=of(config.data.lists), table=of(config.data.table))
    if data.root is not None and Path(data.root).exists():  # a name on a hub stays one
        data = replace(data, root=of(data.root))
    algorithm = config.algorithm
    if algorithm.name.endswith(".py"):
        algorithm = replace(algorithm, name=str(Path(algorithm.name).resolve()))
    model = replace(config.model, weights=of(config.model.weights))
    if model.file is not None:
        model = replace(model, name=str(Path(model.name).resolve()))
    return replace(
        config,
        data=data,
        partition=replace(config.partition, file=of(config.partition.file)),
        model=model,
        algorithm=algorithm,
    )
