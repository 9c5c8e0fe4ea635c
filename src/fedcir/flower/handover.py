"""Hands a message to the resident process of its site, and starts that process if there is none. It imports no torch.

The two talk over a Unix socket in the site's state folder, which only its owner can use, in Flower's own serialisation.
Whoever has locked its folder may use it. Whatever goes wrong, the caller does the work itself, as without a resident.
"""

import contextlib
import hashlib
import json
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from flwr.app import Context, Message
from flwr.common.serde import context_to_proto, message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage

from fedcir import __version__
from fedcir.data.private import private_folder
from fedcir.flower.state import state_folder

FOLDER, SOCKET = "resident", "socket"
"""In the site's state folder: a folder for each node, with a socket."""
IDLE = 900.0
"""Seconds without a message, after which a resident ends."""
LENGTH = struct.Struct(">Q")
PEER = struct.Struct("3i")
"""Process, user and group of who is at the other end, as the system tells it."""


def possible(context: Context) -> bool:
    """Whether the site wants a resident, and the system can tell who is at the other end and when a process ends."""
    able = hasattr(socket, "SO_PEERCRED") and hasattr(os, "pidfd_open")
    return able and context.node_config.get("resident", True) is True


def hand_over(msg: Message, context: Context, idle: float = IDLE) -> Message | None:
    """The resident's answer; None if there is none, and the work is left to the caller."""
    try:
        with _opened(folder_of(context)) as folder:
            if not locked(folder):  # it is at work for another message
                return None
            with connected(folder, idle) as connection:
                for part in (message_to_proto(msg), context_to_proto(context)):
                    send(connection, part.SerializeToString())
                return message_from_proto(ProtoMessage.FromString(receive(connection)))
    except Exception as error:
        logging.getLogger("flwr").warning("fedcir: no resident process has answered, so this one does: %s", error)
        return None


def folder_of(context: Context) -> Path:
    """A folder for all that a site's resident is started with."""
    about = [dict(context.node_config), os.getcwd(), sys.prefix, __version__]
    name = hashlib.blake2b(json.dumps(about, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
    return state_folder(str(context.node_config.get("state", ""))) / FOLDER / name


def locked(folder: int) -> bool:
    """Lock an open folder until it is closed, if nobody else has."""
    import fcntl  # not on every system

    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


@contextlib.contextmanager
def connected(folder: int, idle: float) -> Iterator[socket.socket]:
    """A connection to the resident, which is started if there is none, and which is of this user."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(_path(folder))
        except (FileNotFoundError, ConnectionRefusedError):  # none yet, or it was killed
            _start(folder, idle)
            connection.connect(_path(folder))
        check_peer(connection)
        yield connection


def check_peer(connection: socket.socket) -> None:
    """Refuse to talk to another user."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    if (user := PEER.unpack(found)[1]) != os.geteuid():
        raise PermissionError(f"user {user} is at the other end of the resident's socket")


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(LENGTH.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket) -> bytearray:
    return _exactly(connection, LENGTH.unpack(_exactly(connection, LENGTH.size))[0])


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the resident process has ended")
        view = view[count:]
    return data


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The folder, open, so that a path to what is in it is short: a socket's has a limit."""
    for each in (path.parents[1], path.parent, path):  # the state folder may be missing too
        private_folder(each)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        os.close(folder)


def _path(folder: int) -> str:
    return f"/proc/self/fd/{folder}/{SOCKET}"


def _start(folder: int, idle: float) -> None:
    """Start a resident on a socket that already listens, so that nobody has to wait until it is ready."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET, dir_fd=folder)
    handed = [os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder), *map(os.pidfd_open, _above())]
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(_path(folder))
            os.chmod(SOCKET, 0o600, dir_fd=folder)
            listener.listen()
            handed.insert(0, os.dup(listener.fileno()))
        for each in handed:
            os.set_inheritable(each, True)
        command = [sys.executable, "-P", "-m", "fedcir.flower.resident", str(idle), *map(str, handed)]
        nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        # A session of its own: Ctrl-C is for the SuperNode, with which it ends.
        os.posix_spawn(sys.executable, command, os.environ, file_actions=[nothing], setsid=True)
    finally:
        for each in handed:
            os.close(each)


def _above() -> list[int]:
    """The process that started this one, Flower's SuperExec, and the one that started that: the SuperNode."""
    parent = os.getppid()
    about = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8", errors="replace")
    grandparent = int(about.rpartition(")")[2].split()[1])
    return [process for process in (parent, grandparent) if process]
