"""What a site has given away under differential privacy: a count on disk that no server can lower.

The site counts every upload to which it added noise, over all runs. A request that it has answered already gets the
stored answer again: equal bytes tell nothing new, but fresh noise on the same update would average out.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from fedcir.config import typed
from fedcir.data.private import private_folder
from fedcir.engine.accounting import Accountant, Adjacency, composed_epsilon
from fedcir.engine.files import pack, read_json, sealed, unpack, write
from fedcir.engine.lock import take_lock
from fedcir.engine.store import NAME as ROUND_FILE
from fedcir.flower.audit_log import AuditLog
from fedcir.flower.policy import PrivacyRules, Refused
from fedcir.flower.state import writing
from fedcir.flower.wire import Order
from fedcir.types import ClientReply, Groups, InputError, RunError

LEDGER = "privacy.json"
REPLIES = "replies"
KEPT_REPLIES = 3
"""Rounds whose answers are kept. With noise, a server saves a checkpoint in every round, so it repeats one at most."""
PATIENCE = 30.0
"""Seconds to wait for another process that counts."""


@dataclass(frozen=True)
class Spending:
    """Noised sums of one kind that a site has uploaded."""

    noise: float
    rate: float
    adjacency: Adjacency
    steps: int = 0
    """How many sums."""
    uploads: int = 0
    """In how many uploads."""

    def accountant(self, delta: float) -> Accountant:
        return Accountant(self.noise, delta, self.rate, self.adjacency)


@dataclass(frozen=True)
class LedgerFile:
    """Content of the file: what each site of this state folder has spent, by the site's name."""

    sites: dict[str, list[Spending]]


@dataclass(frozen=True)
class PrivacyBudget:
    """What a site has spent of its privacy, in a file of its state folder."""

    folder: Path
    site: str
    """The site's name in its node-config. Several sites may share a state folder."""

    def spend(self, accountant: Accountant, steps: int, rules: PrivacyRules | None) -> tuple[int, float | None]:
        """Count an upload before it leaves, if the rules allow it; gives the number of uploads so far, and epsilon."""
        with writing(self.folder), self._locked():
            ledger = self._read()
            spent = _add(ledger.get(self.site, []), accountant, steps)
            epsilon = self._check(spent, rules)
            sites = {name: [asdict(entry) for entry in entries] for name, entries in ledger.items()}
            sites[self.site] = [asdict(entry) for entry in spent]
            write(self.folder / LEDGER, json.dumps(sealed({"sites": sites}), indent=1) + "\n")
            (self.folder / LEDGER).chmod(0o600)
        return sum(entry.uploads for entry in spent), epsilon

    def check(self, accountant: Accountant, steps: int, rules: PrivacyRules | None) -> None:
        """Refuse an upload that the rules do not allow, before it is computed."""
        self._check(_add(self._read().get(self.site, []), accountant, steps), rules)

    def _check(self, spent: Sequence[Spending], rules: PrivacyRules | None) -> float | None:
        """Epsilon of what is spent, if it is within the rules; None if there is no limit."""
        if rules is None or rules.max_epsilon is None:
            return None
        self._check_complete(sum(entry.uploads for entry in spent) - 1)
        try:
            epsilon = composed_epsilon([(entry.accountant(rules.delta), entry.steps) for entry in spent], rules.delta)
        except InputError as error:  # no Opacus
            raise Refused(str(error), public="it cannot count its privacy budget") from error
        if epsilon > rules.max_epsilon:
            raise Refused(
                f"this site's privacy budget is used up: another upload would bring epsilon to {epsilon:.4g}, above "
                f"max_epsilon = {rules.max_epsilon:g} of its policy, at delta = {rules.delta:g}",
                public="its privacy budget is used up",
            )
        return epsilon

    def _check_complete(self, uploads: int) -> None:
        """The audit log names the number of each upload: a ledger with fewer was deleted or replaced."""
        numbers = [
            line.get("upload", 0) for line in AuditLog(self.folder).lines() if str(line.get("site")) == self.site
        ]
        if (noted := max(numbers, default=0)) > uploads:
            raise Refused(
                f"{self.folder / LEDGER} counts {uploads} uploads of {self.site!r}, but the audit log beside it "
                f"names {noted}: restore the file from a backup",
                public="its count of privacy spent is incomplete",
            )

    def _read(self) -> dict[str, list[Spending]]:
        path = self.folder / LEDGER
        if not path.exists():
            return {}
        try:
            ledger: LedgerFile = typed(read_json(path, dict, "restore it from a backup"), LedgerFile, LEDGER)
        except InputError as error:
            raise Refused(str(error), public="its count of privacy spent cannot be read") from error
        return ledger.sites

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = take_lock(self.folder / f".{LEDGER}.lock", PATIENCE)
        if lock is None:
            raise RunError(f"another process keeps {self.folder / LEDGER} locked", public="it is busy")
        with lock:
            yield


def _add(spent: Sequence[Spending], accountant: Accountant, steps: int) -> list[Spending]:
    """What is spent after one more upload."""
    kind = Spending(accountant.noise, accountant.rate, accountant.adjacency)
    before = next((entry for entry in spent if replace(entry, steps=0, uploads=0) == kind), kind)
    others = [entry for entry in spent if entry is not before]
    return [*others, replace(kind, steps=before.steps + steps, uploads=before.uploads + 1)]


def request_digest(groups: Groups, order: Order) -> bytes:
    """Digest of all that an answer depends on. The numbers of nodes may change when a site connects again."""
    digest = hashlib.blake2b(replace(order, clients={}, tests=()).to_json().encode(), digest_size=32)
    for group, bag in sorted(groups.items()):
        for name, tensor in sorted(bag.items()):
            digest.update(f"{group}/{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.digest()


@dataclass(frozen=True)
class ReplyStore:
    """Answers of the last rounds of a run, by client and round, each with the digest of its request."""

    folder: Path

    def load(self, client: int, round: int, digest: bytes) -> ClientReply | None:
        """The answer to a request that came before; None for another request."""
        path = self._path(client, round)
        try:
            kinds, _ = unpack(path, "reply", "about")
        except InputError:  # there is none, or it is damaged
            return None
        about = kinds["about"]
        if bytes(about["request"]["digest"].tolist()) != digest:
            return None
        metrics = {name: float(value) for name, value in about["metrics"].items()}
        return ClientReply(client, int(about["request"]["examples"]), kinds["reply"], metrics)

    def save(self, round: int, digest: bytes, reply: ClientReply) -> None:
        request = {"digest": torch.tensor(list(digest)), "examples": torch.tensor(reply.num_examples)}
        metrics = {name: torch.tensor(value, dtype=torch.double) for name, value in reply.metrics.items()}
        path = self._path(reply.client_id, round)
        with writing(self.folder.parent):
            for folder in (self.folder, path.parent):
                private_folder(folder)
            write(path, pack({"reply": reply.arrays, "about": {"metrics": metrics, "request": request}}, round))
            for other in path.parent.glob("round-*"):
                number = ROUND_FILE.fullmatch(other.name)
                if number and not round - KEPT_REPLIES < int(number[1]) <= round:
                    other.unlink()

    def _path(self, client: int, round: int) -> Path:
        return self.folder / str(client) / f"round-{round:06d}.safetensors"
