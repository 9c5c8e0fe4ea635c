"""A process that has imported torch and fedcir once, and forks a child for each command line of a test.

A new interpreter takes seconds of CPU time to import torch; a fork takes milliseconds. `WarmProcess` starts the
process and writes an executable that stands in for `python`: called as `python -m fedcir ...`, it passes its arguments,
environment and standard streams to the process, forwards signals and ends with the exit code of the forked child.
Called in any other way, it becomes the real interpreter. Tests of the start itself and of kills do not use it.
"""

import array
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

STAND_IN = """#!{python} -IS
import os, sys

arguments = sys.argv[1:]
if arguments[:1] == ["-P"]:
    arguments = arguments[1:]
if arguments[:2] != ["-m", "fedcir"] or "FEDCIR_TEST_SIGNAL" in os.environ:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])

import array, json, signal, socket

connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: connection.send(bytes([number])))
request = {{"arguments": arguments[2:], "cwd": os.getcwd(), "env": dict(os.environ), "executable": sys.argv[0]}}
body = json.dumps(request).encode()
streams = array.array("i", [0, 1, 2])
connection.sendmsg([len(body).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
connection.sendall(body)
reply = connection.recv(8)
code = int(reply) if reply else 1
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Output(NamedTuple):
    """Exit code and captured output of a command."""

    code: int
    out: str
    err: str


class WarmProcess:
    """Start the process in `folder`. `python` is the path of the executable that stands in for the interpreter."""

    def __init__(self, folder: Path) -> None:
        address = f"\0fedcir-tests-{os.getpid()}"  # abstract: it has no file, and ends with the process
        self.python = folder / "python"
        self.python.write_text(STAND_IN.format(python=sys.executable, address=address), encoding="utf-8")
        self.python.chmod(0o700)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            command = [sys.executable, __file__, str(listener.fileno())]
            self._starter = subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.PIPE)
        self._starter.wait()

    def run(
        self, *arguments: object, cwd: Path | str | None = None, env: Mapping[str, str] | None = None, stdin: str = ""
    ) -> Output:
        """Run `fedcir ARGUMENTS` in a forked child, in the current folder and environment unless others are given."""
        command = [str(self.python), "-m", "fedcir", *map(str, arguments)]
        ended = subprocess.run(command, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, check=False)
        return Output(ended.returncode, ended.stdout, ended.stderr)

    def close(self) -> None:
        self._starter.stdin.close()  # the process ends with its stdin


def serve(listener: socket.socket) -> None:
    """Import what most commands need, then fork for each connection until stdin is closed."""
    import matplotlib  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401

    import fedcir
    import fedcir.cli

    for name in ("train", "compare", "report"):
        getattr(fedcir, name)  # public names are imported when they are first used
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # handlers are not waited for
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _handle(connection)
        connection.close()


def _handle(connection: socket.socket) -> NoReturn:
    """Fork the command, forward signals to it, and send its exit code. Kill it if the stand-in was killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(connection, 4, 3)
    body = b""
    while len(body) < int.from_bytes(size, "big"):
        body += connection.recv(65536)
    child = os.fork()
    if child == 0:
        connection.close()
        _run_command(json.loads(body), streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(child)
    while ended not in select.select([ended, connection], [], [])[0]:
        message = connection.recv(1)
        os.kill(child, message[0] if message else signal.SIGKILL)
        if not message:
            break
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run_command(request: dict, streams: "list[int] | array.array[int]") -> NoReturn:
    """Become `python -m fedcir ARGUMENTS`."""
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (open until the child ends)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["fedcir", *request["arguments"]]
    sys.executable = request["executable"]  # runs that the command starts are forked too
    code = 1
    try:
        from fedcir.cli import main

        main()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if os.fork():  # so that the process is no child of pytest, whose children tests count
        os._exit(0)
    del sys.path[0]  # the folder of the tests
    serve(socket.socket(fileno=int(sys.argv[1])))
