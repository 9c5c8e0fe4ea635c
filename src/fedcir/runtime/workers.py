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
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from fedcir.client.client_requests import RequestKind, handle_request
from fedcir.client.cost import peak_memory
from fedcir.client.local_update import LocalTrainer
from fedcir.client.state import ClientStore
from fedcir.data.federation import Client
from fedcir.errors import InputError
from fedcir.models.tensors import clone
from fedcir.runtime.devices import exit_with_parent, is_out_of_memory, stop_openmp_threads
from fedcir.text import to_one_line
from fedcir.types import ClientReply, Groups, ServerState

ALIGNMENT = 64
LOOKAHEAD = 16
"""Clients per process that are sorted by size together. This bounds the replies that wait in memory."""
Layout = list[tuple[str, list[tuple[str, str, list[int], int]]]]
"""Location of tensors in shared memory: for each group, the name, dtype, shape and offset of each tensor."""


class ThreadTransport:
    """Clients spread over threads, each with its own networks and CUDA stream, on one or several devices."""

    def __init__(self, trainers: Sequence[LocalTrainer], clients: Sequence[Client], store: ClientStore) -> None:
        self.trainers, self.clients, self.store = trainers, clients, store
        for trainer in trainers:
            trainer.concurrent = len(trainers) > 1

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return self._handle("train", state.shared, state.round + 1, cohort)

    def evaluate(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return self._handle("evaluate", state.shared, state.round, cohort)

    def peak_memory(self) -> int:
        devices = {trainer.device for trainer in self.trainers if trainer.device.type == "cuda"}
        return peak_memory() + sum(torch.cuda.max_memory_allocated(device) for device in devices)

    def _handle(self, kind: RequestKind, shared: Groups, round: int, cohort: Sequence[int]) -> Iterator[ClientReply]:
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
        self._file = os.memfd_create("fedcir")
        self._map: mmap.mmap | None = None

    def write(self, groups: Groups) -> Layout:
        layout: Layout = []
        end = 0
        for group, tensors in groups.items():
            entries = []
            for name, tensor in tensors.items():
                entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
                end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
            layout.append((group, entries))
        if self._map is None or len(self._map) < end:
            os.ftruncate(self._file, max(end, ALIGNMENT))
        for group, views in self.read(layout).items():
            for name, view in views.items():
                view.copy_(groups[group][name])
        return layout

    def read(self, layout: Layout) -> Groups:
        """Return views of the buffer; the next write changes them."""
        size = os.fstat(self._file).st_size
        if size and (self._map is None or len(self._map) < size):
            self._map = mmap.mmap(self._file, size)
        groups: Groups = {}
        for group, entries in layout:
            groups[group] = {}
            for name, dtype_name, shape, offset in entries:
                dtype, count = getattr(torch, dtype_name), torch.Size(shape).numel()
                tensor = torch.empty(shape, dtype=dtype)
                if count:
                    assert self._map is not None
                    tensor = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)
                groups[group][name] = tensor
        return groups

    def close(self) -> None:
        """Close the buffer. Views stay valid as long as they are referenced."""
        self._map = None
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


@dataclass
class Worker:
    """A worker process, as its parent sees it."""

    pid: int
    pipe: Connection
    buffers: tuple[SharedTensors, SharedTensors]
    """The worker writes a reply into one while the parent reads the other."""
    turn: int = 0
    peak_memory: int = 0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def close(self) -> None:
        self.pipe.close()
        for buffer in self.buffers:
            buffer.close()


class Retry(NamedTuple):
    """A client whose request the parent process handles itself."""

    client: int
    reason: str = ""
    """What happened to the worker that had the request."""


@dataclass
class Requests:
    """Requests to train on one state or to evaluate it, and their replies."""

    kind: RequestKind
    round: int
    shared: Groups
    waiting: deque[int]
    """Clients whose request nobody has taken yet."""
    replies: SimpleQueue[ClientReply | Retry | Exception] = field(default_factory=SimpleQueue)


class ProcessTransport:
    """Clients spread over this process and resident worker processes."""

    def __init__(self, trainer: LocalTrainer, clients: Sequence[Client], store: ClientStore, workers: int) -> None:
        self.trainer, self.clients, self.store = trainer, clients, store
        self._state = SharedTensors()
        self._threads: list[threading.Thread] = []
        self._workers: list[Worker] = []
        while len(self._workers) < workers - 1:
            self._workers.append(self._fork())

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return self._handle("train", state.round + 1, state.shared, cohort)

    def evaluate(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return self._handle("evaluate", state.round, state.shared, cohort)

    def peak_memory(self) -> int:
        """Sum of the peak memory of all processes, in bytes."""
        return peak_memory() + sum(worker.peak_memory for worker in self._workers)

    def close(self) -> None:
        """End all worker processes."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
        self._join_threads()
        for worker in workers:
            worker.close()
        self._state.close()

    def _handle(self, kind: RequestKind, round: int, shared: Groups, cohort: Sequence[int]) -> Iterator[ClientReply]:
        requests = Requests(kind, round, shared, deque(self._sort_by_size(kind, cohort)))
        if self._workers and len(cohort) > 1:
            self._join_threads()
            message = {"kind": kind, "round": round, "state": self._state.write(shared)}
            for worker in self._workers:
                thread = threading.Thread(target=self._dispatch, args=(worker, requests, message), daemon=True)
                thread.start()
                self._threads.append(thread)
        try:
            for _ in cohort:
                yield self._next_reply(requests)
        finally:
            requests.waiting.clear()

    def _sort_by_size(self, kind: RequestKind, cohort: Sequence[int]) -> Iterator[int]:
        """Largest clients first, within a window: replies are used by client number and wait for those before them."""
        data = {
            client: self.clients[client].train if kind == "train" else self.clients[client].test for client in cohort
        }
        window = LOOKAHEAD * (len(self._workers) + 1)
        for begin in range(0, len(cohort), window):
            yield from sorted(cohort[begin : begin + window], key=lambda client: len(data[client] or ()), reverse=True)

    def _next_reply(self, requests: Requests) -> ClientReply:
        """Return a worker's reply if there is one, and otherwise handle the next request here."""
        reply: ClientReply | Retry | Exception | None = None
        if requests.replies.empty():
            with contextlib.suppress(IndexError):
                reply = Retry(requests.waiting.popleft())
        if reply is None:
            reply = requests.replies.get()
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, ClientReply):
            return reply
        if reply.reason:
            warnings.warn(f"{reply.reason}; client {reply.client} is repeated here", RuntimeWarning, stacklevel=2)
        client = self.clients[reply.client]
        return handle_request(self.trainer, client, self.store, requests.kind, requests.shared, requests.round)

    def _dispatch(self, worker: Worker, requests: Requests, message: dict[str, Any]) -> None:
        """Send requests to a worker and queue its replies. Runs in a thread of its own for each worker."""
        try:
            answer: dict[str, Any] | None = None
            while requests.waiting:
                try:
                    client = requests.waiting.popleft()
                except IndexError:  # another thread took the last one
                    break
                turn, worker.turn = worker.turn, 1 - worker.turn
                with contextlib.suppress(OSError):  # if the worker has died, receiving fails too
                    worker.pipe.send_bytes(json.dumps({**message, "client": client, "turn": worker.turn}).encode())
                if answer is not None:  # copied while the worker handles the next request
                    requests.replies.put(_read_answer(worker, answer, turn))
                try:
                    answer = json.loads(worker.pipe.recv_bytes())
                except (EOFError, OSError):
                    if worker in self._workers:  # continue without it
                        self._workers.remove(worker)
                        worker.kill()
                        worker.close()
                    reason = f"worker process {worker.pid} died ({len(self._workers)} left)"
                    requests.replies.put(Retry(client, reason))
                    return
            if answer is not None:
                requests.replies.put(_read_answer(worker, answer, worker.turn))
        except Exception as error:  # or the parent would wait for a reply forever
            requests.replies.put(error)

    def _join_threads(self) -> None:
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _fork(self) -> Worker:
        parent_end, worker_end = Pipe()
        buffers = (SharedTensors(), SharedTensors())
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
                self._serve(worker_end, buffers)
            finally:
                os._exit(0)
        worker_end.close()
        return Worker(pid, parent_end, buffers)

    def _serve(self, pipe: Connection, buffers: tuple[SharedTensors, SharedTensors]) -> None:
        """Handle requests in a worker process until the parent ends it."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends this process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            try:
                message = json.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                return
            number = message["client"]
            try:
                shared = self._state.read(message["state"])
                client, kind, round = self.clients[number], message["kind"], message["round"]
                reply = handle_request(self.trainer, client, self.store, kind, shared, round)
                answer: dict[str, Any] = {
                    "num_examples": reply.num_examples,
                    "metrics": dict(reply.metrics),
                    "layout": buffers[message["turn"]].write(reply.tensors),
                    "memory": peak_memory(),
                }
            except Exception as error:
                answer = {"error": to_one_line(error), "expected": isinstance(error, InputError)}
                if is_out_of_memory(error):
                    fix = "lower run.workers, local.batch_size or data.image_size"
                    text = f"a worker process ran out of memory on client {number}: {fix}"
                    answer = {"error": text, "expected": True}
            pipe.send_bytes(json.dumps({"client": number, **answer}).encode())


def _read_answer(worker: Worker, answer: dict[str, Any], turn: int) -> ClientReply | Retry | InputError:
    if "error" in answer:  # an error that the user did not cause is raised again here, with its traceback
        return InputError(answer["error"]) if answer["expected"] else Retry(answer["client"])
    worker.peak_memory = answer["memory"]
    tensors = clone(worker.buffers[turn].read(answer["layout"]))
    return ClientReply(answer["client"], answer["num_examples"], tensors, answer["metrics"])
