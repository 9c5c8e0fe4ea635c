"""Resident worker processes: this process and copies of it, which keep networks, data maps and buffers alive.

The copies are made by fork, so they start at once, share what was loaded, and take Datasets and modules of any kind.
Tensors travel through memory without a name, which the system frees when the last process that has it ends; the few
words beside them are JSON. Nothing is pickled.
"""

import json
import os
import queue
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from fedcir.data.federation import Client
from fedcir.engine.client import What, Workbench, attend
from fedcir.engine.cost import peak_memory
from fedcir.engine.machine import end_idle_threads, end_with
from fedcir.engine.store import ClientStore
from fedcir.engine.transports.arena import Arena
from fedcir.models.tensors import clone
from fedcir.types import ClientReply, Groups, InputError, ServerState

AHEAD = 16
"""Clients for each process that are sorted by length together, which bounds the replies that wait in memory."""


@dataclass
class Worker:
    """A worker process, as the first one sees it."""

    pid: int
    pipe: Connection
    answers: tuple[Arena, Arena]
    """It writes into one while the other is read."""
    turn: int = 0
    memory: int = 0
    """Bytes it has held at most."""

    def end(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass

    def close(self) -> None:
        self.pipe.close()
        for arena in self.answers:
            arena.close()


class Again(NamedTuple):
    """A client that this process must do itself."""

    client: int
    because: str = ""
    """What happened to the worker that had it."""


@dataclass
class Work:
    """Clients that are to train or to test one state."""

    what: What
    round: int
    shared: Groups
    left: deque[int]
    count: int
    answers: "queue.Queue[ClientReply | Again | Exception]" = field(default_factory=queue.Queue)


class ProcessTransport:
    """Clients spread over this process and others."""

    def __init__(
        self,
        bench: Workbench,
        clients: Sequence[Client],
        store: ClientStore,
        workers: int,
        allowed: Callable[[], int] = lambda: 1,
    ) -> None:
        """`allowed` is asked before every round how many processes there may be by now."""
        self.bench, self.clients, self.store = bench, clients, store
        self._state = Arena()
        self._workers: list[Worker] = []
        self._count, self._allowed = 1, allowed
        self._server: threading.Thread | None = None
        self._grow(workers)

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        self._grow(min(self._allowed(), len(self.clients)))
        yield from self._finish(self._begin("train", state.round + 1, state.shared, cohort))

    def evaluate(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        yield from self._finish(self._begin("evaluate", state.round, state.shared, cohort))

    def peak_memory(self) -> int:
        """Bytes that all processes together have held at most."""
        return peak_memory() + sum(worker.memory for worker in self._workers)

    def close(self) -> None:
        """End all other processes; nothing of them is left."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()
        if self._server is not None:
            self._server.join()
        for worker in workers:
            worker.close()
        self._state.close()

    def _grow(self, workers: int) -> None:
        """Be so many processes, if there were fewer from the start: one that died is not replaced."""
        if self._count < workers and self._server is not None:
            self._server.join()  # no thread of ours goes on beside a fork
        while self._count < workers:
            self._workers.append(self._fork())
            self._count += 1

    def _begin(self, what: What, round: int, shared: Groups, cohort: Sequence[int]) -> Work:
        work = Work(what, round, shared, deque(self._in_order(what, cohort)), len(cohort))
        if self._workers and len(cohort) > 1:
            if self._server is not None:
                self._server.join()
            job = {"what": what, "round": round, "state": self._state.write(shared)}
            self._server = threading.Thread(target=self._serve, args=(work, job), daemon=True)
            self._server.start()
        return work

    def _in_order(self, what: What, cohort: Sequence[int]) -> Iterator[int]:
        """The longest first, but only among neighbours: replies are used by number, and wait for those before them."""
        some = AHEAD * (len(self._workers) + 1)
        for begin in range(0, len(cohort), some):
            yield from sorted(cohort[begin : begin + some], key=lambda client: -self._size(what, client))

    def _finish(self, work: Work) -> Iterator[ClientReply]:
        """Do what is left of the work here, beside the others, and give every reply."""
        for _ in range(work.count):
            reply: ClientReply | Again | Exception
            if work.answers.empty() and work.left:
                try:
                    reply = Again(work.left.popleft())
                except IndexError:  # another process was quicker
                    reply = work.answers.get()
            else:
                reply = work.answers.get()
            if isinstance(reply, Exception):
                raise reply
            if isinstance(reply, Again):
                if reply.because:
                    warnings.warn(
                        f"{reply.because}; client {reply.client} is repeated here", RuntimeWarning, stacklevel=2
                    )
                reply = attend(self.bench, self.clients[reply.client], self.store, work.what, work.shared, work.round)
            yield reply

    def _size(self, what: What, client: int) -> int:
        data = self.clients[client].train if what == "train" else self.clients[client].test
        return len(data or ())

    def _serve(self, work: Work, job: dict[str, Any]) -> None:
        """In a thread of its own: hand out work to the other processes and take in their answers."""
        try:
            self._hand_out(work, job)
        except Exception as error:  # whoever waits for answers must not wait for ever
            work.answers.put(error)

    def _hand_out(self, work: Work, job: dict[str, Any]) -> None:
        busy: dict[Connection, tuple[Worker, int]] = {}

        def hand_to(worker: Worker) -> None:
            try:
                client = work.left.popleft()
            except IndexError:
                return
            try:
                worker.turn = 1 - worker.turn
                worker.pipe.send_bytes(json.dumps({**job, "client": client, "turn": worker.turn}).encode())
                busy[worker.pipe] = (worker, client)
            except OSError:
                work.answers.put(Again(client, self._lost(worker)))

        for worker in list(self._workers):
            hand_to(worker)
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                worker, client = busy.pop(pipe)
                try:
                    answer = json.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    work.answers.put(Again(client, self._lost(worker)))
                    continue
                written = worker.answers[worker.turn]
                hand_to(worker)
                if "error" in answer:
                    work.answers.put(InputError(answer["error"]) if answer["expected"] else Again(client))
                else:
                    worker.memory = answer["memory"]
                    arrays = clone(written.read(answer["arrays"]))
                    work.answers.put(ClientReply(client, answer["num_examples"], arrays, answer["metrics"]))

    def _lost(self, worker: Worker) -> str:
        """A worker has died: go on without it."""
        if worker in self._workers:
            self._workers.remove(worker)
            worker.end()
            worker.close()
        return f"worker process {worker.pid} died ({len(self._workers)} left)"

    def _fork(self) -> Worker:
        here, there = Pipe()
        answers = (Arena(), Arena())
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        end_idle_threads()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads are none of its business
            pid = os.fork()
        if pid == 0:
            try:
                here.close()
                end_with(parent)
                self._live(there, answers)
            finally:
                os._exit(0)
        there.close()
        return Worker(pid, here, answers)

    def _live(self, pipe: Connection, answers: tuple[Arena, Arena]) -> None:
        """What a worker process does until the first one ends it."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process, which then ends this one
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            try:
                job = json.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                return
            try:
                client, shared = self.clients[job["client"]], self._state.read(job["state"])
                reply = attend(self.bench, client, self.store, job["what"], shared, job["round"])
                answer: dict[str, Any] = {
                    "num_examples": reply.num_examples,
                    "metrics": dict(reply.metrics),
                    "arrays": answers[job["turn"]].write(reply.arrays),
                    "memory": peak_memory(),
                }
            except Exception as error:
                answer = _described(error, job["client"])
            pipe.send_bytes(json.dumps(answer).encode())


def too_little_memory(error: BaseException) -> bool:
    """Torch says so in words only, and not always in the same."""
    said = ("allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(words in str(error) for words in said)


def _described(error: Exception, client: int) -> dict[str, Any]:
    """An error for the first process. One that the user did not cause is met again there, with its traceback."""
    if too_little_memory(error):
        return {
            "error": f"a worker process ran out of memory on client {client}: "
            "lower run.workers, local.batch_size or data.image_size",
            "expected": True,
        }
    return {"error": " ".join(str(error).split()), "expected": isinstance(error, InputError)}
