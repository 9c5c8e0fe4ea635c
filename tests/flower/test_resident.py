"""A site's resident process, a real one on a real socket: it answers as the site would, whatever happens to it."""

import contextlib
import os
import resource
import socket
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from grid import MemoryGrid, context_of, run_of_flower, site  # noqa: F401
from PIL import Image

from fedcir.config import Config, config_from_tables
from fedcir.files import acquire_lock
from fedcir.flower import client_app, flwr_adapter, site_requests
from fedcir.flower.client_app import (
    LOCK,
    SOCKET,
    can_use_resident,
    connect_to_resident,
    resident_folder,
    send_to_resident,
)
from fedcir.flower.server_app import DeploymentSettings, open_deployment
from fedcir.flower.site_data import open_local_site
from fedcir.flower.site_manifest import SiteDescription
from fedcir.flower.site_requests import handle_message
from fedcir.flower.wire import TaskHeader

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="sites have residents on Linux only")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")

NOBODY = 65534


def residents() -> list[psutil.Process]:
    """Those that this process has started, and that are alive."""
    results = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # of which a zombie is a kind
            if process.status() != psutil.STATUS_ZOMBIE and "fedcir.flower.client_app" in process.cmdline():
                results.append(process)
    return results


def kill(process: psutil.Process) -> None:
    process.kill()
    process.wait()


@pytest.fixture(autouse=True, scope="module")
def _none_is_left() -> Iterator[None]:
    yield
    for process in residents():
        kill(process)
    for process in psutil.Process().children():
        if process.status() == psutil.STATUS_ZOMBIE:  # that another process would have inherited
            process.wait()


def add_picture(root: Path, label: str, number: int) -> None:
    (root / label).mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 255, (8, 8, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(root / label / f"{number}.png")


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """A site with images of its own, and a state folder whose path is longer than that of a socket may be."""
    folder = tmp_path_factory.mktemp("clinic")
    for number in range(20):
        add_picture(folder / "images", "ab"[number % 2], number)
    state = folder / ("long" * 30) / "state"
    return context_of({"domain": "clinic", "data-root": str(folder / "images"), "state": str(state), "device": "cpu"})


def who_are_you(run: int = 1, size: int = 8) -> Message:
    config = config_from_tables({"data": {"name": "folders", "image_size": size}, "algorithm": {"name": "fedavg"}})
    content = RecordDict({"config": ConfigRecord({"fedcir": TaskHeader(config, {}).to_json()})})
    message = Message(content, 1, MessageType.QUERY)
    message.metadata.__dict__["_run_id"] = run
    return message


CLIENTAPP = """
import sys
import flwr.clientapp, flwr.common.serde as serde
from flwr.proto.message_pb2 import Context, Message
flowers = {*sys.modules}
from fedcir.flower.client_app import app
msg, context = (open(name, "rb").read() for name in sys.argv[1:])
reply = app(serde.message_from_proto(Message.FromString(msg)), serde.context_from_proto(Context.FromString(context)))
print(reply.has_content(), *sorted({name.partition(".")[0] for name in {*sys.modules} - flowers}))
"""


def test_the_process_that_flower_starts_for_a_message_imports_neither_torch_nor_numpy_beside_what_flower_does(
    clinic: Context, tmp_path: Path
) -> None:
    """Flower's own records import numpy. The process is known by its name."""
    assert send_to_resident(who_are_you(), clinic) is not None
    (tmp_path / "flwr-clientapp").write_text(CLIENTAPP)
    (tmp_path / "message").write_bytes(flwr_adapter.message_to_bytes(who_are_you()))
    (tmp_path / "context").write_bytes(flwr_adapter.context_to_bytes(clinic))
    words = [tmp_path / name for name in ("flwr-clientapp", "message", "context")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    answered, *imported = done.stdout.split()
    assert answered == "True", done.stderr
    assert "fedcir" in imported
    assert not {"torch", "numpy", "PIL", "psutil"} & {*imported}
    assert len(residents()) == 1


def test_one_resident_answers_for_two_runs_as_the_site_itself_would(clinic: Context) -> None:
    for run, size in ((1, 8), (2, 9), (1, 8)):
        settings = who_are_you(run, size)
        message, own = send_to_resident(settings, clinic), handle_message(settings, clinic, open_local_site)
        assert message is not None
        assert SiteDescription.from_message(message) == SiteDescription.from_message(own)
        assert message.metadata.run_id == own.metadata.run_id == run
        assert message.metadata.reply_to_message_id == own.metadata.reply_to_message_id
    assert len(residents()) == 1


def test_only_the_owner_may_use_its_socket(clinic: Context) -> None:
    assert send_to_resident(who_are_you(), clinic) is not None
    file = resident_folder(clinic) / SOCKET
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    state = Path(str(clinic.node_config["state"]))
    assert all(stat.S_IMODE(item.stat().st_mode) == 0o700 for item in (file.parent, file.parents[1], state))


def test_data_that_change_are_noticed(clinic: Context) -> None:
    before = send_to_resident(who_are_you(), clinic)
    add_picture(Path(str(clinic.node_config["data-root"])), "a", 100)
    after = send_to_resident(who_are_you(), clinic)
    assert before is not None
    assert after is not None
    one, two = SiteDescription.from_message(before), SiteDescription.from_message(after)
    assert two.train + two.test == one.train + one.test + 1
    assert two.content != one.content


def test_while_it_is_at_work_another_message_is_not_kept_waiting(clinic: Context) -> None:
    assert send_to_resident(who_are_you(), clinic) is not None
    lock = acquire_lock(resident_folder(clinic) / LOCK, 0)
    assert lock is not None
    with lock:
        assert send_to_resident(who_are_you(), clinic) is None
    assert send_to_resident(who_are_you(), clinic) is not None


def test_on_a_full_disk_the_server_hears_so_and_the_resident_goes_on_once_there_is_room(clinic: Context) -> None:
    assert send_to_resident(who_are_you(), clinic) is not None
    (process,) = residents()
    before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    message = send_to_resident(who_are_you(), clinic)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)
    assert message is not None
    assert message.error.reason == "site 'clinic': it cannot write to its state folder; the site's log tells more"
    again = send_to_resident(who_are_you(), clinic)
    assert again is not None
    assert again.has_content()
    assert residents() == [process]


def test_a_state_folder_that_cannot_be_is_no_hindrance(clinic: Context, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    at = context_of({**clinic.node_config, "state": str(tmp_path / "state")})
    assert send_to_resident(who_are_you(), at) is None


def as_nobody(folder: Path, do: Callable[[socket.socket], int]) -> int:
    """What a function gives in a process of another user, in a folder that is open to it."""
    folder.chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            os.chdir(folder)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with socket.socket(socket.AF_UNIX) as made:
                made.settimeout(300)
                os._exit(do(made))
        except BaseException:
            os._exit(99)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    folder.chmod(0o700)
    return code


@as_root
def test_another_user_that_connects_is_refused(clinic: Context) -> None:
    assert send_to_resident(who_are_you(), clinic) is not None
    file = resident_folder(clinic) / SOCKET

    def connect(made: socket.socket) -> int:
        made.connect(file.name)
        with contextlib.suppress(ConnectionError):
            made.sendall(b"\0" * 8)
            return len(made.recv(1))
        return 0

    assert as_nobody(file.parent, connect) == 99  # by the mode of the socket
    file.chmod(0o666)
    assert as_nobody(file.parent, connect) == 0  # it hears nothing
    file.chmod(0o600)
    assert send_to_resident(who_are_you(), clinic) is not None


@as_root
def test_a_message_is_not_handed_to_another_user_that_listens(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    def listen(made: socket.socket) -> int:
        made.bind(SOCKET)
        os.chmod(SOCKET, 0o666)
        made.listen()
        os.write(writer, b".")
        connection, _ = made.accept()
        return len(connection.recv(1))

    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(as_nobody(tmp_path, listen)))
    thread.start()
    os.read(reader, 1)
    refusal = pytest.raises(PermissionError, match=f"user {NOBODY} is at the other end")
    with refusal, connect_to_resident(tmp_path, 1.0):
        pass
    thread.join()
    assert codes == [0]  # nothing was said to it
    for item in (reader, writer):
        os.close(item)


def living(watched: int) -> tuple[int, socket.socket]:
    """A copy of this process that lives as a resident does, and a connection to it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # a name that the system finds
    listener.listen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            client_app.serve(listener, Path(os.devnull), [watched], 600.0)
        finally:
            os._exit(1)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(listener.getsockname())
    listener.close()
    return child, connection


def test_it_ends_with_its_supernode() -> None:
    with subprocess.Popen(["sleep", "600"]) as supernode:
        watched = os.pidfd_open(supernode.pid)
        child, connection = living(watched)
        time.sleep(0.1)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        supernode.kill()
        assert os.waitpid(child, 0)[1] == 0
    connection.close()
    os.close(watched)


def test_it_ends_when_nobody_waits_for_the_answer(clinic: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()

    def work(*settings: Any) -> None:
        os.write(writer, b".")
        time.sleep(600)

    monkeypatch.setattr(site_requests, "handle_message", work)
    watched = os.pidfd_open(os.getpid())
    child, connection = living(watched)
    for part in (flwr_adapter.message_to_bytes(who_are_you()), flwr_adapter.context_to_bytes(clinic)):
        client_app.send(connection, part)
    os.read(reader, 1)
    connection.close()
    assert os.waitpid(child, 0)[1] == 0
    for item in (watched, reader, writer):
        os.close(item)


@pytest.mark.slow
def test_a_run_is_the_same_to_the_bit_though_its_resident_is_killed_between_and_within_messages(
    tiny: Callable[..., Config], train: Callable[..., Path], tmp_path: Path
) -> None:
    config = tiny("fedsr", "server.rounds=2", "run.workers=1")
    own = {"data-root": str(config.data.root), "state": str(tmp_path / "state"), "device": "cpu"}
    at = context_of({"partition-id": 0, **own}, 7)
    resident_folder(at).mkdir(parents=True, mode=0o700)
    with (
        socket.socket(socket.AF_UNIX) as stale,
        contextlib.chdir(resident_folder(at)),
    ):  # of one that was killed long ago
        stale.bind(SOCKET)  # a longer path may be too long
    by: list[int | None] = []
    settings: list[Message] = []

    def node(message: Message) -> Message:
        if len(by) == 1:
            kill(*residents_of(at))
            threading.Thread(target=kill_next, args=(at,)).start()
        settings.append(message)
        reply = send_to_resident(message, at, idle=600.0)
        by.append(None if reply is None else residents_of(at)[0].pid)
        return handle_message(message, at, open_local_site) if reply is None else reply

    others = {number: site(partition_id=number, state=str(tmp_path / f"{number}"), device="cpu") for number in (1, 2)}
    grid = MemoryGrid({7: node, **{number: others[number] for number in (1, 2)}})
    with open_deployment(grid, DeploymentSettings(config, tmp_path / "run", False, 3, 0.0, 60.0)) as (session, rounds):
        for _ in rounds:
            pass
    assert [record.dropped for record in session.records] == [{}, {}]
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert model == (train(config, tmp_path / "one") / "model.safetensors").read_bytes()
    first, killed, *later = by
    assert first is not None
    assert killed is None
    assert later[0] not in (None, first)
    kill(*residents_of(at))
    assert send_to_resident(settings[0], at, idle=3.0) is not None  # long enough to let go of the lock before it ends
    until = time.monotonic() + 300
    while residents_of(at):  # until it ends by itself, having nothing to do
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not (resident_folder(at) / SOCKET).exists()


def residents_of(context: Context) -> list[psutil.Process]:
    """Those that were started for this site's folder."""
    return [process for process in residents() if str(resident_folder(context).resolve()) in process.cmdline()]


def kill_next(context: Context) -> None:
    """Kill the resident that comes next as soon as it is there: somebody waits for its answer."""
    while not (result := residents_of(context)):
        time.sleep(0.01)
    kill(result[0])


def test_a_site_may_go_without(tmp_path: Path) -> None:
    assert can_use_resident(context_of({"partition-id": 0}))
    assert not can_use_resident(context_of({"partition-id": 0, "resident": False}))
    odd = context_of({"partition-id": 0, "resident": "no", "state": str(tmp_path)})
    assert not can_use_resident(odd)
    reason = handle_message(who_are_you(), odd, open_local_site).error.reason
    assert reason == "site 0: resident in its node-config is neither true nor false; the site's log tells more"
