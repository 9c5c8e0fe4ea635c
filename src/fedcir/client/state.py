"""Client state: what stays on a client between rounds, and the store that holds it."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch import nn

from fedcir.algorithms.algorithm import PERSONAL, Algorithm
from fedcir.client.uploads import UploadFormat
from fedcir.config import Config
from fedcir.errors import InputError
from fedcir.files import make_private_folder, write_file
from fedcir.models.adapters import frozen_names
from fedcir.models.tensors import HEAD, batchnorm_names, is_statistic
from fedcir.tensor_files import pack_groups, unpack_groups
from fedcir.types import Groups


def upload_format(config: Config, algorithm: Algorithm) -> UploadFormat:
    """Format of uploads; a method that pools all data uploads nothing."""
    return "float32" if algorithm.pools else config.server.upload


def find_local_cause(config: Config, algorithm: Algorithm) -> str | None:
    """Name the method or setting that keeps tensors of the model on the clients; None if all are shared."""
    if algorithm.pools or not algorithm.one_model:
        return None
    if algorithm.keeps_batchnorm or algorithm.keeps_head:
        return config.algorithm.name
    return "model.batchnorm=local" if config.model.batchnorm == "local" else None


def has_client_state(config: Config, algorithm: Algorithm) -> bool:
    """Check whether clients keep state between rounds."""
    rounds_off = upload_format(config, algorithm) != "float32"
    return bool(algorithm.keeps or algorithm.remembers or find_local_cause(config, algorithm) or rounds_off)


def has_local_tensors(config: Config, algorithm: Algorithm) -> bool:
    """Check whether clients predict with tensors of their own: some of the model's, or all."""
    return not algorithm.one_model or PERSONAL in algorithm.remembers or find_local_cause(config, algorithm) is not None


def local_tensor_names(config: Config, algorithm: Algorithm, model: nn.Module) -> frozenset[str]:
    """Names of the model's tensors that stay on each client: BatchNorm layers, their statistics, the head, or none."""
    if find_local_cause(config, algorithm) is None:
        return frozenset()
    names = HEAD if algorithm.keeps_head else frozenset()
    if algorithm.keeps_batchnorm:
        names |= batchnorm_names(model)
    elif config.model.batchnorm == "local":
        names = names.union(filter(is_statistic, model.state_dict()))
    return names - frozen_names(model)


def check_local_data(config: Config, algorithm: Algorithm, domain: str, trains: bool) -> None:
    """Refuse a client without training data if tensors of the model stay on the clients."""
    cause = find_local_cause(config, algorithm) if algorithm.one_model else config.algorithm.name
    if cause and not trains:
        raise InputError(
            f"{cause} needs training data at every client, but {domain!r} has none: "
            "it cannot be used with partition.hold_out"
        )


GENERATIONS = 2
"""Checkpoints that a run keeps, so that a damaged one costs only a few rounds."""

STATE_FILE = re.compile(r"round-(\d{6,9})\.safetensors")
"""File name of the state after a round."""


class ClientStore:
    """Client states by client and round, one file each under `path`, or in memory without one. Never uploaded."""

    def __init__(
        self, path: Path | None = None, generations: int = GENERATIONS, saved: Callable[[], Iterable[int]] = tuple
    ) -> None:
        self.path = path
        self.generations = generations
        """How many rounds a resume may go back."""
        self.saved = saved
        """Returns earlier rounds that have a checkpoint, to which a resume may go back too."""
        self._memory: dict[int, dict[int, Groups]] = {}

    def load(self, client: int, round: int) -> Groups:
        """Return the client's state before this round; empty if it has not trained."""
        earlier = [number for number in self._rounds(client) if number < round]
        if not earlier:
            return {}
        if self.path is None:
            return self._memory[client][earlier[-1]]
        path = self._file(client, earlier[-1])
        kinds, about = unpack_groups(path, "kept")
        if about.round != earlier[-1] or about.kept not in (None, {str(client): about.round}):
            owner = next(iter(about.kept or {}), client)
            raise InputError(f"{path} holds what client {owner} saved after round {about.round}")
        return kinds["kept"]

    def save(self, client: int, round: int, groups: Groups) -> None:
        if not groups:
            return
        if self.path is None:
            self._memory.setdefault(client, {})[round] = groups
        else:
            for folder in (self.path, self.path / str(client)):
                make_private_folder(folder)
            write_file(self._file(client, round), pack_groups({"kept": groups}, round, {client: round}))
        rounds = self._rounds(client)
        needed = {number for number in rounds if round - self.generations < number <= round}  # later ones are given up
        for start in (round - self.generations, *self.saved()):
            needed.add(max((number for number in rounds if number <= start), default=0))
        for number in set(rounds) - needed:
            self._forget(client, number)

    def rounds(self, until: int) -> dict[int, int]:
        """Return the last round up to this one for which each client has a state."""
        saved = {client: [number for number in self._rounds(client) if number <= until] for client in self._clients()}
        return {client: rounds[-1] for client, rounds in saved.items() if rounds}

    def fault(self, round: int, expected: Mapping[int, int]) -> str | None:
        """Return why the states up to a round cannot be used; None if all are there and valid."""
        present = self.rounds(round)
        for client, number in expected.items():
            if present.get(client) != number:
                return f"{self._file(client, number)} is missing"
        try:
            for client in present:
                self.load(client, round + 1)
        except InputError as error:
            return str(error)
        return None

    def rewind(self, round: int) -> None:
        """Delete the states of later rounds, which will be repeated."""
        for client in self._clients():
            for number in self._rounds(client):
                if number > round:
                    self._forget(client, number)

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
        return sorted(int(match[1]) for name in names if (match := STATE_FILE.fullmatch(name)))

    def _clients(self) -> list[int]:
        if self.path is None:
            return sorted(self._memory)
        return sorted(int(folder.name) for folder in self.path.glob("*") if folder.name.isdecimal())
