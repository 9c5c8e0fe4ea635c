"""A whole federation on this machine: a SuperLink and SuperNodes with TLS and authentication, and its end.

Flower's processes start others that outlive them, so everything that was started is looked up and ended, and on Linux
it ends with this process too, even by kill -9.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import psutil

from fedcir.config import dump_toml
from fedcir.flower.certs import make_certificates, make_node_key
from fedcir.flower.watcher import find_processes
from fedcir.runs.events import EVENTS
from fedcir.types import InputError, RunError

HOST = "127.0.0.1"
CONNECTION = "federation"
"""The name of the SuperLink in Flower's config; a folder of that name would be taken for an app of an older kind."""
STANDARD = "TYPER_STANDARD_TRACEBACK"
"""Without it, a traceback of Flower's commands shows local variables."""
START = 120.0
"""Seconds that Flower's processes have to start."""
GRACE = 10.0
"""Seconds that they have to end by themselves."""


def write_app(folder: Path) -> None:
    """Write the Flower app, a pyproject.toml, into a folder."""
    target = folder / "pyproject.toml"
    if target.exists():
        raise InputError(f"{target} already exists: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text((files("fedcir.flower") / "app.toml").read_text(encoding="utf-8"), encoding="utf-8")


class LocalFederation:
    """A SuperLink and a SuperNode for each node-config, from `with` to its end; all their files lie in `folder`."""

    def __init__(self, folder: Path, nodes: Sequence[Mapping[str, Any]], database: bool = False) -> None:
        self.folder, self.nodes = folder.resolve(), [dict(node) for node in nodes]
        self.database = database
        """Whether the SuperLink keeps what it knows on disk, to be started again: slower by a third."""
        self.port = _free_port()
        self.superlink: subprocess.Popen[bytes] | None = None
        self.supernodes: dict[int, subprocess.Popen[bytes]] = {}
        self._commands: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def environment(self, home: str = "flwr") -> dict[str, str]:
        """Flower's own folder is one of ours, it tells nobody, and it finds its commands beside this Python."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        own = {"FLWR_HOME": str(self.folder / home), "PATH": path, "PYTHONUNBUFFERED": "1", EVENTS: str(self.events)}
        own["FEDCIR_STATE"] = str(
            next((node["state"] for node in self.nodes if "state" in node), self.folder / "state")
        )
        return {**os.environ, **own, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", STANDARD: "1"}

    @property
    def events(self) -> Path:
        """What the server told of the run: runs/events.py."""
        return self.folder / "events.jsonl"

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def last_words(self, name: str) -> str:
        """The last line of a log; all lines of a box that it ends with, without the box."""
        text = self.log(name).read_text(encoding="utf-8", errors="replace")
        lines = [line.strip(" \t─│╭╮╰╯") for line in text.rpartition("╭")[2].splitlines()]
        words = [line for line in lines if any(letter.isalnum() for letter in line)]
        return " ".join(words if "╭" in text else words[-1:]) or "its log is empty"

    def __enter__(self) -> Self:
        try:
            for each in ("logs", "flwr", "nodes"):
                (self.folder / each).mkdir(parents=True, exist_ok=True)
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
        """Start the SuperLink, or start it again on its database."""
        certs = self.folder / "certs"
        secure = ["--ssl-ca-certfile", certs / "ca.crt", "--ssl-certfile", certs / "server.crt"]
        secure += ["--ssl-keyfile", certs / "server.key", "--enable-supernode-auth"]
        place = ["--host", HOST, "--port", self.port]
        if self.database:
            place += ["--database", self.folder / "flwr" / "superlink.db"]
        self.superlink = self.start(
            "superlink", "flower-superlink", *secure, *place, "--disable-runtime-dependency-installation"
        )
        self.wait_for_superlink()

    def wait_for_superlink(self) -> None:
        """Until it can be reached."""
        assert self.superlink is not None
        until = time.monotonic() + START
        while time.monotonic() < until and self.superlink.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), timeout=1):
                return
            time.sleep(0.1)
        raise RunError(f"Flower's SuperLink did not start: {self.last_words('superlink')}")

    def start_supernode(self, number: int, *options: object, secure: bool = True) -> None:
        """Start a node of the federation; other options come after its own."""
        settings = self.folder / "nodes" / f"{number}.toml"
        settings.write_text(dump_toml(self.nodes[number]), encoding="utf-8")
        trust = ["--root-certificates", self.folder / "certs" / "ca.crt"]
        trust += ["--auth-supernode-private-key", self.folder / "nodes" / f"{number}.key"]
        place = ["--superlink", self.address, "--host", HOST, "--port", _free_port(), "--node-config", settings]
        name = f"supernode-{number}"
        given = [*(trust if secure else ["--insecure"]), *place, *options]
        self.supernodes[number] = self.start(name, "flower-supernode", *given)

    def register(self, keys: Sequence[Path]) -> None:
        """Make the sites' public keys known to the SuperLink; it turns others away."""
        for key in keys:
            done = self.flwr("supernode", "register", key, CONNECTION)
            if done.returncode:
                raise RunError(f"Flower could not register {key}: {' '.join(done.stdout.split())}")

    def flwr(self, *words: object) -> "subprocess.CompletedProcess[str]":
        """A command of Flower's, done."""
        return subprocess.run(
            [_command("flwr"), *map(str, words)],
            env=self.environment(),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def submit(
        self, name: str, settings: Mapping[str, Any], app: Path | None = None, *options: object
    ) -> "subprocess.Popen[bytes]":
        """Start a run with this run-config. The process streams its log, and ends with it."""
        file = self.folder / f"{name}.toml"
        file.write_text(dump_toml(settings), encoding="utf-8")
        where = app or self.folder / "app"
        process = self.start(name, "flwr", "run", where, CONNECTION, "--stream", "--run-config", file, *options)
        self._commands.append(process)
        return process

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        """End a process and all that it started by kill -9."""
        for each in _family(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()

    def stop(self) -> None:
        """End all processes: ask them first, and kill those that do not end."""
        started = [*self._commands, *self.supernodes.values(), *([self.superlink] if self.superlink else [])]
        processes = find_processes(str(self.folder))  # those of a SuperLink that was killed are nobody's children
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(processes, timeout=GRACE)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=GRACE)
        for command in started:
            command.wait()
        self._commands, self.supernodes, self.superlink = [], {}, None

    def start(self, name: str, command: str, *words: object) -> "subprocess.Popen[bytes]":
        """Start a command of Flower's, its output in a log of this name."""
        with open(self.log(name), "ab") as log:
            return subprocess.Popen(
                [_command(command), *map(str, words)],
                env=self.environment(name if name.startswith("supernode") else "flwr"),  # two would install at once
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us, who end it in order
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
            )


def _family(pid: int) -> list[psutil.Process]:
    """A process and all that it started, even in sessions of their own."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _command(name: str) -> str:
    """A command of Flower's beside this Python, or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise InputError(f"the command {name} is missing: pip install 'fedcir[flower]'")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
