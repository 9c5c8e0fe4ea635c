"""Withdraw a site from a finished run: the model of a run that the site never joined, with a signed record.

The result is the run with the site in `partition.exclude`. Rounds up to a checkpoint are taken over from the finished
run where they cannot differ; all others are run again on the data of the remaining sites.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch

from fedcir.algorithms import make_algorithm
from fedcir.algorithms.fedcirone import select_sums
from fedcir.analysis.leakage import SAMPLES, Membership, attack_membership
from fedcir.client.state import ClientStore, has_local_tensors
from fedcir.config import Config
from fedcir.courier.merge import CourierRoster, CourierTransport
from fedcir.data.decoding import OnFile
from fedcir.data.domains import Domains
from fedcir.data.federation import build_federation
from fedcir.data.manifest import count_names
from fedcir.data.partition import Partition
from fedcir.errors import InputError, suggest_name
from fedcir.files import check_output_file, explain_read_errors, read_bytes, write_file
from fedcir.machine import use_threads
from fedcir.models.closed_form import class_counts
from fedcir.runs.evaluation_data import open_run_data
from fedcir.runs.reader import Run, RunSource, load_run, to_run
from fedcir.runtime.resume import attach_run_folder, use_saved_code
from fedcir.runtime.rounds import run_rounds
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.session import Session, open_session
from fedcir.runtime.simulation import open_run
from fedcir.runtime.stored_sums import StoredSums
from fedcir.server.accounting import sample_cohort
from fedcir.signing import Signature, open_key, sign, verify
from fedcir.types import ClientReply, OnProgress, ignore_progress
from fedcir.validation import check_type

FORMAT = 1
PURPOSE = "withdrawal"
RECORD_FILE, KEY_FILE = "forget.json", "forget.key"
MAX_RECORD_BYTES = 10_000_000


class SavedRecord(TypedDict):
    """Content of forget.json."""

    record: dict[str, object]
    public_key: str
    signature: str


@dataclass(frozen=True)
class Withdrawal:
    """The run without a site, and the record of what was removed."""

    path: Path
    """Folder of the new run."""
    record: dict[str, Any]
    before: Membership | None
    """Membership inference on the site's images with the old model; None if it was not measured."""
    after: Membership | None
    """The same with the new model."""
    key: str
    """Fingerprint of the key that signed the record."""

    @property
    def file(self) -> Path:
        return self.path / RECORD_FILE


def forget(
    run: RunSource,
    site: str,
    *,
    out: str | Path,
    key: str | Path | None = None,
    data_root: str | Path | None = None,
    trust_code: bool = False,
    on_file: OnFile | None = None,
    on_work: OnProgress = ignore_progress,
) -> Withdrawal:
    """Make the run that a site never joined from a finished run, in the folder `out`, equal to the byte.

    `site` is a domain of the run, or the name or number of a client. Where the images are at other sites or gone, the
    model is made from the sums that a run with `server.store_sums` holds. `out` also gets forget.json: what was
    removed, hashes of both models, and how well membership of the site's images can be inferred from either, signed
    with the Ed25519 key of the file `key`, by default forget.key in the folder of the finished run; it is made if it is
    missing.
    """
    folder = Path(out)
    if folder.exists():
        was_killed = RunFolder(folder).exists and not (folder / RECORD_FILE).exists()
        left = ", or delete this one, if a withdrawal that did not end left it there" if was_killed else ""
        raise InputError(f"{folder} already exists: choose another folder{left}")
    old = to_run(run, trust_code)
    old = replace(old, config=use_saved_code(old.config, old.path, old.trust_code))
    key_file = old.path / KEY_FILE if key is None else Path(key)
    if os.path.lexists(key_file):
        open_key(key_file)
    else:
        check_output_file(key_file)
    has_images = data_root is not None or not ("key" in old.manifest or _is_missing(old.config.data.root))
    try:
        if "key" in old.manifest or (not has_images and StoredSums(old.path).list_clients()):
            removed = _add_up_others(old, site, folder)
        else:
            removed = _repeat_rounds(old, site, folder, data_root, on_file, on_work)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    new = load_run(folder)
    before, after = removed.membership
    content: dict[str, Any] = {
        "format": FORMAT,
        "site": site,
        "clients": [client["id"] for client in removed.clients],
        "images": removed.images,
        "images_sha256": removed.digest,
        "rounds": {"total": len(new.records), "repeated_from": removed.start + 1},
        "before": _describe_model(old, before),
        "after": _describe_model(new, after),
    }
    signature = sign(open_key(key_file), PURPOSE, _encode(content))
    signed = {"record": content, **asdict(signature)}
    write_file(folder / RECORD_FILE, json.dumps(signed, indent=1, ensure_ascii=False) + "\n")
    return Withdrawal(folder, content, before, after, signature.fingerprint)


@dataclass(frozen=True)
class _Removed:
    """What was taken out of a run, and how."""

    clients: Sequence[dict[str, Any]]
    """Entries of the manifest."""
    start: int = 0
    """Last round that was taken over."""
    membership: tuple[Membership | None, Membership | None] = (None, None)
    """Membership inference before and after; None if it was not measured."""

    @property
    def images(self) -> int:
        return sum(count_names(client["train"]) for client in self.clients)

    @property
    def digest(self) -> str:
        """Hash of the names of the site's training images, or of its content where sites do not send names."""
        trained = [client["train"] for client in self.clients]
        contents = [client["content"] for client in self.clients if isinstance(client["train"], int)]
        names = [*contents, *(name for samples in trained if not isinstance(samples, int) for name in samples)]
        return hashlib.sha256(json.dumps(sorted(names)).encode()).hexdigest()


def _is_missing(root: str | None) -> bool:
    return root is not None and not Path(root).is_dir()


def _repeat_rounds(
    old: Run,
    site: str,
    folder: Path,
    data_root: str | Path | None,
    on_file: OnFile | None,
    on_work: OnProgress,
) -> _Removed:
    """Run all rounds that a site's absence changes on the data of the other sites."""
    config, domains, partition = open_run_data(old, None if data_root is None else str(data_root))
    clients, rest = partition.find_site(site), partition.exclude([site])
    reduced = _exclude_site(config, site, int((rest.sizes > 0).sum()))
    with open_run(reduced, folder, on_file=on_file) as (session, rounds):
        start = _take_over_rounds(old, config, partition, session)
        for record in rounds:
            on_work(record.round, session.config.server.rounds, what="repeating rounds")
    new = replace(load_run(folder), trust_code=True, config=reduced)  # its code is that of `old`
    membership = _attack_site(old, new, config, domains, partition, clients)
    return _Removed([old.manifest["clients"][client] for client in clients], start, membership)


def _add_up_others(old: Run, site: str, folder: Path) -> _Removed:
    """Make the model of fedcirone from the stored sums of the other sites, without any images."""
    stored = StoredSums(old.path)
    if not (present := stored.list_clients()):
        fix = f"run or merge again without {site!r}; runs with server.store_sums=true can forget a site"
        raise InputError(f"{old.path} ran across sites, which keep their images, and holds no sums of them: {fix}")
    clients = list(old.manifest["clients"])
    by_kind = {kind: [c for c in clients if str(c.get(kind)) == site] for kind in ("name", "domain", "id")}
    kind = next((kind for kind, matches in by_kind.items() if matches), "id")
    if kind == "domain" and old.config.partition.scheme in ("iid", "csv"):
        raise InputError(f"images of domain {site!r} may lie at clients with others: name clients by their number")
    removed = by_kind[kind]
    rest = [client for client in clients if client not in removed and client["id"] in present]
    if not removed:
        domains = sorted({client["domain"] for client in clients})
        raise InputError(f"there is no site {site!r}; {suggest_name(site, domains)}, or give a client's number")
    if not rest:
        raise InputError("no other site has training images: leave one in")
    is_across = "key" in old.manifest
    is_renumbered = is_across and all("partition" not in client for client in rest)  # as a run without it numbers them
    counted = [
        {
            "content": "",
            **client,
            "id": number if is_renumbered else client["id"],
            "train": count_names(client["train"]),
            **{part: client[part] if is_across else 0 for part in ("test", "validation")},
        }
        for number, client in enumerate(rest)
    ]
    config = old.config if is_across else _exclude_site(old.config, site, len(rest))
    active = min(config.server.active or len(rest), len(rest))
    server = replace(config.server, active=active, min_replies=min(config.server.min_replies, active))
    card = {name: old.card[name] for name in old.card if name not in ("format", "model", "algorithm", "saved")}
    about = {"dataset": config.data.name, **{name: card.get(name) for name in ("classes", "image_size", "channels")}}
    manifest = {**about, "clients": counted}
    digest = hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()
    if not {"shape", "channels"} & {*card}:
        raise InputError(f"{old.path} is a run of fedcir.train on your own Datasets: pass the others' to it again")
    roster = CourierRoster({**manifest, "hash": digest, "key": digest}, old.make_builder(config.model), card)
    replies = [
        ClientReply(entry["id"], entry["train"], stored.load(client["id"]), {})
        for entry, client in zip(counted, rest, strict=True)
    ]
    if is_across:
        _check_classes(replies, card["classes"], site)
    with RunFolder(folder).lock(), use_threads(config.run.threads):
        session = open_session(replace(config, server=server), make_algorithm(config.algorithm), roster)
        session.deployed = is_across
        attach_run_folder(session, folder, resume=False)
        for _ in run_rounds(session, CourierTransport(replies)):
            pass
    return _Removed(removed)


def _check_classes(replies: Sequence[ClientReply], classes: Sequence[str], site: str) -> None:
    """Refuse a class that no other site has an image of: a run without the site would not have it."""
    counts = sum(class_counts(select_sums(reply.tensors["sums"], "train"), len(classes)) for reply in replies)
    for name, count in zip(classes, torch.as_tensor(counts).tolist(), strict=True):
        if not count:
            raise InputError(f"only {site!r} has images of {name!r}: start a run of the other sites without this class")


def read_record(file: str | Path) -> tuple[dict[str, Any], str]:
    """Read a forget.json; return its record and the fingerprint of the key that signed it.

    A record that was changed is refused, and one whose model lies beside it and is another.
    """
    path = Path(file)
    with explain_read_errors(path, "ask for the original"):
        saved: SavedRecord = check_type(json.loads(read_bytes(path, MAX_RECORD_BYTES)), SavedRecord, path.name)
        record: dict[str, Any] = saved["record"]
        signature = Signature(saved["public_key"], saved["signature"])
        verify(signature, PURPOSE, _encode(record))
        model = path.with_name("model.safetensors")
        if model.exists() and _hash_model(model) != record["after"]["model_sha256"]:
            raise InputError(f"{model} is not the model of this record")
    return record, signature.fingerprint


def _encode(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


def _hash_model(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _describe_model(run: Run, membership: Membership | None) -> dict[str, Any]:
    return {
        "manifest": run.manifest["hash"],
        "model_sha256": _hash_model(run.path / "model.safetensors"),
        "membership": None if membership is None else asdict(membership),
    }


def _exclude_site(config: Config, site: str, holders: int) -> Config:
    """Exclude a site; where all clients were active or had to reply, all of the remaining ones are and have to."""
    partition, server = config.partition, config.server
    active = min(server.active or holders, holders)
    server = replace(server, active=active, min_replies=min(server.min_replies, active))
    return replace(config, partition=replace(partition, exclude=(*partition.exclude, site)), server=server)


def _take_over_rounds(old: Run, config: Config, partition: Partition, session: Session) -> int:
    """Continue a new session from the newest checkpoint before the site took part; return its round, perhaps 0."""
    folder = session.folder
    assert folder is not None
    store = ClientStore(old.path / "clients")
    equal = _count_equal_rounds(config, len(old.records), partition, session)
    for state, client_rounds in RunFolder(old.path).checkpoints():
        if state.round > equal or store.fault(state.round, client_rounds) is not None:
            continue
        for client, round in client_rounds.items():
            session.store.save(client, round, store.load(client, round + 1))
        session.state, session.records = state, list(old.records[: state.round])
        for record in session.records:
            folder.append(record)
        folder.save_checkpoint(state, (), client_rounds, session.records[-1])
        return state.round
    return 0


def _count_equal_rounds(config: Config, rounds: int, partition: Partition, session: Session) -> int:
    """Count the first of a run's rounds that are equal with and without the site, leaving out the last one.

    These are rounds with the same cohorts, where nothing else depends on who else is a client.
    """
    algorithm, seed, server = session.algorithm, config.run.seed, session.config.server
    evaluators = {client: domain for domain, client in partition.first_clients.items()}
    depends_on_all = (
        algorithm.pools is not None
        or algorithm.counts_clients
        or not type(algorithm).__module__.startswith("fedcir.algorithms.")  # others may count clients too
        or config.privacy.clip is not None
        or config.attack.kind != "none"
        or server.keep == "best"
        or evaluators != session.roster.evaluators
    )
    if depends_on_all:
        return 0
    trainers, active = np.flatnonzero(partition.sizes).tolist(), config.server.active or 0
    for round in range(1, rounds):
        if sample_cohort(trainers, active, seed, round, partition.absent) != session.cohort(round):
            return round - 1
    return rounds - 1


def _attack_site(
    old: Run, new: Run, config: Config, domains: Domains, partition: Partition, clients: Sequence[int]
) -> tuple[Membership | None, Membership | None]:
    """Infer membership of a site's examples with both models.

    None where the new run has no model for the site, and for tasks without classes.
    """
    algorithm = make_algorithm(config.algorithm)
    if has_local_tensors(config, algorithm) or not new.task.has_classes:
        return None, None
    federation = build_federation(config, domains, partition)
    tested = tuple(client if client.id in clients else replace(client, test=None) for client in federation.clients)
    federation = replace(federation, clients=tested)
    shares = [partition[client] for client in clients]
    before, after = (attack_membership(run, config, domains, shares, federation, SAMPLES) for run in (old, new))
    return next(iter(before), None), next(iter(after), None)
