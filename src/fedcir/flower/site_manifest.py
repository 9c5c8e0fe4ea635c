"""Descriptions of the sites, and the manifest of a run built from them."""

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from fedcir.client.masks import MASK_KEY
from fedcir.config import Config
from fedcir.data.agreement import DataSummary, agree, check_scaling
from fedcir.data.domains import CLASSIFICATION
from fedcir.data.opening import selected_classes
from fedcir.errors import InputError
from fedcir.flower.wire import CONFIG, HEADER
from fedcir.text import join_names
from fedcir.validation import build_dataclass

MAX_NAME = 200
MAX_DESCRIPTION = 10_000_000
MAX_IMAGES = 1_000_000_000
NODE_KEY = "node_key"
"""Field of a client in the manifest: the fingerprint of the key that its name is bound to."""
ALL_SITES = "all"
OWN_DATA = ("folders", "masks", "csv")
"""Datasets that sites have each for itself."""


@dataclass(frozen=True)
class SiteDescription:
    """Description of a site for the server: no image, no file name, and no counts by class."""

    domain: str
    classes: tuple[str, ...]
    """Classes of its images."""
    train: int
    test: int
    content: str
    """Hash of its data, so that a resumed run refuses other data."""
    image_size: int = 0
    channels: int = 0
    validation: int = 0
    """Number of validation images."""
    partition: int = -1
    """Number of its partition of a shared dataset."""
    shared: bool = False
    """Whether the classes are those of a shared dataset, and not its own."""
    versions: str = ""
    mask_key: str = ""
    """Public key with which other clients mask their sums, where the run asks for masks."""
    shape: tuple[int, ...] = ()
    """Shape of an input that is no image."""
    summary: str = ""
    """Card of a DataSummary, from which all sites agree on the task and on the encoding of tables."""

    @property
    def name(self) -> str:
        """Name of its client, the same over reconnections."""
        return str(self.partition) if self.partition >= 0 else self.domain

    def to_content(self) -> RecordDict:
        return RecordDict({CONFIG: ConfigRecord({HEADER: json.dumps(asdict(self))})})

    @classmethod
    def from_message(cls, message: Message) -> "SiteDescription":
        """Read a node's reply, or raise ValueError."""
        text = str(message.content.config_records[CONFIG][HEADER])
        if len(text) > MAX_DESCRIPTION:
            raise ValueError("too long")
        site = build_dataclass(cls, json.loads(text), "site")
        if any(len(name) > MAX_NAME or not name.isprintable() for name in (site.domain, site.versions, *site.classes)):
            raise ValueError("a name that cannot be printed")
        if not all(0 <= images <= MAX_IMAGES for images in (site.train, site.test, site.validation)):
            raise ValueError("an impossible number of images")
        if site.mask_key and len(bytes.fromhex(site.mask_key)) != 32:
            raise ValueError("no public key")
        _ = site.data_summary
        return site

    @property
    def data_summary(self) -> DataSummary:
        """The summary of its data; classes of images without one."""
        return DataSummary.from_card(json.loads(self.summary)) if self.summary else DataSummary(CLASSIFICATION)


def build_site_manifest(sites: Iterable[SiteDescription], config: Config) -> tuple[dict[str, Any], list[str]]:
    """Build the manifest of all sites, and notes for the user."""
    sites = sort_sites(sites, config.partition.hold_out)
    _check_sites(sites, config)
    first = sites[0]
    described = [first] if first.shared else sites  # all describe a shared dataset alike
    agreed = agree({site.domain: site.data_summary for site in described}, config.data.scale)
    if any(site.data_summary.columns or site.data_summary.targets for site in described):
        check_scaling(config)
    classes, notes = _agree_on_classes(sites, config) if agreed.task.has_classes else ([], [])
    agreed = agreed.with_classes(classes)
    shape = first.shape if agreed.encoding is None else (len(agreed.encoding.features),)
    for site in sites:
        if agreed.encoding is None and site.shape != shape:
            shapes = f"{list(site.shape)}, those of {first.domain!r} {list(shape)}"
            raise InputError(f"the inputs of site {site.domain!r} are of the shape {shapes}: make them equal")
        if site.versions != first.versions:
            notes.append(f"site {site.domain!r} runs {site.versions}, but site {first.domain!r} runs {first.versions}")
    manifest = {
        "dataset": config.data.name,
        "classes": classes,
        "image_size": first.image_size,
        "channels": first.channels,
        **({"shape": list(shape)} if shape else {}),
        **(agreed.to_card() if first.summary else {}),
        "clients": list_clients(sites, config.partition.hold_out),
    }
    digest = hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()
    return {**manifest, "hash": digest, "key": secrets.token_hex(8)}, notes


def _agree_on_classes(sites: Sequence[SiteDescription], config: Config) -> tuple[list[str], list[str]]:
    """Return the classes of a run, and notes on sites that have others."""
    configured = selected_classes(config.data)
    if (site := next((site for site in sites if site.partition < 0 and len(site.classes) < 2), None)) is not None:
        only = "".join(f", only {name!r}" for name in site.classes)
        raise InputError(f"site {site.domain!r} has too few classes{only}: add images of at least two")
    classes = sorted(set(configured) if configured else {name for site in sites for name in site.classes})
    holders = Counter(name for site in sites for name in {*site.classes})
    if (missing := next((name for name in classes if not holders[name]), None)) is not None:
        raise InputError(f"data.classes: no site has an image of {missing!r}")
    if len(classes) < 2:
        raise InputError(f"the sites have only one class, {classes[0]!r}: a classifier needs two")
    return classes, [] if sites[0].shared else _compare_classes(sites, classes, bool(configured), holders)


def sort_sites(sites: Iterable[SiteDescription], hold_out: str | None = None) -> list[SiteDescription]:
    """Sort sites by client number: by partition, or by name with a held-out site last."""
    return sorted(sites, key=lambda site: (site.partition, site.domain == hold_out, site.domain))


def list_clients(sites: Sequence[SiteDescription], hold_out: str | None = None) -> list[dict[str, Any]]:
    """Return the clients of the manifest."""
    counts = Counter(site.name for site in sites)
    if (twin := next((site for site in sites if counts[site.name] > 1), None)) is not None:
        name = f"partition-id {twin.partition}" if twin.partition >= 0 else f"domain {twin.domain!r}"
        raise InputError(f"two nodes say that they are {name}: give each its own in --node-config")
    if len({site.partition < 0 for site in sites}) > 1:
        raise InputError("some nodes have a partition-id and others data of their own: start all the same way")
    clients = []
    for number, site in enumerate(sites):
        shared = {"id": site.partition, "partition": site.partition}
        client = {**(shared if site.partition >= 0 else {"id": number}), "domain": site.domain}
        images = {"train": site.train if site.domain != hold_out else 0, "test": site.test}
        keys = {MASK_KEY: site.mask_key} if site.mask_key else {}
        clients.append({**client, **images, "validation": site.validation, "content": site.content, **keys})
    return clients


def client_name(client: dict[str, Any]) -> str:
    """Name of a client of the manifest, as SiteDescription.name."""
    return str(client.get("partition", client["domain"]))


def release_keys(clients: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Unbind the names of sites that have a new key."""
    for client in clients:
        if ALL_SITES in names or client_name(client) in names:
            client.pop(NODE_KEY, None)


def _check_sites(sites: Sequence[SiteDescription], config: Config) -> None:
    if len({(site.image_size, site.channels) for site in sites}) > 1:
        sizes = ", ".join(f"{s.domain} {s.image_size}x{s.image_size}x{s.channels}" for s in sites)
        raise InputError(f"the sites' images differ in size: {sizes}; set data.image_size")
    if sites[0].partition >= 0:
        return
    scheme, hold_out, domains = config.partition.scheme, config.partition.hold_out, [site.domain for site in sites]
    if scheme != "domain":
        raise InputError(f"partition.scheme={scheme} divides one dataset, but sites have their own data: leave it out")
    if config.data.name not in OWN_DATA:
        names = join_names(OWN_DATA)
        raise InputError(f"the sites have data of their own, but data.name is {config.data.name}: set it to {names}")
    if hold_out is not None and hold_out not in domains:
        raise InputError(f"partition.hold_out: there is no site {hold_out!r}; choose from {', '.join(domains)}")


def _compare_classes(
    sites: Sequence[SiteDescription], classes: Sequence[str], configured: bool, holders: Counter[str]
) -> list[str]:
    """Return notes on sites whose classes differ from those of the run."""
    notes = []
    for site in sites:
        own = set(site.classes)
        if missing := [name for name in classes if name not in own and (configured or holders[name] > 1)]:
            notes.append(f"site {site.domain!r} has no image of {join_names([*map(repr, missing)])}")
        if unknown := sorted(own.difference(classes)):
            notes.append(
                f"site {site.domain!r} also has {join_names([*map(repr, unknown)])}, which data.classes leaves out"
            )
        alone = [name for name in classes if name in own and holders[name] == 1]
        if alone and not configured and len(sites) > 1:
            names = join_names([*map(repr, alone)])
            notes.append(f"only site {site.domain!r} has {names}: check that all sites spell it the same way")
    return notes
