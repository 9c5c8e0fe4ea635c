"""What clients keep to themselves between rounds."""

from pathlib import Path

from fedcir.engine.files import pack, unpack, write
from fedcir.types import Groups

GENERATIONS = 2
"""States that a run keeps, so that a damaged one costs no more than some rounds."""


class ClientStore:
    """What clients keep to themselves between rounds, by client and round. It is in no upload.

    With a path it lies on disk, a file each, so that it survives the process; without one, in memory.
    """

    def __init__(self, path: Path | None = None, generations: int = GENERATIONS) -> None:
        self.path = path
        self.generations = generations
        """How many rounds back a resume may have to go."""
        self._memory: dict[int, dict[int, Groups]] = {}

    def load(self, client: int, round: int) -> Groups:
        """What the client had kept before this round; nothing if it had not trained."""
        earlier = [each for each in self._rounds(client) if each < round]
        if not earlier:
            return {}
        if self.path is None:
            return self._memory[client][earlier[-1]]
        return unpack(self._file(client, earlier[-1]), "kept")[0]["kept"]

    def save(self, client: int, round: int, groups: Groups) -> None:
        if not groups:
            return
        if self.path is None:
            self._memory.setdefault(client, {})[round] = groups
        else:
            self._file(client, round).parent.mkdir(parents=True, exist_ok=True)
            write(self._file(client, round), pack({"kept": groups}, round))
        old = [each for each in self._rounds(client) if each <= round - self.generations]
        for each in old[:-1]:  # the newest of them is where a resume would start
            if self.path is None:
                del self._memory[client][each]
            else:
                self._file(client, each).unlink()

    def _file(self, client: int, round: int) -> Path:
        assert self.path is not None
        return self.path / str(client) / f"round-{round:06d}.safetensors"

    def _rounds(self, client: int) -> list[int]:
        if self.path is None:
            return sorted(self._memory.get(client, ()))
        files = (self.path / str(client)).glob("round-*.safetensors")
        return sorted(int(file.stem.removeprefix("round-")) for file in files)
