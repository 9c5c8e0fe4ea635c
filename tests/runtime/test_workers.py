"""Worker processes: the same bits however many there are, and nothing lost or left when one dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedcir.config import Config
from fedcir.data.federation import open_federation
from fedcir.runtime.rounds import run_rounds
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.session import open_session
from fedcir.runtime.workers import ProcessTransport, SharedTensors, ThreadTransport
from fedcir.types import ClientReply, Groups

HURRY = 300  # seconds until a process that should have ended is given up

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="worker processes need Linux")

Tiny = Callable[..., Config]
Train = Callable[..., Path]
FILES = ("model.safetensors", "manifest.json")


def children() -> list[int]:
    """Processes that this one has started and that live."""
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return [int(number) for number in path.read_text().split()]


def without_times(run: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.mark.parametrize("name", ["fedcir", "fedbn"])
def test_one_two_and_three_workers_give_the_same_bits(name: str, tiny: Tiny, train: Train, tmp_path: Path) -> None:
    settings = ["partition.scheme=dirichlet", "partition.clients=6", "server.active=4", "data.val_fraction=0.2"]
    runs = [train(tiny(name, *settings, f"run.workers={n}"), tmp_path / str(n)) for n in (1, 2, 3)]
    for other in runs[1:]:
        assert without_times(other) == without_times(runs[0])
        for file in FILES:
            assert (other / file).read_bytes() == (runs[0] / file).read_bytes()
    assert children() == []


def test_batchnorm_of_their_own_stays_with_clients_whoever_trains_them(
    tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    runs = [train(tiny("fedsr", "model.batchnorm=local", f"run.workers={n}"), tmp_path / str(n)) for n in (1, 3)]
    assert without_times(runs[0]) == without_times(runs[1])


@pytest.fixture
def opened(tiny: Tiny, tmp_path: Path) -> Iterator[Callable[[int], tuple[ProcessTransport, object]]]:
    transports = []

    def start(workers: int, *settings: str) -> tuple[ProcessTransport, object]:
        from fedcir.algorithms import make_algorithm
        from fedcir.client.state import ClientStore

        config = tiny("fedsr", *settings)
        algorithm, federation = make_algorithm(config.algorithm), open_federation(config)
        session = open_session(config, algorithm, federation)
        store = ClientStore(tmp_path / "kept")
        clients = [replace(client, tamper=die) for client in federation.clients]
        transport = ProcessTransport(session.make_trainer(), clients, store, workers)
        transports.append(transport)
        return transport, session

    def die(reply: ClientReply, shared: Groups, round: int) -> ClientReply:
        """In the worker that the file `dies` names, when its client is trained and its reply not yet sent."""
        if (tmp_path / "dies").exists() and (tmp_path / "dies").read_text() == str(os.getpid()):
            os.kill(os.getpid(), signal.SIGKILL)
        return reply

    yield start
    for transport in transports:
        transport.close()


def test_a_worker_killed_in_the_middle_of_a_round_changes_no_bit(
    opened: Callable[..., tuple[ProcessTransport, object]], tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    whole = train(tiny("fedsr", "run.workers=1"), tmp_path / "whole")
    transport, session = opened(2)
    first, second = children()
    (tmp_path / "dies").write_text(str(first))
    rounds = run_rounds(session, transport)
    with pytest.warns(RuntimeWarning, match=f"worker process {first} died"):
        next(rounds)
    os.kill(second, signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match=f"worker process {second} died"):
        list(rounds)
    expected = RunFolder(whole).records()
    assert [r.losses for r in session.records] == [r.losses for r in expected]
    assert [r.accuracy for r in session.records] == [r.accuracy for r in expected]
    assert [r.dropped for r in session.records] == [{}, {}, {}]
    assert children() == []


def test_closing_leaves_no_process_and_no_memory(opened: Callable[..., tuple[ProcessTransport, object]]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    transport, session = opened(3)
    next(run_rounds(session, transport))
    assert len(children()) == 3
    transport.close()
    assert children() == []
    assert set(os.listdir("/proc/self/fd")) <= before | {"3"}
    maps = Path("/proc/self/maps").read_text()
    del session
    assert maps.count("memfd:fedcir") <= 2  # what replies are still looked at


COMMAND = (
    "run --rounds 100000 --local-steps 2 --quiet --workers 3 --device cpu --set model.width=2 --set local.batch_size=8"
)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 130, marks=pytest.mark.slow),
        (signal.SIGKILL, -9),
    ],
)
def test_a_command_that_is_stopped_takes_its_workers_with_it(
    number: int, code: int, data_root: Path, tmp_path: Path
) -> None:
    command = [*COMMAND.split(), "--dataset", "arrays", "--data-root", str(data_root), "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedcir", *command], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    rounds = tmp_path / "run" / "rounds.jsonl"
    deadline = time.monotonic() + HURRY
    while not rounds.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(workers) == 3
    process.send_signal(number)
    _, message = process.communicate(timeout=HURRY)
    assert process.returncode == code
    assert message.count("\n") == (1 if code == 130 else 0)
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_a_worker_without_memory_is_said_in_one_line(
    opened: Callable[..., tuple[ProcessTransport, object]],
) -> None:
    import resource

    transport, session = opened(1, "local.batch_size=20000")  # about 200 MB for the first convolution
    [worker] = children()
    limits = resource.prlimit(worker, resource.RLIMIT_AS)
    resource.prlimit(worker, resource.RLIMIT_AS, (1 << 20, limits[1]))
    with pytest.raises(Exception, match="a worker process ran out of memory on client"):
        list(run_rounds(session, transport))


def test_what_the_user_did_wrong_is_said_as_without_workers() -> None:
    from torch import nn
    from torch.utils.data import Dataset

    import fedcir

    class Odd(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
            return torch.zeros(4), 7 if number == 3 else 1

    sites = [(Odd(), Odd()) for _ in range(4)]
    with pytest.raises(fedcir.InputError, match="gives the label 7: with num_classes=2"):
        fedcir.train(sites, encoder=nn.Linear(4, 4), num_classes=2, rounds=1, workers=3, device="cpu")
    assert children() == []


def test_a_buffer_holds_tensors_of_any_kind_and_grows() -> None:
    buffer = SharedTensors()
    small = {"a": {"x": torch.arange(3), "y": torch.tensor(2.5)}, "b": {}, "c": {"none": torch.empty(0, 4)}}
    large = {"a": {"x": torch.randn(300, 40), "flag": torch.tensor([True, False])}}
    for groups in (small, large, small):
        read = buffer.read(json.loads(json.dumps(buffer.write(groups))))
        assert read.keys() == groups.keys()
        for group, bag in groups.items():
            assert read[group].keys() == bag.keys()
            for name, tensor in bag.items():
                assert read[group][name].dtype == tensor.dtype
                assert torch.equal(read[group][name], tensor)
    buffer.close()


@pytest.mark.parametrize("name", ["fedavg", "fedcir", "fedsr"])
def test_threads_with_networks_of_their_own_give_the_same_bits(
    name: str, tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    """As on several GPUs, but on the CPU."""
    from fedcir.algorithms import make_algorithm
    from fedcir.client.state import ClientStore

    config = tiny(name)
    whole = RunFolder(train(config, tmp_path / "whole")).records()
    algorithm, federation = make_algorithm(config.algorithm), open_federation(config)
    session = open_session(config, algorithm, federation)
    workers = [session.make_trainer() for _ in range(3)]
    torch.set_num_threads(1)
    list(run_rounds(session, ThreadTransport(workers, federation.clients, ClientStore())))
    assert [r.losses for r in session.records] == [r.losses for r in whole]
    assert [r.accuracy for r in session.records] == [r.accuracy for r in whole]


def test_an_error_in_a_thread_reaches_the_caller(tiny: Tiny) -> None:
    from fedcir.algorithms import make_algorithm
    from fedcir.client.state import ClientStore

    config = tiny("fedavg")
    algorithm, federation = make_algorithm(config.algorithm), open_federation(config)
    session = open_session(config, algorithm, federation)
    transport = ThreadTransport([session.make_trainer()] * 2, federation.clients, ClientStore())
    with pytest.raises(RuntimeError, match="Missing key"):
        list(transport.train(session.state.__class__(0, {"model": {}}), [0, 1, 0]))
    assert isinstance(next(iter(transport.evaluate(session.state, [0]))), ClientReply)


def test_processes_start_beside_the_threads_of_an_earlier_run(
    tiny: Callable[..., Config], train: Callable[..., Path], tmp_path: Path
) -> None:
    """OpenMP's threads do not live on in a forked process, which would wait for them for ever."""

    def stuck(*_: object) -> None:
        raise TimeoutError

    train(tiny("fedavg", "run.threads=2", "run.workers=1", "server.rounds=1"), tmp_path / "threads")
    before = signal.signal(signal.SIGALRM, stuck)
    signal.alarm(HURRY)
    try:
        train(tiny("fedavg", "run.threads=2", "run.workers=3", "server.rounds=1"), tmp_path / "processes")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


DROPOUT = """
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.ReLU())
"""


def test_dropout_gives_the_same_bits_for_any_number_of_threads(tiny: Tiny, tmp_path: Path) -> None:
    """Threads share torch's default generators, which dropout draws from."""
    from fedcir.algorithms import make_algorithm
    from fedcir.client.state import ClientStore

    (tmp_path / "dropout.py").write_text(DROPOUT)
    config = tiny("fedavg", "local.steps=10", "server.rounds=2")
    config = replace(config, model=replace(config.model, name=f"{tmp_path}/dropout.py:make", width=None))
    algorithm, federation = make_algorithm(config.algorithm), open_federation(config)
    losses = []
    for threads in (1, 2, 3):
        session = open_session(config, algorithm, federation)
        workers = [session.make_trainer() for _ in range(threads)]
        list(run_rounds(session, ThreadTransport(workers, federation.clients, ClientStore())))
        losses.append([record.losses for record in session.records])
    assert losses[0] == losses[1] == losses[2]


def test_threads_that_draw_nothing_train_at_the_same_time(tiny: Tiny) -> None:
    from fedcir.algorithms import make_algorithm
    from fedcir.client.state import ClientStore

    config = tiny("fedavg", "server.rounds=1")
    algorithm, federation = make_algorithm(config.algorithm), open_federation(config)
    session = open_session(config, algorithm, federation)
    workers = [session.make_trainer() for _ in range(2)]
    list(run_rounds(session, ThreadTransport(workers, federation.clients, ClientStore())))
    assert [worker.concurrent for worker in workers] == [True, True]
