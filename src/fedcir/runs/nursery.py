"""Processes of runs, forked from one that has imported what every run needs and opened the data that several need.

Importing torch takes longer than some runs do. On Linux one process imports it and forks the others; elsewhere each
starts anew. Either way a run has a session and an environment of its own, and ends with the process that started it.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypedDict

from fedcir.config import config_from, read_toml
from fedcir.data.catalogue import SOURCES
from fedcir.data.opening import HELD, open_dataset
from fedcir.engine.machine import end_with

PARENT = "FEDCIR_PARENT"
"""Tells a run whose process it is to end with: one that went on after a kill would hold its folder's lock."""
READY = ("fedcir.__main__", "fedcir.cli.progress", "fedcir.engine.simulate", "fedcir.runs.tracking")
"""What a run imports; these import all else."""


class Order(TypedDict):
    """A process that is wanted."""

    number: int
    arguments: list[str]
    environment: dict[str, str]
    errors: str
    """The file for what it writes to standard error."""
    shares: str
    """The file of its settings if other runs need the same data, else nothing."""


class Child(Protocol):
    """A process of a run, as subprocess has them."""

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, sig: int) -> None: ...


class Nursery:
    """Starts `fedcir ARGUMENTS...` in processes of their own, while it is open."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._unread = b""
        self._count = 0
        self._children: dict[int, _Forked] = {}

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._channel is not None:
            self._channel.close()  # which it ends on
        if self._server is not None:
            self._server.wait()

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], errors: Path, shares: Path | None = None
    ) -> Child:
        """A process that writes its errors to a file, and nothing else.

        With `shares`, a file of settings, the dataset that these name is held open from now on, in the place of the
        last: this process, and each later one on the same data, begins with it.
        """
        if not sys.platform.startswith("linux"):
            return _started(arguments, environment, errors)
        self._count += 1
        order = Order(
            number=self._count,
            arguments=[*arguments],
            environment={**os.environ, **environment},
            errors=str(errors),
            shares="" if shares is None else str(shares),
        )
        child = self._children[self._count] = _Forked(self, self._count)
        if self._server is None or self._server.poll() is not None:
            self._open()
        assert self._channel is not None
        self._channel.sendall(json.dumps(order).encode() + b"\n")
        return child

    def wait(self, seconds: float) -> None:
        """Until a process has ended, or so long."""
        if self._channel is None:
            time.sleep(seconds)
            return
        ready, _, _ = select.select([self._channel], [], [], seconds)
        while ready:
            received = self._channel.recv(1 << 16)
            *lines, self._unread = (self._unread + received).split(b"\n")
            for line in lines:
                told = json.loads(line)
                self._children[told["number"]].tell(told)
            if not received:  # it was killed, and its children end too
                for child in self._children.values():
                    child.tell({"code": -signal.SIGKILL})
                self._channel = None
                return
            ready, _, _ = select.select([self._channel], [], [], 0)

    def _open(self) -> None:
        ours, theirs = socket.socketpair()
        # -P: a json.py in the current folder must not take the place of the real one
        command = [sys.executable, "-P", "-m", "fedcir.runs.nursery", str(theirs.fileno()), str(os.getpid())]
        self._server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()
        self._channel, self._unread = ours, b""


class _Forked:
    """A child of the process that forks."""

    def __init__(self, nursery: Nursery, number: int) -> None:
        self._nursery, self._number = nursery, number
        self._pid: int | None = None
        self._code: int | None = None

    def tell(self, told: Mapping[str, Any]) -> None:
        self._pid = told.get("pid", self._pid)
        self._code = told.get("code", self._code) if self._code is None else self._code

    def poll(self) -> int | None:
        self._nursery.wait(0)
        return self._code

    def wait(self) -> int:
        while self._code is None:
            self._nursery.wait(10)
        return self._code

    def send_signal(self, sig: int) -> None:
        while self._pid is None and self._code is None:  # not yet forked
            self._nursery.wait(10)
        if self._pid is not None and self.poll() is None:
            os.kill(self._pid, sig)


def _started(arguments: Sequence[str], environment: Mapping[str, str], errors: Path) -> Child:
    with open(errors, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "fedcir", *arguments],
            env={**os.environ, **environment, PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,  # so that Ctrl-C reaches it once, through send_signal
        )


def _serve(channel: socket.socket) -> Order | None:
    """Fork a process for each order, in which this returns the order; in the first, nothing, when all is done."""
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    unread = b""
    while True:
        ready, _, _ = select.select([channel, woken], [], [])
        if woken in ready:
            woken.recv(1 << 10)
        while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if (number := children.pop(ended[0], None)) is not None:  # else one of those that decode images
                _tell(channel, {"number": number, "code": os.waitstatus_to_exitcode(ended[1])})
        if channel not in ready:
            continue
        received = channel.recv(1 << 16)
        if not received:
            return None
        *lines, unread = (unread + received).split(b"\n")
        for line in lines:
            order: Order = json.loads(line)
            order["environment"][PARENT] = str(os.getpid())
            _hold(order["shares"])
            if not (pid := os.fork()):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (channel, woken, wake):
                    each.close()
                return order
            children[pid] = order["number"]
            _tell(channel, {"number": order["number"], "pid": pid})


def _hold(settings: str) -> None:
    """Hold the dataset of these settings open, in the place of the last; nothing if it is not to be shared.

    If it cannot be opened, the run meets the same error, and tells it.
    """
    held = HELD.get()
    try:
        config = config_from(read_toml(Path(settings))) if settings else None
        asked = None if config is None else (config.data, config.run.seed)
        if held is not None and held[:2] == asked:
            return
        HELD.set(None)
        if asked is not None and SOURCES[asked[0].name].root != "name":  # the hub's library starts threads
            with warnings.catch_warnings(action="ignore"):
                HELD.set((*asked, open_dataset(*asked)))
            gc.freeze()
    except Exception:
        HELD.set(None)


def _tell(channel: socket.socket, what: dict[str, int]) -> None:
    channel.sendall(json.dumps(what).encode() + b"\n")


def _become(order: Order) -> None:
    """Be the process that was ordered."""
    os.setsid()  # so that Ctrl-C reaches it once, through send_signal
    nothing = os.open(os.devnull, os.O_RDWR)
    errors = os.open(order["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for place, file in ((0, nothing), (1, nothing), (2, errors)):
        os.dup2(file, place)
    os.close(nothing)
    os.close(errors)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["fedcir", *order["arguments"]]
    sys.modules["fedcir.__main__"].main()


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a run has its own handler, it can only end
    for name in READY:
        importlib.import_module(name)
    gc.freeze()  # what is never written to stays shared
    if (found := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _become(found)
