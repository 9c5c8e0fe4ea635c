"""Flower's ClientApp of a site, and the resident worker that handles its messages.

Flower starts a process for every message. Importing torch and opening the data again takes longer than most rounds, so
that process passes the message to a resident worker, which it starts if there is none, and which keeps torch, the data
and the networks. The two talk over a Unix socket in the site's state folder, which only its owner can use. A worker
ends with its SuperNode, after `IDLE_SECONDS` without a message, and when the process that waits for its reply ends.
Without a worker, or if anything goes wrong, the process handles the message itself. Nothing here imports torch at the
top.
"""

import contextlib
import hashlib
import json
import logging
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedcir import __version__
from fedcir.files import acquire_lock, make_private_folder
from fedcir.flower import flwr_adapter

app = ClientApp()
log = logging.getLogger("flwr")

SOCKET, LOCK = "socket", ".lock"
"""Files in the folder of a resident worker."""
IDLE_SECONDS = 900.0
LENGTH = struct.Struct(">Q")
PEER = struct.Struct("3i")
"""Process, user and group at the other end of a socket (SO_PEERCRED)."""


def handle(msg: Message, context: Context) -> Message:
    """Handle any message, by the resident worker if there can be one."""
    if flwr_adapter.runs_single_message() and can_use_resident(context):
        reply = send_to_resident(msg, context)
        if reply is not None:
            return reply
    return _handle_in_process(msg, context)


query = app.query()(handle)
train = app.train()(handle)
evaluate = app.evaluate()(handle)


def _handle_in_process(msg: Message, context: Context) -> Message:
    from fedcir.flower.site_data import open_local_site  # imports torch
    from fedcir.flower.site_requests import handle_message

    return handle_message(msg, context, open_local_site)


def can_use_resident(context: Context) -> bool:
    """Tell whether the site wants a resident worker, and the system can identify users and watch processes."""
    supported = hasattr(socket, "SO_PEERCRED") and hasattr(os, "pidfd_open")
    return supported and context.node_config.get("resident", True) is True


def send_to_resident(msg: Message, context: Context, idle: float = IDLE_SECONDS) -> Message | None:
    """Return the resident worker's reply, or None if it is busy or cannot be used."""
    folder = resident_folder(context)
    try:
        for path in (folder.parents[1], folder.parent, folder):  # the state folder may be missing too
            make_private_folder(path)
        lock = acquire_lock(folder / LOCK, 0)
        if lock is None:  # it handles another message
            return None
        with lock, connect_to_resident(folder, idle) as connection:
            send(connection, flwr_adapter.message_to_bytes(msg))
            send(connection, flwr_adapter.context_to_bytes(context))
            return flwr_adapter.message_from_bytes(receive(connection))
    except Exception as error:
        log.warning("fedcir: no reply from the resident worker, so this process handles the message: %s", error)
        return None


def resident_folder(context: Context) -> Path:
    """Folder of the worker for this node-config, working directory, Python environment and version of fedcir."""
    identity = [dict(context.node_config), os.getcwd(), sys.prefix, __version__]
    name = hashlib.blake2b(json.dumps(identity, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
    return state_folder(str(context.node_config.get("state", ""))) / "resident" / name


def state_folder(path: str = "") -> Path:
    """Return the folder of a site's or server's state: `path`, FEDCIR_STATE, or one in the user's home."""
    path = path or os.environ.get("FEDCIR_STATE", "")
    if path:
        return Path(path).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedcir"


@contextlib.contextmanager
def connect_to_resident(path: Path, idle: float) -> Iterator[socket.socket]:
    """Connect to the resident worker of this user, starting it if there is none."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    address = f"/proc/self/fd/{folder}/{SOCKET}"  # the path itself may be too long for a socket
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(address)
            except (FileNotFoundError, ConnectionRefusedError):  # there is none yet, or it was killed
                _start_resident(path, folder, address, idle)
                connection.connect(address)
            check_peer(connection)
            yield connection
    finally:
        os.close(folder)


def check_peer(connection: socket.socket) -> None:
    """Raise PermissionError if another user is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    if (user := PEER.unpack(credentials)[1]) != os.geteuid():
        raise PermissionError(f"user {user} is at the other end of the resident worker's socket")


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(LENGTH.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket) -> bytearray:
    return _receive_exactly(connection, LENGTH.unpack(_receive_exactly(connection, LENGTH.size))[0])


def _receive_exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other process has ended")
        view = view[count:]
    return data


def _start_resident(path: Path, folder: int, address: str, idle: float) -> None:
    """Start a worker on a socket that already listens, so that nobody has to wait until it is ready."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET, dir_fd=folder)
    descriptors = [os.pidfd_open(process) for process in flwr_adapter.find_supernode_processes()]
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            os.chmod(SOCKET, 0o600, dir_fd=folder)
            listener.listen()
            descriptors.insert(0, os.dup(listener.fileno()))
        for descriptor in descriptors:
            os.set_inheritable(descriptor, True)
        command = [sys.executable, "-P", "-m", __name__, str(path.resolve()), str(idle), *map(str, descriptors)]
        no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        # In a session of its own: Ctrl-C goes to the SuperNode, with which the worker ends.
        os.posix_spawn(sys.executable, command, os.environ, file_actions=[no_input], setsid=True)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def serve(listener: socket.socket, folder: Path, watched: Sequence[int], idle: float) -> None:
    """Run the resident worker: handle messages until there has been none for `idle` seconds."""
    endings = select.epoll()
    for process in watched:
        endings.register(process, select.EPOLLIN)
    threading.Thread(target=_exit_at_first, args=(endings, folder), daemon=True).start()
    while select.select([listener], [], [], idle)[0]:
        connection, _ = listener.accept()
        with connection:
            try:
                check_peer(connection)
                msg = flwr_adapter.message_from_bytes(receive(connection))
                context = flwr_adapter.context_from_bytes(receive(connection))
                endings.register(connection, select.EPOLLRDHUP)  # nobody else wants the reply
                reply = flwr_adapter.message_to_bytes(_handle_in_process(msg, context))
                endings.unregister(connection)
                send(connection, reply)
            except OSError as error:  # another user's connection, or one that has ended
                log.warning("fedcir: the resident worker closes a connection: %s", error)
    _remove_socket(folder)


def _exit_at_first(endings: select.epoll, folder: Path) -> None:
    """End this process as soon as a watched process or connection has ended; runs in a thread of its own."""
    endings.poll()
    _remove_socket(folder)
    os._exit(0)


def _remove_socket(folder: Path) -> None:
    """Remove the socket, unless another process is about to start a worker on it."""
    with contextlib.suppress(OSError):
        lock = acquire_lock(folder / LOCK, 0)
        if lock is not None:
            with lock:
                (folder / SOCKET).unlink(missing_ok=True)


if __name__ == "__main__":
    resident_path, idle_seconds, *open_files = sys.argv[1:]
    listening, *processes = map(int, open_files)
    serve(socket.socket(fileno=listening), Path(resident_path), processes, float(idle_seconds))
