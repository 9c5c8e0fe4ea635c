"""Which node speaks for which client: sites introduce themselves before round 1, and again when they come back.

Flower draws a node's number anew for every federation, so clients are told apart by what the sites call themselves. A
name belongs to the key of the node that used it first.
"""

import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, Metadata, RecordDict
from flwr.serverapp import Grid

from fedcir.config import Config, build
from fedcir.data.catalogue import ALL
from fedcir.data.examples.images import Normalisation
from fedcir.data.federation import Sizes, image_card
from fedcir.flower.audit_log import AuditLog
from fedcir.flower.keys import KEY, claim_fault, fingerprint, name_of
from fedcir.flower.wire import ANOTHERS, CONFIG, NO_REPLY, ORDER, Order, ask, is_answer, reason_of
from fedcir.models.task import Task, image_task
from fedcir.types import InputError, RunError

log = logging.getLogger("flwr")

RESTART = "if you change its node-config, restart its SuperNode"
POLL = 0.25
"""Seconds between two looks for replies."""
MAX_NAME = 200
MAX_INTRODUCTION = 10_000_000
MAX_IMAGES = 1_000_000_000
"""That a site may say it has. Its replies must tell of just as many."""


@dataclass(frozen=True)
class Introduction:
    """What a site says of itself: no image, no name of a file, and how many images it has but not of which class."""

    domain: str
    classes: tuple[str, ...]
    """Those that its images have."""
    train: int
    test: int
    content: str
    """A hash of its data, so that a resumed run does not go on with other data."""
    image_size: int = 0
    channels: int = 0
    validation: int = 0
    """How many images it has set aside to pick the best round on."""
    partition: int = -1
    """Its number, where it holds a share of a dataset that all have."""
    shared: bool = False
    """Whether the classes are those of that dataset, and not its own."""
    versions: str = ""

    @property
    def name(self) -> str:
        """What its client is known by from one connection to the next."""
        return str(self.partition) if self.partition >= 0 else self.domain

    def to_record(self) -> ConfigRecord:
        return ConfigRecord({ORDER: json.dumps(asdict(self))})

    @classmethod
    def from_message(cls, message: Message) -> "Introduction":
        """What a node answered, or ValueError."""
        text = str(message.content.config_records[CONFIG][ORDER])
        if len(text) > MAX_INTRODUCTION:
            raise ValueError("too long")
        made = build(cls, json.loads(text), "introduction")
        if any(len(name) > MAX_NAME or not name.isprintable() for name in (made.domain, made.versions, *made.classes)):
            raise ValueError("a name that cannot be shown")
        if not all(0 <= images <= MAX_IMAGES for images in (made.train, made.test, made.validation)):
            raise ValueError("a number of images that cannot be")
        return made


@dataclass
class Sites:
    """The nodes that are connected and the clients they speak for."""

    grid: Grid
    order: Order
    """What a site must know to introduce itself."""
    audit: AuditLog | None = None
    """Told of nodes that join, are refused or leave."""
    _noted: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What it was last told of each node."""
    introductions: dict[int, Introduction] = field(default_factory=dict)
    """By node."""
    failures: dict[int, str] = field(default_factory=dict)
    """Nodes that could not introduce themselves, or as another only, and why."""
    keys: dict[int, str] = field(default_factory=dict)
    """The fingerprints of connected nodes' keys, empty where Flower tells none."""
    remind: float = 30.0
    """Seconds of waiting after which the log says for whom, and nodes that failed are asked again."""
    _bound: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The manifest's clients by name, once there is one."""
    _claims: dict[int, str] = field(default_factory=dict)
    """Names that failed nodes have claimed."""
    _said: dict[int, str] = field(default_factory=dict)
    """What the log was told of each node."""
    _asked: dict[str, Metadata] = field(default_factory=dict)
    """Messages that have not been answered yet."""

    def look(self) -> set[int]:
        """Ask nodes that are new who they are, and read what has been answered; gives the nodes that are connected."""
        self.keys = {node.node_id: fingerprint(node.public_key) for node in self.grid.get_nodes()}
        connected = set(self.keys)
        self._ask(connected - {*self.introductions, *self.failures, *self._silent()})
        for message in self.grid.pull_messages(list(self._asked)) if self._asked else ():
            asked = self._asked.pop(message.metadata.reply_to_message_id, None)
            if asked is not None:
                self._read(asked, message)
        for known in (self.introductions, self.failures):  # who comes back may be another, or mended
            for node in known.keys() - connected:
                del known[node]
        self._asked = {message: asked for message, asked in self._asked.items() if asked.dst_node_id in connected}
        self._note_changes()
        return connected

    def _silent(self) -> set[int]:
        """Nodes that have not answered yet."""
        return {asked.dst_node_id for asked in self._asked.values()}

    def bind(self, clients: Sequence[dict[str, Any]]) -> None:
        """Bind the names of the manifest's clients to the keys of the nodes that speak for them now."""
        self._bound = {name_of(client): client for client in clients}
        for node, site in self.introductions.items():
            client = self._bound.get(site.name)
            if client is not None and self.keys.get(node):
                client.setdefault(KEY, self.keys[node])

    @property
    def expecting(self) -> bool:
        """Whether a node has been asked that has not answered yet."""
        return bool(self._asked)

    def wait(self, enough: int, patience: float) -> None:
        """Wait until enough sites are connected and every node has answered. The log tells how it goes."""
        begun = reminded = time.monotonic()
        while True:
            self.look()
            self._tell_news(f". It is asked again every {self.remind:g} s; {RESTART}")
            now = time.monotonic()
            if len(self.introductions) >= enough and not self._asked:
                return
            if now > begun + patience:
                break
            if now > reminded + self.remind:
                reminded = now
                self._remind(enough, begun + patience - now)
            time.sleep(POLL)
        if (there := len(self.introductions)) < enough:
            failed = "".join(f"; node {node}: {reason}" for node, reason in self.failures.items())
            raise RunError(
                f"{there} of {enough} sites are connected after {patience:.0f} s ({self._there()}){failed}. "
                "Start or fix the others, or lower `sites`"
            )

    def _tell_news(self, advice: str = "") -> None:
        """Log what is new about each node since the last call."""
        said = self._said
        news = {
            node: f"site {site.domain!r} connected as node {node}: {site.train} training and {site.test} test images"
            for node, site in self.introductions.items()
        }
        for node, reason in self.failures.items():
            news[node] = f"node {node} cannot take part: {reason}{advice}"
        for node in said.keys() - news.keys() - self._silent():
            del said[node]
            log.warning("node %s has disconnected", node)
        for node, line in news.items():
            if not said.get(node, "").startswith(line):
                said[node] = line
                log.log(logging.WARNING if node in self.failures else logging.INFO, line)

    def _remind(self, enough: int, left: float) -> None:
        """Say whom the run waits for, and ask nodes again that have failed: they may be mended by now."""
        there, silent = len(self.introductions), self._silent()
        line = f"{there} of {enough} sites are connected ({self._there()}), and the run waits {left:.0f} s more"
        advice = ": start the others, or stop it with `flwr stop` and start it with a lower `sites`"
        log.info("%s%s", line, advice if there + len(silent - self.failures.keys()) < enough else "")
        for node in sorted(silent):
            log.info("node %s has not answered yet: it may be decoding its images", node)
        for node, reason in self.failures.items():
            log.warning("node %s still cannot take part: %s", node, reason)
        self._ask(self.failures.keys() - silent)

    def _there(self) -> str:
        return ", ".join(sorted(site.domain for site in self.introductions.values())) or "none"

    def _note_changes(self) -> None:
        if self.audit is None:
            return
        now: dict[int, dict[str, Any]] = {
            node: {"event": "refused", "reason": reason} for node, reason in self.failures.items()
        }
        for node, site in self.introductions.items():
            now[node] = {"event": "joined", "site": site.domain, "train": site.train, "test": site.test}
        for node in self._noted.keys() - now.keys():
            self.audit.note(**{**self._noted[node], "event": "left"}, node=str(node))
        for node, said in now.items():
            if self._noted.get(node) != said:
                self.audit.note(**said, node=str(node))
        self._noted = now

    def nodes(self, clients: Sequence[dict[str, Any]]) -> tuple[dict[int, int], dict[int, str]]:
        """The nodes of the manifest's clients, and why others of them have none."""
        connected = self.look()
        self._tell_news()
        found: dict[int, int] = {}
        claimed = {name: self.failures[node] for node, name in self._claims.items() if node in self.failures}
        named = {name_of(client): client for client in clients}
        missing = {c["id"]: f"its node is not connected{_but(claimed.get(name))}" for name, c in named.items()}
        for node, site in self.introductions.items():
            client = named.get(site.name)
            if client is None or node not in connected or client["id"] in found:
                continue  # who said so first has the name; another may take over once that one is gone
            if client["content"] != site.content:
                missing[client["id"]] = "its data have changed since the run began"
            else:
                found[client["id"]] = node
                missing.pop(client["id"], None)
        return found, missing

    def _ask(self, nodes: Set[int]) -> None:
        messages = [
            ask(RecordDict({CONFIG: ConfigRecord({ORDER: self.order.to_json()})}), node, MessageType.QUERY)
            for node in sorted(nodes)
        ]
        if messages:
            self._asked |= push(self.grid, messages)

    def _read(self, asked: Metadata, message: Message) -> None:
        node = asked.dst_node_id
        if not is_answer(message, asked):
            self.failures[node] = ANOTHERS
            return
        if message.has_error():
            if (reason := reason_of(message)) != NO_REPLY:  # or it is asked again
                self.failures[node] = reason
            return
        try:
            site = Introduction.from_message(message)
            if (owner := self._bound.get(site.name)) and (fault := claim_fault(owner, self.keys.get(node, ""))):
                self.failures[node], self._claims[node] = fault, site.name
                return
            self.introductions[node] = site
            self.failures.pop(node, None)  # it was mended
            self.bind(list(self._bound.values()))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.failures[node] = (
                "its answer is not one of this fedcir: install the same version at the site and at the server"
            )


def push(grid: Grid, messages: Sequence[Message]) -> dict[str, Metadata]:
    """Send messages; gives those that went out, by their ids."""
    went = set(grid.push_messages(messages))
    return {
        message.metadata.message_id: message.metadata for message in messages if message.metadata.message_id in went
    }


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
    configured = config.data.classes not in (None, ALL)
    here = [set(site.classes) for site in sites]
    classes = sorted(set(config.data.classes or ()) if configured else set().union(*here))
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


def _but(claim: str | None) -> str:
    return "" if claim is None else f", and another was turned away: {claim}"


def _names(classes: Sequence[str]) -> str:
    rest = f" and {len(classes) - 5} more" if len(classes) > 5 else ""
    return ", ".join(repr(name) for name in classes[:5]) + rest
