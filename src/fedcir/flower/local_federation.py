"""A federation on this machine, for `fedcir deploy local`: a SuperLink and SuperNodes with TLS and authentication.

Flower's processes start others that outlive them, so all of them are found and ended; watcher.py does so if this
process is killed.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import psutil

from fedcir.algorithms import make_algorithm
from fedcir.config import Config, config_to_tables, dump_toml
from fedcir.data.decoding import OnFile
from fedcir.data.federation import open_federation
from fedcir.data.opening import find_dataset, get_source
from fedcir.errors import InputError, RunError
from fedcir.files import EVENTS_FILE, read_events
from fedcir.flower.certificates import make_certificates, make_node_key
from fedcir.flower.server_app import check_deployable
from fedcir.flower.site_manifest import ALL_SITES
from fedcir.flower.transport import ROUND_TIMEOUT
from fedcir.flower.watcher import PREFIX, end_abandoned, find_processes, watch
from fedcir.runtime.run_folder import RunFolder
from fedcir.types import RoundRecord

HOST = "127.0.0.1"
CONNECTION = "federation"
"""Name of the SuperLink in Flower's config; a folder of that name would be taken for an app of an older kind."""
POLL_SECONDS, START_SECONDS, STOP_SECONDS = 0.5, 120.0, 10.0
"""Time between two looks at the run folder, and that Flower's processes have to start, and to end by themselves."""


def run_local_federation(
    config: Config,
    out: Path,
    resume: bool = False,
    sites: int | None = None,
    timeout: float | None = None,
    on_file: OnFile | None = None,
    on_note: Callable[[str], None] = lambda note: None,
    from_round: int | None = None,
) -> Generator[RoundRecord, None, None]:
    """Train across a SuperNode for each client, and yield each round once it is on disk.

    All processes are ended when the generator ends or is closed.
    """
    timeout = ROUND_TIMEOUT if timeout is None else timeout
    if timeout <= 0:
        raise InputError(f"timeout must be above 0, got {timeout:g}")
    folder = RunFolder(out)
    check_deployable(config, make_algorithm(config.algorithm))
    if from_round is not None and not (resume and folder.exists):
        raise InputError(f"{out} is not resumed, so it cannot go back to round {from_round}: resume it, or start anew")
    if folder.exists and not resume:
        raise InputError(f"{out} already holds a run: resume it, or choose another folder")
    with folder.lock():  # errors about the folder come before anything is started
        pass
    federation = open_federation(config, on_file)
    clients = len(federation.clients)
    sites = clients if sites is None else sites
    if not 1 <= sites <= clients:
        raise InputError(f"sites must be from 1 to {clients}, the number of clients, got {sites}")
    federation.load_features()  # once, for all sites
    for note in federation.notes:
        on_note(note)
    config = _make_paths_absolute(config)
    node = {"state": str((out / "clients").resolve()), "device": config.run.device}
    if config.algorithm.name.endswith(".py"):
        node["algorithm"] = config.algorithm.name
    if config.model.foreign:
        node["encoder"] = config.model.name
    if get_source(config.data.name).root != "nothing":
        node["data-root"] = str(find_dataset(config.data)[1])
    end_abandoned()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as work:
        settings = Path(work, "fedcir.toml")
        settings.write_text(dump_toml(config_to_tables(config)), encoding="utf-8")
        run_config = {"config": str(settings), "out": str(out.resolve()), "resume": True, "sites": sites}
        # Keys are new each time, and the caller writes the report.
        run_config |= {"timeout": timeout, "report": False, "new-keys": ALL_SITES}
        if from_round is not None:
            run_config["from-round"] = from_round
        nodes = [{"partition-id": number, **node} for number in range(sites)]
        with watch(Path(work)), LocalFederation(Path(work), nodes) as flower:
            on_note(f"started a SuperLink at {flower.address} and {sites} SuperNodes, with TLS and authentication")
            yield from _follow_rounds(flower, flower.submit("run", run_config), folder, from_round is not None)


def _follow_rounds(
    flower: "LocalFederation", process: "subprocess.Popen[bytes]", folder: RunFolder, goes_back: bool
) -> Iterator[RoundRecord]:
    """Yield new rounds of the run folder; if the run goes back, those that are repeated too."""
    seen = len(folder.records())
    running = True
    while running:
        running = process.poll() is None and flower.is_running
        records = folder.records()
        if goes_back:
            seen = min(seen, len(records))
        yield from records[seen:]
        seen = max(seen, len(records))
        if running:
            time.sleep(POLL_SECONDS)
    if failures := [event["text"] for event in read_events(flower.events) if event["event"] == "failed"]:
        raise RunError(failures[-1])
    if folder.finished:
        return
    if not flower.is_running:
        code = flower.superlink.returncode if flower.superlink is not None else 0
        reason = f"signal {-code}" if code < 0 else flower.read_last_line("superlink")
        raise RunError(f"Flower's SuperLink has ended: {reason}{'; continue with --resume' if folder.exists else ''}")
    raise RunError(f"Flower's run ended early: {flower.read_last_line('run')}")


def _make_paths_absolute(config: Config) -> Config:
    """Make paths absolute, since server and sites run in other working directories."""

    def resolve(path: str | None) -> str | None:
        return None if path is None else str(Path(path).resolve())

    data = replace(config.data, lists=resolve(config.data.lists), table=resolve(config.data.table))
    if data.root is not None and Path(data.root).exists():  # else it is a name on a hub
        data = replace(data, root=resolve(data.root))
    algorithm, model = config.algorithm, replace(config.model, weights=resolve(config.model.weights))
    if algorithm.name.endswith(".py"):
        algorithm = replace(algorithm, name=str(Path(algorithm.name).resolve()))
    if model.file is not None:
        model = replace(model, name=str(Path(model.name).resolve()))
    partition = replace(config.partition, file=resolve(config.partition.file))
    return replace(config, data=data, partition=partition, model=model, algorithm=algorithm)


def write_app(folder: Path) -> None:
    """Write the Flower app, a pyproject.toml, into a folder."""
    target = folder / "pyproject.toml"
    if target.exists():
        raise InputError(f"{target} already exists: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text((files("fedcir.flower") / "app.toml").read_text(encoding="utf-8"), encoding="utf-8")


class LocalFederation:
    """Context manager of a SuperLink and a SuperNode for each node-config; all their files are in `folder`."""

    def __init__(self, folder: Path, nodes: Sequence[Mapping[str, Any]], database: bool = False) -> None:
        self.folder, self.nodes = folder.resolve(), [dict(node) for node in nodes]
        self.database = database
        """Whether the SuperLink keeps its state on disk, so that it can be restarted; slower by a third."""
        self.port = _find_free_port()
        self.address = f"{HOST}:{self.port}"
        self.events = self.folder / "events.jsonl"
        """File in which the server reports a failure (experiments/sweep.py)."""
        self.superlink: subprocess.Popen[bytes] | None = None
        self.supernodes: dict[int, subprocess.Popen[bytes]] = {}
        self._commands: list[subprocess.Popen[bytes]] = []

    @property
    def is_running(self) -> bool:
        return self.superlink is not None and self.superlink.poll() is None

    def environment(self, home: str = "flwr") -> dict[str, str]:
        """Environment of Flower's processes: its home is in `folder`, no telemetry, commands beside this Python."""
        state = next((node["state"] for node in self.nodes if "state" in node), self.folder / "state")
        return {
            **os.environ,
            "FLWR_HOME": str(self.folder / home),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "PYTHONUNBUFFERED": "1",
            EVENTS_FILE: str(self.events),
            "FEDCIR_STATE": str(state),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "TYPER_STANDARD_TRACEBACK": "1",  # without it, tracebacks show local variables
        }

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def read_last_line(self, name: str) -> str:
        """Return the last line of a log; if it ends with a box, all lines of the box."""
        text = self.log(name).read_text(encoding="utf-8", errors="replace")
        lines = [line.strip(" \t─│╭╮╰╯") for line in text.rpartition("╭")[2].splitlines()]
        lines = [line for line in lines if any(letter.isalnum() for letter in line)]
        return " ".join(lines if "╭" in text else lines[-1:]) or "its log is empty"

    def __enter__(self) -> Self:
        try:
            for name in ("logs", "flwr", "nodes"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            make_certificates([HOST], self.folder / "certs", renewable=False)
            connection = {"address": self.address, "root-certificates": str(self.folder / "certs" / "ca.crt")}
            config = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
            (self.folder / "flwr" / "config.toml").write_text(dump_toml(config), encoding="utf-8")
            write_app(self.folder / "app")
            self.start_superlink()
            self.register([make_node_key(self.folder / "nodes" / f"{n}.key") for n in range(len(self.nodes))])
            for number in range(len(self.nodes)):
                self.start_supernode(number)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start_superlink(self) -> None:
        """Start the SuperLink, or restart it on its database."""
        certs = self.folder / "certs"
        options = ["--ssl-ca-certfile", certs / "ca.crt", "--ssl-certfile", certs / "server.crt"]
        options += ["--ssl-keyfile", certs / "server.key", "--enable-supernode-auth"]
        options += ["--host", HOST, "--port", self.port, "--disable-runtime-dependency-installation"]
        if self.database:
            options += ["--database", self.folder / "flwr" / "superlink.db"]
        self.superlink = self.start("superlink", "flower-superlink", *options)
        self.wait_for_superlink()

    def wait_for_superlink(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.is_running:
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), timeout=1):
                return
            time.sleep(0.1)
        raise RunError(f"Flower's SuperLink did not start: {self.read_last_line('superlink')}")

    def start_supernode(self, number: int, *options: object, secure: bool = True) -> None:
        """Start a node of the federation, with further options."""
        settings = self.folder / "nodes" / f"{number}.toml"
        settings.write_text(dump_toml(self.nodes[number]), encoding="utf-8")
        trust = ["--root-certificates", self.folder / "certs" / "ca.crt"]
        trust += ["--auth-supernode-private-key", self.folder / "nodes" / f"{number}.key"]
        node = ["--superlink", self.address, "--host", HOST, "--port", _find_free_port(), "--node-config", settings]
        self.supernodes[number] = self.start(
            f"supernode-{number}", "flower-supernode", *(trust if secure else ["--insecure"]), *node, *options
        )

    def register(self, keys: Sequence[Path]) -> None:
        """Register the sites' public keys with the SuperLink, which refuses others."""
        for key in keys:
            done = self.flwr("supernode", "register", key, CONNECTION)
            if done.returncode:
                raise RunError(f"Flower could not register {key}: {' '.join(done.stdout.split())}")

    def flwr(self, *arguments: object) -> "subprocess.CompletedProcess[str]":
        """Run a `flwr` command to its end."""
        return subprocess.run(
            [_find_command("flwr"), *map(str, arguments)],
            env=self.environment(),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def submit(
        self, name: str, run_config: Mapping[str, Any], app: Path | None = None, *options: object
    ) -> "subprocess.Popen[bytes]":
        """Start a run; the process streams its log, and ends with it."""
        file = self.folder / f"{name}.toml"
        file.write_text(dump_toml(run_config), encoding="utf-8")
        app = app or self.folder / "app"
        process = self.start(name, "flwr", "run", app, CONNECTION, "--stream", "--run-config", file, *options)
        self._commands.append(process)
        return process

    def stop(self) -> None:
        """End all processes, by kill -9 those that do not end in time."""
        started = [*self._commands, *self.supernodes.values(), *([self.superlink] if self.superlink else [])]
        processes = find_processes(str(self.folder))  # children of a killed SuperLink have no parent
        _signal_all(processes, signal.SIGTERM)
        _, alive = psutil.wait_procs(processes, timeout=STOP_SECONDS)
        _signal_all(alive, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=STOP_SECONDS)
        for command in started:
            command.wait()
        self._commands, self.supernodes, self.superlink = [], {}, None

    def start(self, name: str, command: str, *arguments: object) -> "subprocess.Popen[bytes]":
        """Start a command of Flower's, with its output in the log of this name."""
        with open(self.log(name), "ab") as log:
            return subprocess.Popen(
                [_find_command(command), *map(str, arguments)],
                env=self.environment(name if name.startswith("supernode") else "flwr"),  # two would install at once
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process, which ends the others in order
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
            )


def _signal_all(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _find_command(name: str) -> str:
    """Find a command of Flower's beside this Python, or on the path."""
    beside = Path(sys.executable).parent / name
    command = str(beside) if beside.exists() else shutil.which(name)
    if command is None:
        raise InputError(f"the command {name} is missing: pip install 'fedcir[flower]'")
    return command


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
