"""A federation on this machine, for `fedcir deploy local`: a SuperLink and SuperNodes with TLS and authentication.

Flower's processes start others that outlive them, so all of them are found by their FLWR_HOME and ended. If this
process is killed, even by kill -9, a watcher does so and removes the keys: a process that runs this module, and reads
from a pipe which closes when the watched process ends. So nothing here imports torch at the top.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil
from filelock import FileLock, Timeout

from fedcir.config import HUGGING_FACE, Config, config_to_tables, dump_toml
from fedcir.errors import InputError, RunError
from fedcir.files import EVENTS_FILE, read_events
from fedcir.flower.certificates import make_certificates, make_node_key
from fedcir.types import RoundRecord

if TYPE_CHECKING:
    from fedcir.data.decoding import OnFile
    from fedcir.runtime.run_folder import RunFolder

HOST = "127.0.0.1"
CONNECTION = "federation"
"""Name of the SuperLink in Flower's config; a folder of that name would be taken for an app of an older kind."""
PREFIX, KEYS = "fedcir-", "certs"
"""Prefix of the folder of a federation, and the folder in it that holds keys."""
DONE = b"done"
"""Message to the watcher that nothing is left to clean up."""
POLL_SECONDS, START_SECONDS, STOP_SECONDS = 0.5, 120.0, 10.0
"""Seconds between two reads of the run folder, and limits for Flower's processes to start and to end."""


def run_local_federation(
    config: Config,
    out: Path,
    resume: bool = False,
    sites: int | None = None,
    timeout: float | None = None,
    on_file: "OnFile | None" = None,
    on_note: Callable[[str], None] = lambda note: None,
    from_round: int | None = None,
) -> Generator[RoundRecord, None, None]:
    """Train across a SuperNode for each client, and yield each round once it is on disk.

    All processes are ended when the generator ends or is closed.
    """
    from fedcir.algorithms import make_algorithm
    from fedcir.data.federation import open_federation
    from fedcir.data.opening import find_dataset, get_source
    from fedcir.flower.server_app import check_deployable
    from fedcir.flower.site_manifest import ALL_SITES
    from fedcir.runtime.run_folder import RunFolder

    if timeout is not None and timeout <= 0:
        raise InputError(f"timeout must be above 0, got {timeout:g}")
    folder = RunFolder(out)
    check_deployable(config, make_algorithm(config.algorithm))
    folder.check_start(resume, from_round)
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
    elif config.model.name == HUGGING_FACE:
        node["encoder"] = f"{HUGGING_FACE}:{config.model.weights}"
    if get_source(config.data.name).root != "nothing":
        node["data-root"] = str(find_dataset(config.data)[1])
    end_abandoned()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as work:
        settings = Path(work, "fedcir.toml")
        settings.write_text(dump_toml(config_to_tables(config)), encoding="utf-8")
        run_config: dict[str, Any] = {"config": str(settings), "out": str(out.resolve()), "resume": True}
        # Keys are new each time, and the caller writes the report.
        run_config |= {"sites": sites, "report": False, "new-keys": ALL_SITES}
        options = {"timeout": timeout, "from-round": from_round}
        run_config |= {name: value for name, value in options.items() if value is not None}
        nodes = [{"partition-id": number, **node} for number in range(sites)]
        with watch(Path(work)), LocalFederation(Path(work), nodes) as flower:
            on_note(f"started a SuperLink at {flower.address} and {sites} SuperNodes, with TLS and authentication")
            yield from _follow_rounds(flower, flower.submit("run", run_config), folder)


def _follow_rounds(
    flower: "LocalFederation", process: "subprocess.Popen[bytes]", folder: "RunFolder"
) -> Iterator[RoundRecord]:
    """Yield new rounds of the run folder, also those that a resumed run repeats."""
    seen = len(folder.records())
    running = True
    while running:
        running = process.poll() is None and flower.is_running
        records = folder.records()
        yield from records[min(seen, len(records)) :]
        seen = len(records)
        if running:
            time.sleep(POLL_SECONDS)
    if failures := [event["text"] for event in read_events(flower.events) if event["event"] == "failed"]:
        raise RunError(failures[-1])
    if folder.finished:
        return
    if flower.is_running:
        raise RunError(f"Flower's run ended early: {flower.read_last_line('run')}")
    code = flower.superlink.returncode if flower.superlink is not None else 0
    reason = f"signal {-code}" if code < 0 else flower.read_last_line("superlink")
    raise RunError(f"Flower's SuperLink has ended: {reason}{'; continue with --resume' if folder.exists else ''}")


def _make_paths_absolute(config: Config) -> Config:
    """Make paths absolute, since server and sites run in other working directories."""

    def resolve(section: Any, *names: str) -> Any:
        paths = {name: getattr(section, name) for name in names}
        return replace(section, **{name: str(Path(path).resolve()) for name, path in paths.items() if path is not None})

    algorithm, data, model = config.algorithm, config.data, config.model
    return replace(
        config,
        algorithm=resolve(algorithm, "name") if algorithm.name.endswith(".py") else algorithm,
        # else the root is a name on a hub
        data=resolve(data, "lists", "table", *(["root"] if data.root and Path(data.root).exists() else [])),
        model=resolve(model, "weights", *(["name"] if model.file is not None else [])),
        partition=resolve(config.partition, "file"),
    )


def write_app(folder: Path) -> None:
    """Write the Flower app, a pyproject.toml, into a folder."""
    target = folder / "pyproject.toml"
    if target.exists():
        raise InputError(f"{target} already exists: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text((files("fedcir.flower") / "app.toml").read_text(encoding="utf-8"), encoding="utf-8")


class LocalFederation:
    """Context manager of a SuperLink and a SuperNode for each node-config; all their files are in `folder`."""

    def __init__(self, folder: Path, nodes: Sequence[Mapping[str, Any]]) -> None:
        self.folder, self.nodes = folder.resolve(), [dict(node) for node in nodes]
        self.port = _find_free_port()
        self.address = f"{HOST}:{self.port}"
        self.events = self.folder / "events.jsonl"
        """File in which the server reports a failure (experiments/sweep.py)."""
        self.superlink: subprocess.Popen[bytes] | None = None
        self.supernodes: dict[int, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[bytes]] = []

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
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.stop)
            for name in ("logs", "flwr", "nodes"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            make_certificates([HOST], self.folder / KEYS, renewable=False)
            connection = {"address": self.address, "root-certificates": str(self.folder / KEYS / "ca.crt")}
            config = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
            (self.folder / "flwr" / "config.toml").write_text(dump_toml(config), encoding="utf-8")
            write_app(self.folder / "app")
            self.start_superlink()
            for number in range(len(self.nodes)):
                key = make_node_key(self.folder / "nodes" / f"{number}.key")
                done = self.flwr("supernode", "register", key, CONNECTION)
                if done.returncode:
                    raise RunError(f"Flower could not register {key}: {' '.join(done.stdout.split())}")
            for number in range(len(self.nodes)):
                self.start_supernode(number)
            on_error.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def superlink_options(self) -> list[object]:
        certs = self.folder / KEYS
        tls = ["--ssl-ca-certfile", certs / "ca.crt", "--ssl-certfile", certs / "server.crt"]
        return [*tls, "--ssl-keyfile", certs / "server.key", "--enable-supernode-auth"]

    def start_superlink(self) -> None:
        """Start the SuperLink, and wait until it listens."""
        address = ["--host", HOST, "--port", self.port, "--disable-runtime-dependency-installation"]
        self.superlink = self.start("superlink", "flower-superlink", *address, *self.superlink_options())
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.is_running:
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), timeout=1):
                return
            time.sleep(0.1)
        raise RunError(f"Flower's SuperLink did not start: {self.read_last_line('superlink')}")

    def start_supernode(self, number: int, *options: object) -> None:
        """Start a node of the federation, with further options."""
        nodes, trust = self.folder / "nodes", ["--root-certificates", self.folder / KEYS / "ca.crt"]
        (nodes / f"{number}.toml").write_text(dump_toml(self.nodes[number]), encoding="utf-8")
        node = ["--superlink", self.address, "--host", HOST, "--port", _find_free_port()]
        node += ["--node-config", nodes / f"{number}.toml"]
        if "--insecure" not in options:
            node += [*trust, "--auth-supernode-private-key", nodes / f"{number}.key"]
        self.supernodes[number] = self.start(f"supernode-{number}", "flower-supernode", *node, *options)

    def flwr(self, *arguments: object) -> "subprocess.CompletedProcess[str]":
        """Run a `flwr` command to its end."""
        command = [_find_command("flwr"), *map(str, arguments)]
        output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.run(command, env=self.environment(), cwd=self.folder, check=False, **output)

    def submit(
        self, name: str, run_config: Mapping[str, Any], app: Path | None = None, *options: object
    ) -> "subprocess.Popen[bytes]":
        """Start a run; the process streams its log, and ends with it."""
        file = self.folder / f"{name}.toml"
        file.write_text(dump_toml(run_config), encoding="utf-8")
        app = app or self.folder / "app"
        return self.start(name, "flwr", "run", app, CONNECTION, "--stream", "--run-config", file, *options)

    def stop(self) -> None:
        end_processes(self.folder)
        for process in self._started:
            process.wait()
        self._started, self.supernodes, self.superlink = [], {}, None

    def start(self, name: str, command: str, *arguments: object) -> "subprocess.Popen[bytes]":
        """Start a command of Flower's, with its output in the log of this name."""
        with open(self.log(name), "ab") as log:
            process = subprocess.Popen(
                [_find_command(command), *map(str, arguments)],
                env=self.environment(name if name.startswith("supernode") else "flwr"),  # two would install at once
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process, which ends the others in order
            )
        self._started.append(process)
        return process


def _find_command(name: str) -> str:
    """Find a command of Flower's beside this Python, or on the path."""
    installed = Path(sys.executable).parent / name
    command = str(installed) if installed.exists() else shutil.which(name)
    if command is None:
        raise InputError(f"the command {name} is missing: pip install 'fedcir[flower]'")
    return command


def _find_free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def watch(folder: Path) -> Iterator[None]:
    """If this process is killed inside, end processes whose FLWR_HOME is in the folder, and remove the folder."""
    command = [sys.executable, "-P", "-m", __name__, str(folder.resolve())]
    output: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **output)  # not for Ctrl-C
    try:
        with FileLock(folder / "lock"):
            yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            watcher.communicate(DONE)


def end_abandoned() -> None:
    """Clean up after federations of this user whose watcher was killed too: nobody holds their lock."""
    for keys in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{KEYS}"):
        with contextlib.suppress(OSError, Timeout):
            if os.name == "posix" and keys.stat().st_uid == os.geteuid():
                with FileLock(keys.parent / "lock", timeout=0):
                    end_processes(keys.parent.resolve())
                    shutil.rmtree(keys.parent, ignore_errors=True)


def end_processes(folder: Path) -> None:
    """End all processes whose FLWR_HOME is in the folder, by kill -9 those that do not end in time."""
    end = psutil.Process.terminate
    while processes := [process for process in psutil.process_iter() if _has_home_in(process, folder)]:
        for process in processes:  # also those whose parent has ended
            with contextlib.suppress(psutil.Error):
                end(process)
        psutil.wait_procs(processes, timeout=STOP_SECONDS)
        end = psutil.Process.kill


def _has_home_in(process: psutil.Process, folder: Path) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        home = process.environ().get("FLWR_HOME", "")
        return home.startswith(f"{folder}{os.sep}") and process.status() != psutil.STATUS_ZOMBIE
    return False


if __name__ == "__main__" and sys.stdin.buffer.read() != DONE:
    end_processes(Path(sys.argv[1]))
    shutil.rmtree(sys.argv[1], ignore_errors=True)
