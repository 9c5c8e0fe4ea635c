"""Clients one after the other."""

from collections.abc import Iterator, Sequence

from fedcir.data.federation import Client
from fedcir.engine.client import Workbench, attend
from fedcir.engine.cost import peak_memory
from fedcir.engine.store import ClientStore
from fedcir.types import ClientReply, ServerState


class SerialTransport:
    """Clients one after the other in this process."""

    def __init__(self, bench: Workbench, clients: Sequence[Client], store: ClientStore | None = None) -> None:
        self.bench, self.clients, self.store = bench, clients, store or ClientStore()

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        for client in cohort:
            yield attend(self.bench, self.clients[client], self.store, "train", state.shared, state.round + 1)

    def evaluate(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        for client in cohort:
            yield attend(self.bench, self.clients[client], self.store, "evaluate", state.shared, state.round)

    def peak_memory(self) -> int:
        return peak_memory()
