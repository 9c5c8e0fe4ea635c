"""What the sites of a run agree on before round 1: classes, clients and their numbers, as its manifest holds them."""

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedcir.config import Config
from fedcir.data.catalogue import named_classes
from fedcir.data.examples.images import Normalisation
from fedcir.data.federation import Sizes, image_card
from fedcir.flower.introduction import Introduction
from fedcir.models.task import Task, image_task
from fedcir.types import InputError


@dataclass(frozen=True)
class SiteRoster:
    """Who takes part in a run across sites, from its manifest."""

    manifest: dict[str, Any]
    task: Task
    card: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def trainers(self) -> tuple[int, ...]:
        return tuple(client["id"] for client in self.manifest["clients"] if client["train"])

    @property
    def holders(self) -> int:
        return len(self.trainers)

    @property
    def evaluators(self) -> dict[int, str]:
        first: dict[str, int] = {}
        for client in self.manifest["clients"]:
            first.setdefault(client["domain"], client["id"])
        return {client: domain for domain, client in first.items()}

    @property
    def unseen(self) -> tuple[str, ...]:
        seen = {client["domain"] for client in self.manifest["clients"] if client["train"]}
        return tuple(domain for domain in self.evaluators.values() if domain not in seen)

    def images(self, client: int) -> int:
        return next(int(each["train"]) for each in self.manifest["clients"] if each["id"] == client)

    def hash_images(self) -> None:
        """None: a server never learns hashes of the sites' images, with which it could confirm a guess."""

    @property
    def sizes(self) -> dict[int, Sizes]:
        return {client["id"]: Sizes(*(client[part] for part in Sizes._fields)) for client in self.manifest["clients"]}


def roster_of(manifest: dict[str, Any], config: Config, notes: Iterable[str] = ()) -> SiteRoster:
    """The roster of a manifest, fresh or read again."""
    classes, channels = manifest["classes"], manifest["channels"]
    size, normalisation = manifest["image_size"], Normalisation.of(config.model, channels)
    task = image_task(config.model, len(classes), channels, config.run.seed, size)
    return SiteRoster(manifest, task, image_card(classes, size, channels, normalisation), tuple(notes))


def agree(sites: Iterable[Introduction], config: Config) -> tuple[dict[str, Any], list[str]]:
    """The manifest that all sites together make, and what their users should know."""
    sites = in_order(sites, config.partition.hold_out)
    _check(sites, config)
    configured = named_classes(config.data)
    here = [set(site.classes) for site in sites]
    classes = sorted(set(configured) if configured else set().union(*here))
    holders = Counter(name for names in here for name in names)
    notes = []
    for site, names in zip(sites, here, strict=True) if not sites[0].shared else ():
        if missing := [name for name in classes if name not in names and (configured or holders[name] > 1)]:
            notes.append(f"site {site.domain!r} has no image of {_names(missing)}")
        if unknown := sorted(names.difference(classes)):
            notes.append(f"site {site.domain!r} also has {_names(unknown)}, which data.classes leaves out")
        if not configured and len(sites) > 1 and (alone := [n for n in classes if n in names and holders[n] == 1]):
            notes.append(f"only site {site.domain!r} has {_names(alone)}: check that all sites spell it the same way")
    if (nobody := next((name for name in classes if not holders[name]), None)) is not None:
        raise InputError(f"data.classes: no site has an image of {nobody!r}")
    if len(classes) < 2:
        raise InputError(f"the sites have only one class, {classes[0]!r}: a classifier needs two")
    first = sites[0]
    for site in sites:
        if site.versions != first.versions:
            notes.append(f"site {site.domain!r} runs {site.versions}, but site {first.domain!r} runs {first.versions}")
    manifest = {
        "dataset": config.data.name,
        "classes": classes,
        "image_size": sites[0].image_size,
        "channels": sites[0].channels,
        "clients": entries(sites, config.partition.hold_out),
    }
    digest = hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()
    return {**manifest, "hash": digest, "key": secrets.token_hex(8)}, notes


def in_order(sites: Iterable[Introduction], hold_out: str | None = None) -> list[Introduction]:
    """Sites in the order of their clients' numbers: by partition, or by name with one that is held out last."""
    return sorted(sites, key=lambda site: (site.partition, site.domain == hold_out, site.domain))


def entries(sites: Sequence[Introduction], hold_out: str | None = None) -> list[dict[str, Any]]:
    """The manifest's clients."""
    names = [site.name for site in sites]
    times = Counter(names)
    if twice := next((site for site, name in zip(sites, names, strict=True) if times[name] > 1), None):
        what = f"partition-id {twice.partition}" if twice.partition >= 0 else f"domain {twice.domain!r}"
        raise InputError(f"two nodes say that they are {what}: give each its own in --node-config")
    if len({site.partition < 0 for site in sites}) > 1:
        raise InputError("some nodes have a partition-id and others data of their own: start all the same way")
    return [
        _entry(number if site.partition < 0 else site.partition, site, site.domain != hold_out)
        for number, site in enumerate(sites)
    ]


def _check(sites: Sequence[Introduction], config: Config) -> None:
    if len({(site.image_size, site.channels) for site in sites}) > 1:
        sizes = ", ".join(f"{s.domain} {s.image_size}x{s.image_size}x{s.channels}" for s in sites)
        raise InputError(f"the sites' images differ in size: {sizes}; set data.image_size")
    own = sites[0].partition < 0
    if own and config.partition.scheme != "domain":
        raise InputError(
            f"partition.scheme={config.partition.scheme} divides one dataset, but the sites have data of their own: "
            "leave it out"
        )
    if own and config.data.name != "folders":
        raise InputError(f"the sites have images of their own, but data.name is {config.data.name}: set it to folders")
    held_out = config.partition.hold_out
    if own and held_out is not None and held_out not in [site.domain for site in sites]:
        raise InputError(
            f"partition.hold_out: there is no site {held_out!r}; choose from {', '.join(s.domain for s in sites)}"
        )
    for site in sites:
        if own and len(site.classes) < 2:
            only = "".join(f", only {name!r}" for name in site.classes)
            raise InputError(f"site {site.domain!r} has too few classes{only}: add images of at least two")


def _entry(number: int, site: Introduction, trains: bool) -> dict[str, Any]:
    """A client in the manifest."""
    name = {"partition": site.partition} if site.partition >= 0 else {}
    counts = {"train": site.train if trains else 0, "test": site.test, "validation": site.validation}
    return {"id": number, **name, "domain": site.domain, **counts, "content": site.content}


def _names(classes: Sequence[str]) -> str:
    rest = f" and {len(classes) - 5} more" if len(classes) > 5 else ""
    return ", ".join(repr(name) for name in classes[:5]) + rest
