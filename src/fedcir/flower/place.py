"""A site as it sees itself: its own folder, or its share of a dataset that all have.

What was opened is kept for the next message of the same run, as long as its files look the same from outside.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import Context

from fedcir import __version__
from fedcir.config import Config, DataConfig, config_from, config_tables
from fedcir.data.catalogue import BUNDLED, find, named_classes
from fedcir.data.federation import Client, Federation, federation_from, open_federation
from fedcir.data.opening import open_site, site_pictures
from fedcir.data.partition.schemes import capped
from fedcir.data.partition.shares import Share
from fedcir.data.pictures.items import Pictures
from fedcir.engine.client import Workbench
from fedcir.flower.introduction import Introduction
from fedcir.flower.state import keyed, state_folder
from fedcir.flower.wire import Order
from fedcir.models.task import Task
from fedcir.types import InputError

VERSIONS = f"fedcir {__version__}, torch {torch.__version__.partition('+')[0]}"
NAMELESS = "its node-config names neither a domain nor a partition-id"
RUNS = 2
"""Of which a process keeps what it has opened."""


@dataclass(frozen=True)
class Place:
    """A site as it sees itself."""

    client: Client
    task: Task
    introduction: Introduction
    benches: dict[str, Workbench] = field(default_factory=dict)
    """The networks it last worked with, by what they were made from."""


def open_place(order: Order, context: Context) -> Place:
    """The site's own folder, or its share of a dataset that all have."""
    _check_resident(context)
    config, node = _with_encoder(order.config, context), context.node_config
    root = node.get("data-root")
    if "domain" in node:
        if root is None:
            raise InputError(
                '--node-config names a domain but no data-root: add data-root="DIR", the folder of its <class>/<image>',
                public="its node-config names no data-root",
            )
        classes = order.classes or named_classes(config.data)
        own, domain = Path(str(root)).expanduser(), str(node["domain"])
        look = _look([_of_pictures(site_pictures(own, domain, config.data).pictures), _of_files(config)])
        here = _own(_text(config), own, domain, classes, look)
        digest = keyed(state_of(context), here.introduction.content)
        return replace(here, introduction=replace(here.introduction, content=digest))
    if "partition-id" not in node:
        raise InputError(
            "--node-config must hold data-root and domain, or the partition-id of a shared dataset", public=NAMELESS
        )
    if root is not None:
        config = replace(config, data=replace(config.data, root=str(Path(str(root)).expanduser())))
    elif config.data.name not in BUNDLED and not _is_simulated():
        raise InputError(
            f"the run's dataset is {config.data.name!r} in {config.data.root!r}, but --node-config names no data-root: "
            "add the folder, or the name on the hub, of the dataset that this site may use",
            public="its node-config names no data-root, and a server cannot choose a site's dataset",
        )
    return _share(_text(config), partition_of(context), _look([_of_dataset(config.data), _of_files(config)]))


def _is_simulated() -> bool:
    """Whether this is a client of Flower's simulation, which runs in Ray on the server's own machine."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def state_of(context: Context) -> Path:
    return state_folder(str(context.node_config.get("state", "")))


@lru_cache(maxsize=RUNS)
def _own(text: str, root: Path, domain: str, classes: tuple[str, ...], look: str) -> Place:
    config = config_from(json.loads(text))
    here = tuple(sorted({item.label for item in site_pictures(root, domain, config.data).pictures.items}))
    domains = open_site(root, domain, config.data, config.run.seed, classes)
    whole = domains.domains[0]
    rows = {} if domain == config.partition.hold_out else {domain: torch.arange(len(whole.train)).numpy()}
    share = capped(Share(domain, rows), {domain: whole.train.labels}, config.partition.max_samples, config.run.seed)
    federation = federation_from(config, domains, [share])
    federation.load_features()  # while the server still waits for sites, so that no round takes longer
    size, channels = federation.card["image_size"], federation.card["channels"]
    client, trains = federation.clients[0], len(share.rows.get(domain, whole.train))
    about = Introduction(
        *(domain, here, trains, len(whole.test), domains.content, size, channels),
        validation=client.sizes.validation,
        versions=VERSIONS,
    )
    return Place(client, federation.task, about)


@lru_cache(maxsize=RUNS)
def _shared(text: str, look: str) -> Federation:
    federation = open_federation(config_from(json.loads(text)))
    federation.load_features()  # while the server still waits for sites, so that no round takes longer
    return federation


@lru_cache(maxsize=RUNS)
def _share(text: str, number: int, look: str) -> Place:
    federation = _shared(text, look)
    if not 0 <= number < len(federation.clients):
        wrong = f"partition-id is {number}, but must be from 0 to {len(federation.clients) - 1}"
        raise InputError(wrong, public=wrong)
    client, card = federation.clients[number], federation.card
    about = Introduction(
        client.domain,
        tuple(card["classes"]),
        len(client.train or ()),
        len(client.test or ()),
        federation.manifest["hash"],
        card["image_size"],
        card["channels"],
        client.sizes.validation,
        number,
        shared=True,
        versions=VERSIONS,
    )
    return Place(client, federation.task, about)


def _look(looks: Iterable[str]) -> str:
    return hashlib.blake2b("\0".join(looks).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _of_pictures(pictures: Pictures) -> str:
    """How images look from outside: their names, labels, sizes and times."""
    return _look([pictures.fingerprint(), *map(repr, pictures.items)])


def _of_dataset(data: DataConfig) -> str:
    source, root = find(data)
    if source.pictures is not None:
        return _of_pictures(source.pictures(root, data).pictures)
    return _stamps(sorted(root.glob("*.npz"))) if source.root == "folder" else ""


def _of_files(config: Config) -> str:
    """How the files look that settings name beside the data."""
    named = [config.model.file, None if config.partition.file is None else Path(config.partition.file)]
    return _stamps(path for path in named if path is not None)


def _stamps(paths: Iterable[Path]) -> str:
    found = {os.fspath(path): os.stat(path) for path in paths if path.exists()}
    return json.dumps({path: [each.st_size, each.st_mtime_ns, each.st_ino] for path, each in found.items()})


def _text(config: Config) -> str:
    """What decides on the data and the networks, as a key."""
    tables = config_tables(config)
    return json.dumps({name: tables[name] for name in ("data", "partition", "model", "run")})


def name_of(context: Context) -> tuple[str, int]:
    node = context.node_config
    if "domain" in node:
        return str(node["domain"]), -1
    if "partition-id" in node:
        return f"client-{node['partition-id']}", partition_of(context)
    raise InputError(
        '--node-config must name the site, as in domain="hospital-a", or hold its partition-id', public=NAMELESS
    )


def partition_of(context: Context) -> int:
    number = context.node_config["partition-id"]
    if isinstance(number, bool) or not isinstance(number, int):
        raise InputError(
            f"partition-id in --node-config must be a whole number, got {number!r}",
            public="its partition-id is not a whole number",
        )
    return number


def _check_resident(context: Context) -> None:
    if not isinstance(given := context.node_config.get("resident", True), bool):
        raise InputError(
            f"resident in --node-config must be true or false, got {given!r}",
            public="resident in its node-config is neither true nor false",
        )


def _with_encoder(config: Config, context: Context) -> Config:
    """The run's settings with this site's encoder. Another's is called only if the site says so: it is code."""
    name = config.model.name
    if not config.model.foreign:
        return config
    own = str(context.node_config.get("encoder", ""))
    if (Path(own).name if config.model.file is not None else own) != name:
        raise InputError(
            f'the run\'s encoder is {name}: allow it in --node-config, as encoder="{name}" (a file by its path here)',
            public=f"its node-config does not allow the run's encoder, {name}",
        )
    return replace(config, model=replace(config.model, name=own))
