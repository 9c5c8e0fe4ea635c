"""Several clients in flight on accelerators: threads of one process, each with networks and a stream of its own."""

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence

import torch

from fedcir.data.federation import Client
from fedcir.engine.client import What, Workbench, attend
from fedcir.engine.cost import peak_memory
from fedcir.engine.store import ClientStore
from fedcir.types import ClientReply, Groups, ServerState


class ThreadTransport:
    """Clients spread over workers, which may be on several devices."""

    def __init__(self, benches: Sequence[Workbench], clients: Sequence[Client], store: ClientStore) -> None:
        self.benches, self.clients, self.store = benches, clients, store
        for bench in benches:
            bench.concurrent = len(benches) > 1

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return self._spread("train", state.shared, state.round + 1, cohort)

    def evaluate(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return self._spread("evaluate", state.shared, state.round, cohort)

    def peak_memory(self) -> int:
        devices = {bench.device for bench in self.benches if bench.device.type == "cuda"}
        return peak_memory() + sum(torch.cuda.max_memory_allocated(device) for device in devices)

    def _spread(self, what: What, shared: Groups, round: int, cohort: Sequence[int]) -> Iterator[ClientReply]:
        left: queue.SimpleQueue[int] = queue.SimpleQueue()
        answers: queue.SimpleQueue[ClientReply | BaseException] = queue.SimpleQueue()
        for client in cohort:
            left.put(client)

        def work(bench: Workbench) -> None:
            with _stream(bench.device):
                while True:
                    try:
                        client = left.get_nowait()
                    except queue.Empty:
                        return
                    try:
                        answers.put(attend(bench, self.clients[client], self.store, what, shared, round))
                    except BaseException as error:
                        answers.put(error)
                        return

        threads = [threading.Thread(target=work, args=(bench,), daemon=True) for bench in self.benches]
        for thread in threads:
            thread.start()
        for _ in cohort:
            answer = answers.get()
            if isinstance(answer, BaseException):
                raise answer
            yield answer
        for thread in threads:
            thread.join()


def _stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
