"""What clients keep to themselves between rounds."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fedcir.data.private import private_folder
from fedcir.engine.files import pack, unpack, write
from fedcir.types import Groups, InputError

GENERATIONS = 2
"""States that a run keeps, so that a damaged one costs no more than some rounds."""

NAME = re.compile(r"round-(\d{6,9})\.safetensors")
"""Of a file that holds what was so after a round."""


class ClientStore:
    """What clients keep to themselves between rounds, by client and round. It is in no upload.

    With a path it lies on disk, a file each, so that it survives the process; without one, in memory.
    """

    def __init__(
        self, path: Path | None = None, generations: int = GENERATIONS, saved: Callable[[], Iterable[int]] = tuple
    ) -> None:
        self.path = path
        self.generations = generations
        """How many rounds back a resume may have to go."""
        self.saved = saved
        """Rounds further back that a resume may go to, because they have a checkpoint."""
        self._memory: dict[int, dict[int, Groups]] = {}

    def load(self, client: int, round: int) -> Groups:
        """What the client had kept before this round; nothing if it had not trained."""
        earlier = [each for each in self._rounds(client) if each < round]
        if not earlier:
            return {}
        if self.path is None:
            return self._memory[client][earlier[-1]]
        path = self._file(client, earlier[-1])
        kinds, about = unpack(path, "kept")
        if about.round != earlier[-1] or about.kept not in (None, {str(client): about.round}):
            owner = next(iter(about.kept or {}), client)
            raise InputError(f"{path} holds what client {owner} kept after round {about.round}")
        return kinds["kept"]

    def save(self, client: int, round: int, groups: Groups) -> None:
        if not groups:
            return
        if self.path is None:
            self._memory.setdefault(client, {})[round] = groups
        else:
            for folder in (self.path, self.path / str(client)):
                private_folder(folder)
            write(self._file(client, round), pack({"kept": groups}, round, {client: round}))
        rounds = self._rounds(client)
        needed = {each for each in rounds if round - self.generations < each <= round}  # later ones are given up
        for start in (round - self.generations, *self.saved()):
            needed.add(max((each for each in rounds if each <= start), default=0))
        for each in set(rounds) - needed:
            self._forget(client, each)

    def rounds(self, until: int) -> dict[int, int]:
        """The last round, up to this one, in which each client kept something."""
        found = {client: [each for each in self._rounds(client) if each <= until] for client in self._clients()}
        return {client: rounds[-1] for client, rounds in found.items() if rounds}

    def fault(self, round: int, kept: Mapping[int, int]) -> str | None:
        """What is wrong with what clients kept up to a round; None if all of it is there and reads back whole."""
        there = self.rounds(round)
        for client, each in kept.items():
            if there.get(client) != each:
                return f"{self._file(client, each)} is missing"
        try:
            for client in there:
                self.load(client, round + 1)
        except InputError as error:
            return str(error)
        return None

    def rewind(self, round: int) -> None:
        """Forget what clients kept after this round, which will not be repeated as it was."""
        for client in self._clients():
            for each in self._rounds(client):
                if each > round:
                    self._forget(client, each)

    def _forget(self, client: int, round: int) -> None:
        if self.path is None:
            del self._memory[client][round]
        else:
            self._file(client, round).unlink()

    def _file(self, client: int, round: int) -> Path:
        assert self.path is not None
        return self.path / str(client) / f"round-{round:06d}.safetensors"

    def _rounds(self, client: int) -> list[int]:
        if self.path is None:
            return sorted(self._memory.get(client, ()))
        names = [path.name for path in (self.path / str(client)).glob("round-*")]
        return sorted(int(found[1]) for name in names if (found := NAME.fullmatch(name)))

    def _clients(self) -> list[int]:
        if self.path is None:
            return sorted(self._memory)
        return sorted(int(each.name) for each in self.path.glob("*") if each.name.isdecimal())
