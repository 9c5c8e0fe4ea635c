"""Clients in parallel on one machine: on resident worker processes (CPU) or in threads (GPU).

Worker processes are forks of this process: they start at once, share what it has loaded, and can use Datasets and
modules of any kind. Tensors travel through anonymous shared memory, which the system frees with the last process that
maps it; everything else is JSON. Nothing is pickled.
"""

import contextlib
import json
import mmap
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

import torch

from fedcir.client.client_requests import RequestKind, handle_request
from fedcir.client.cost import peak_memory
from fedcir.client.local_update import LocalTrainer
from fedcir.client.state import ClientStore
from fedcir.data.federation import Client
from fedcir.errors import InputError
from fedcir.machine import exit_with_parent, is_out_of_memory, stop_openmp_threads
from fedcir.models.tensors import clone
from fedcir.runtime.rounds import SerialTransport
from fedcir.text import to_one_line
from fedcir.types import ClientReply, Groups

ALIGNMENT = 64
LOOKAHEAD = 16
"""Clients per process that are sorted by size together. This bounds the replies that wait in memory."""
Layout = dict[str, dict[str, tuple[str, list[int], int]]]
"""Location of tensors in shared memory: dtype, shape and offset by group and name."""


class ThreadTransport(SerialTransport):
    """Clients spread over threads, each with its own networks and CUDA stream, on one or several devices."""

    def __init__(self, trainers: Sequence[LocalTrainer], clients: Sequence[Client], store: ClientStore) -> None:
        super().__init__(trainers[0], clients, store)
        self.trainers = trainers
        for trainer in trainers:
            trainer.concurrent = len(trainers) > 1

    def peak_memory(self) -> int:
        devices = {trainer.device for trainer in self.trainers if trainer.device.type == "cuda"}
        return peak_memory() + sum(torch.cuda.max_memory_allocated(device) for device in devices)

    def _handle(self, kind: RequestKind, round: int, shared: Groups, cohort: Sequence[int]) -> Iterator[ClientReply]:
        idle: SimpleQueue[tuple[LocalTrainer, Any]] = SimpleQueue()
        make_stream: Any = torch.cuda.Stream
        for trainer in self.trainers:
            idle.put((trainer, make_stream(trainer.device) if trainer.device.type == "cuda" else None))

        def handle(client: int) -> ClientReply:
            trainer, stream = idle.get()
            try:
                with torch.cuda.stream(stream):  # None has no effect
                    return handle_request(trainer, self.clients[client], self.store, kind, shared, round)
            finally:
                idle.put((trainer, stream))

        with ThreadPoolExecutor(len(self.trainers)) as pool:
            try:
                for future in as_completed(pool.submit(handle, client) for client in cohort):
                    yield future.result()
            finally:
                pool.shutdown(cancel_futures=True)


class SharedTensors:
    """A buffer of tensors in memory that processes share."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("fedcir"), "r+b", buffering=0)

    def write(self, groups: Groups) -> Layout:
        layout: Layout = {}
        end = 0
        for group, tensors in groups.items():
            layout[group] = {}
            for name, tensor in tensors.items():
                layout[group][name] = str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end
                end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if os.fstat(self._file.fileno()).st_size < end:
            self._file.truncate(end)
        for group, views in self.read(layout).items():
            for name, view in views.items():
                view.copy_(groups[group][name])
        return layout

    def read(self, layout: Layout) -> Groups:
        """Return views of the buffer, which the next write changes. They stay valid after `close`."""
        size = os.fstat(self._file.fileno()).st_size
        buffer = mmap.mmap(self._file.fileno(), size) if size else bytearray()

        def view(dtype_name: str, shape: list[int], offset: int) -> torch.Tensor:
            dtype, count = getattr(torch, dtype_name), torch.Size(shape).numel()
            if not count:
                return torch.empty(shape, dtype=dtype)
            return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)

        return {group: {name: view(*entry) for name, entry in entries.items()} for group, entries in layout.items()}

    def close(self) -> None:
        self._file.close()


@dataclass(eq=False)
class Worker:
    """A worker process, as its parent sees it."""

    pid: int
    pipe: Connection
    buffer: SharedTensors
    """Tensors of its last reply."""
    client: int | None = None
    """The client whose request it handles; None if it is idle."""
    peak_memory: int = 0

    def close(self) -> None:
        """End the process and free its memory."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.pipe.close()
        self.buffer.close()


class ProcessTransport(SerialTransport):
    """Clients spread over resident worker processes. This process repeats the client of a worker that died."""

    def __init__(self, trainer: LocalTrainer, clients: Sequence[Client], store: ClientStore, workers: int) -> None:
        super().__init__(trainer, clients, store)
        self._state = SharedTensors()
        self._workers: list[Worker] = []
        while len(self._workers) < workers:
            self._workers.append(self._fork())

    def peak_memory(self) -> int:
        return peak_memory() + sum(worker.peak_memory for worker in self._workers)

    def close(self) -> None:
        """End all worker processes."""
        while self._workers:
            self._workers.pop().close()
        self._state.close()

    def _handle(self, kind: RequestKind, round: int, shared: Groups, cohort: Sequence[int]) -> Iterator[ClientReply]:
        for worker in self._workers:
            if worker.client is not None:  # it handles a request of a round that was not completed
                with contextlib.suppress(EOFError, OSError):
                    worker.pipe.recv_bytes()
                worker.client = None
        waiting = deque(self._sort_by_size(kind, cohort))
        message = {"kind": kind, "round": round, "state": self._state.write(shared)}
        replies: list[ClientReply] = []
        while True:
            for worker in self._workers:
                if worker.client is None and waiting:
                    worker.client = waiting.popleft()
                    with contextlib.suppress(OSError):  # if the worker has died, receiving fails too
                        worker.pipe.send_bytes(json.dumps({**message, "client": worker.client}).encode())
            yield from replies  # while the workers are busy
            busy: dict[Any, Worker] = {worker.pipe: worker for worker in self._workers if worker.client is not None}
            if not busy:
                break
            replies = []
            for pipe in wait(list(busy)):
                worker = busy[pipe]
                client, worker.client = worker.client, None
                assert client is not None
                replies += self._receive(worker, client) or super()._handle(kind, round, shared, [client])
        yield from super()._handle(kind, round, shared, list(waiting))  # no worker is left

    def _sort_by_size(self, kind: RequestKind, cohort: Sequence[int]) -> Iterator[int]:
        """Largest clients first, within a window: replies are used by client number and wait for those before them."""
        clients = {number: self.clients[number] for number in cohort}
        sizes = {number: len((c.train if kind == "train" else c.test) or ()) for number, c in clients.items()}
        window = LOOKAHEAD * max(1, len(self._workers))
        for begin in range(0, len(cohort), window):
            yield from sorted(cohort[begin : begin + window], key=sizes.__getitem__, reverse=True)

    def _receive(self, worker: Worker, client: int) -> list[ClientReply]:
        """Return the reply of a worker; none if this process must repeat the request."""
        try:
            answer = json.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):  # continue without it
            self._workers.remove(worker)
            worker.close()
            left = f"worker process {worker.pid} died ({len(self._workers)} left)"
            warnings.warn(f"{left}; client {client} is repeated here", RuntimeWarning, stacklevel=2)
            return []
        if answer.get("expected"):
            raise InputError(answer["error"])
        if "error" in answer:  # an error that the user did not cause is raised again here, with its traceback
            return []
        worker.peak_memory = answer["memory"]
        tensors = clone(worker.buffer.read(answer["layout"]))
        return [ClientReply(client, answer["num_examples"], tensors, answer["metrics"])]

    def _fork(self) -> Worker:
        parent_end, worker_end = Pipe()
        buffer = SharedTensors()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        stop_openmp_threads()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the worker uses none of this process's threads
            pid = os.fork()
        if pid == 0:
            try:
                parent_end.close()
                exit_with_parent(parent)
                self._serve(worker_end, buffer)
            finally:
                os._exit(0)
        worker_end.close()
        return Worker(pid, parent_end, buffer)

    def _serve(self, pipe: Connection, buffer: SharedTensors) -> None:
        """Handle requests in a worker process until the parent ends it."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends this process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            try:
                message = json.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                return
            number, kind, round = message["client"], message["kind"], message["round"]
            try:
                shared = self._state.read(message["state"])
                reply = handle_request(self.trainer, self.clients[number], self.store, kind, shared, round)
                answer: dict[str, Any] = {
                    "num_examples": reply.num_examples,
                    "metrics": dict(reply.metrics),
                    "layout": buffer.write(reply.tensors),
                    "memory": peak_memory(),
                }
            except Exception as error:
                answer = {"error": to_one_line(error), "expected": isinstance(error, InputError)}
                if is_out_of_memory(error):
                    fix = "lower run.workers, local.batch_size or data.image_size"
                    text = f"a worker process ran out of memory on client {number}: {fix}"
                    answer = {"error": text, "expected": True}
            pipe.send_bytes(json.dumps(answer).encode())
