"""A site's node-config, its state folder with audit log and secret, and its local data.

Data are a folder of the site's own, or its partition of a shared dataset. Opened data are cached for the next message
of the same run, while names, sizes and times of its files are the same.
"""

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import Context

from fedcir import __version__
from fedcir.client.local_update import LocalTrainer
from fedcir.client.masks import make_mask_key
from fedcir.config import HUGGING_FACE, Config, config_from_tables, config_to_tables
from fedcir.data.agreement import Agreement
from fedcir.data.federation import Client, Federation, open_federation, open_site_federation
from fedcir.data.opening import find_dataset, get_source, list_site_classes, list_site_images, selected_classes
from fedcir.data.sources.site_tables import find_site_file
from fedcir.data.sources.source import ImageIndex
from fedcir.errors import InputError, RunError
from fedcir.files import make_private_folder
from fedcir.flower.client_app import state_folder
from fedcir.flower.site_manifest import SiteDescription
from fedcir.flower.wire import TaskHeader
from fedcir.models.builder import NetworkBuilder
from fedcir.models.hugging_face import find_folder, hash_folder
from fedcir.plugins import is_file_plugin

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

AUDIT_LOG, SECRET = "audit.jsonl", "secret"
VERSIONS = f"fedcir {__version__}, torch {torch.__version__.partition('+')[0]}"
CACHED_RUNS = 2


@dataclass(frozen=True)
class NodeConfig:
    """Settings in `--node-config` of the site's SuperNode, which a server cannot change."""

    context: Context

    def get(self, name: str) -> str:
        """Return a value as text, empty if it is not set."""
        return str(self.context.node_config.get(name, ""))

    @property
    def state_folder(self) -> Path:
        return state_folder(self.get("state"))

    @property
    def site(self) -> Any:
        """The site's name, or its partition id; None if it has neither."""
        return self.context.node_config.get("domain", self.context.node_config.get("partition-id"))

    @property
    def partition(self) -> int:
        """The site's partition of a shared dataset; -1 if it has data of its own."""
        values = self.context.node_config
        if "domain" in values:
            return -1
        if "partition-id" not in values:
            raise InputError(
                '--node-config must hold data-root and the site\'s name, as in domain="hospital-a", or the '
                "partition-id of a shared dataset",
                public="its node-config names neither a domain nor a partition-id",
            )
        number = values["partition-id"]
        if isinstance(number, bool) or not isinstance(number, int):
            raise InputError(
                f"partition-id in --node-config must be a whole number, got {number!r}",
                public="its partition-id is not a whole number",
            )
        return number

    @property
    def data_root(self) -> str | None:
        return os.path.expanduser(self.get("data-root")) if "data-root" in self.context.node_config else None


@contextlib.contextmanager
def write_to_state(folder: Path) -> Iterator[None]:
    """Create the state folder for its owner only, and turn any OSError inside into a one-line RunError."""
    try:
        make_private_folder(folder)
        yield
    except OSError as error:
        raise RunError(
            f"cannot write to {error.filename or folder}: {error.strerror}; name another folder, as `state` in the "
            "site's node-config or as FEDCIR_STATE",
            public="it cannot write to its state folder",
        ) from error


@dataclass(frozen=True)
class AuditLog:
    """Append-only log that only its owner can read. A failed write raises, so that nothing happens unrecorded."""

    folder: Path
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every entry."""

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield all entries; a line that a crash cut short is skipped."""
        path = self.folder / AUDIT_LOG
        if path.exists():
            with open(path, encoding="utf-8", errors="replace") as file:
                for line in file:
                    with contextlib.suppress(ValueError):
                        yield dict(json.loads(line))

    def record(self, event: str, **fields: Any) -> None:
        """Append an entry; it is on disk when this returns."""
        entry = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **self.fields, **fields}
        line = json.dumps(entry).encode() + b"\n"
        path = self.folder / AUDIT_LOG
        with (
            write_to_state(self.folder),
            open(path, "ab", 0, opener=lambda name, flags: os.open(name, flags, 0o600)) as file,
        ):
            if file.write(line) != len(line):  # one call, so that lines of several processes do not mix
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(file.fileno())


def keyed_digest(folder: Path, content: str) -> str:
    """Return a digest that only holders of this folder's secret can compute, so that no guess can be confirmed."""
    path = folder / SECRET
    if not path.exists():  # of several processes that create one, the first wins
        temporary = folder / f".{SECRET}.{secrets.token_hex(8)}"
        with write_to_state(folder):
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
            temporary.unlink()
    return hmac.new(path.read_bytes(), content.encode(), hashlib.blake2b).hexdigest()[:32]


def open_mask_key(node: NodeConfig) -> "X25519PrivateKey":
    """Derive the private key of a site from the secret of its state folder."""
    name = f"{node.site}/{node.partition}"
    digests = [keyed_digest(node.state_folder, f"mask key {half} of {name}") for half in (1, 2)]
    return make_mask_key(bytes.fromhex("".join(digests)))


@dataclass(frozen=True)
class LocalSite:
    """A site with its data open."""

    client: Client
    builder: NetworkBuilder
    description: SiteDescription
    trainers: dict[str, LocalTrainer] = field(default_factory=dict)
    """The last trainer, by the settings, device and code that it was built from."""

    @classmethod
    def from_federation(cls, federation: Federation, number: int, content: str, **fields: Any) -> "LocalSite":
        """Describe a client of a federation; `fields` are those that do not follow from it."""
        federation.load_features()  # while the server still waits for sites, so that no round takes longer
        client, card = federation.clients[number], federation.card
        values = {
            **client.sizes._asdict(),
            **{name: card.get(name, 0) for name in ("image_size", "channels")},
            **fields,
        }
        classes = values.pop("classes", tuple(card["classes"]))
        if "shape" in card or "task" in card:
            assert federation.dataset_and_partition is not None
            values["shape"] = tuple(card.get("shape", ()))
            values["summary"] = "" if federation.summary is None else json.dumps(federation.summary.to_card())
        description = SiteDescription(client.domain, classes, content=content, versions=VERSIONS, **values)
        return cls(client, federation.builder, description)


def open_local_site(header: TaskHeader, context: Context) -> LocalSite:
    """Open the data that the node-config names, for the run of a message."""
    node = NodeConfig(context)
    if not isinstance(resident := context.node_config.get("resident", True), bool):
        raise InputError(
            f"resident in --node-config must be true or false, got {resident!r}",
            public="resident in its node-config is neither true nor false",
        )
    for kind, name in (("dataset", header.config.data.name), ("task", header.config.task.name or "")):
        if is_file_plugin(name):
            raise InputError(
                f"the run's {kind} is the file {name!r}: a site runs no {kind} file that a server names",
                public=f"the run's {kind} is a Python file, which a site does not run",
            )
    config, partition, root = _resolve_encoder(header, node), node.partition, node.data_root
    if partition < 0:
        if root is None:
            raise InputError(
                '--node-config names a domain but no data-root: add data-root="DIR", the folder of its <class>/<image>'
                " or of its table",
                public="its node-config names no data-root",
            )
        classes = header.classes or selected_classes(config.data)
        domain, folder = str(node.site), Path(root)
        if config.data.name == "csv":
            stamp = _compute_stamp(config, None, [find_site_file(folder, domain)])
        else:
            own = list_site_images(folder, domain, config.data)
            stamp = _compute_stamp(config, own, () if own.targets is None else [own.targets.path])
        site = _open_own(_get_config_key(config), folder, domain, classes, json.dumps(header.agreed), stamp)
        content = keyed_digest(node.state_folder, site.description.content)
        return replace(site, description=replace(site.description, content=content))
    if root is not None:
        config = replace(config, data=replace(config.data, root=root))
    elif get_source(config.data.name).root != "nothing" and not _is_simulated():
        raise InputError(
            f"the run's dataset is {config.data.name!r} in {config.data.root!r}, but --node-config names no data-root: "
            "add the folder, or the name on the hub, of the dataset that this site may use",
            public="its node-config names no data-root, and a server cannot choose a site's dataset",
        )
    source, folder = find_dataset(config.data)
    index = source.list_images(folder, config.data) if source.has_image_files else None
    paths = () if index is not None or source.root == "nothing" else [folder, *sorted(folder.glob("*.*"))]
    return _open_partition(_get_config_key(config), partition, _compute_stamp(config, index, paths))


@lru_cache(maxsize=CACHED_RUNS)
def _open_own(
    config_key: str, root: Path, domain: str, classes: tuple[str, ...], agreed_card: str, stamp: str
) -> LocalSite:
    config, card = config_from_tables(json.loads(config_key)), json.loads(agreed_card)
    federation = open_site_federation(config, root, domain, classes, agreed=Agreement.from_card(card) if card else None)
    assert federation.dataset_and_partition is not None
    domains, _ = federation.dataset_and_partition
    own_classes = list_site_classes(root, domain, config.data) if domains.task.has_classes else ()
    # A held-out site does not train, so its client has no training images.
    counts = {"train": federation.clients[0].sizes.train or len(domains.domains[0].train)}
    return LocalSite.from_federation(federation, 0, domains.content, classes=own_classes, **counts)


@lru_cache(maxsize=CACHED_RUNS)
def _open_shared(config_key: str, stamp: str) -> Federation:
    return open_federation(config_from_tables(json.loads(config_key)))


@lru_cache(maxsize=CACHED_RUNS)
def _open_partition(config_key: str, number: int, stamp: str) -> LocalSite:
    federation = _open_shared(config_key, stamp)
    if not 0 <= number < len(federation.clients):
        message = f"partition-id is {number}, but must be from 0 to {len(federation.clients) - 1}"
        raise InputError(message, public=message)
    return LocalSite.from_federation(federation, number, federation.manifest["hash"], partition=number, shared=True)


def _is_simulated() -> bool:
    """Tell whether this is a client of Flower's simulation, which runs in Ray on the server's own machine."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _resolve_encoder(header: TaskHeader, node: NodeConfig) -> Config:
    """Use this site's copy of the run's encoder. A foreign encoder is code, so the node-config must allow it."""
    config, name, allowed = header.config, header.config.model.name, node.get("encoder")
    if header.encoder or name == HUGGING_FACE:
        model = replace(config.model, name=allowed or HUGGING_FACE, weights=None, arguments={})
        folder = find_folder(model)
        if folder is None or hash_folder(folder) != header.encoder:
            raise InputError(
                f"the run's encoder is a folder whose files have the hash {header.encoder or 'none'}, and "
                f'{allowed or "no encoder"} in --node-config is not it: name a copy, as in encoder="hf:/srv/vit"',
                public="its node-config names no copy of the folder of the run's encoder",
            )
        return replace(config, model=model)
    if not config.model.foreign:
        return config
    if (Path(allowed).name if config.model.file is not None else allowed) != name:
        raise InputError(
            f'the run\'s encoder is {name}: allow it in --node-config, as encoder="{name}" (a file by its path here)',
            public=f"its node-config does not allow the run's encoder, {name}",
        )
    return replace(config, model=replace(config.model, name=allowed))


def _get_config_key(config: Config) -> str:
    """Encode the settings that determine the data and the networks as JSON."""
    tables = config_to_tables(config)
    return json.dumps({name: tables[name] for name in ("task", "data", "partition", "model", "run", "privacy")})


def _compute_stamp(config: Config, index: ImageIndex | None, paths: Iterable[Path] = ()) -> str:
    """Hash names, labels, sizes and times of a site's files, and of those that settings name besides."""
    named = [config.model.file, None if config.partition.file is None else Path(config.partition.file)]
    lists = [] if index is None else [images for images in (index.pictures, index.masks) if images is not None]
    texts = [text for images in lists for text in (images.fingerprint(), *map(repr, images.items))]
    folder = find_folder(config.model)
    for path in (*paths, *named, *(() if folder is None else sorted(folder.iterdir()))):
        if path is not None and path.exists():
            stat = path.stat()
            texts.append(json.dumps([os.fspath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino]))
    return hashlib.blake2b("\0".join(texts).encode(errors="surrogateescape"), digest_size=16).hexdigest()
