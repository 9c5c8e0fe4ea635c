"""What runs at a site: it says who it is, trains and tests. `app` is for our own server, `local_update` for any app."""

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedcir import __version__
from fedcir.algorithms import make_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import AlgorithmConfig, Config, build, config_from, config_tables
from fedcir.data.federation import Client, Federation, federation_from, federation_of, open_federation
from fedcir.data.opening import open_site, site_pictures
from fedcir.data.partition import capped
from fedcir.data.shares import Share
from fedcir.engine.client import What, attend
from fedcir.engine.machine import keep_memory, pick_device, threads
from fedcir.engine.session import workbench
from fedcir.engine.store import GENERATIONS, ClientStore
from fedcir.flower.audit_log import AuditLog
from fedcir.flower.policy import Refused, read_policy
from fedcir.flower.sites import Introduction
from fedcir.flower.state import keyed, state_folder
from fedcir.flower.wire import CONFIG, Order, pack_reply, unpack_query, unpack_task
from fedcir.models.task import Task
from fedcir.models.tensors import tensor_bytes
from fedcir.types import FedcirError, InputError, RunError

app = ClientApp()

VERSIONS = f"fedcir {__version__}, torch {torch.__version__.partition('+')[0]}"
CRASHED = 2  # Flower's code for a ClientApp that raised an exception
NAMELESS = "its node-config names neither a domain nor a partition-id"


@dataclass(frozen=True)
class Place:
    """A site as it sees itself."""

    client: Client
    task: Task
    introduction: Introduction


@app.query()
def query(msg: Message, context: Context) -> Message:
    return answer(msg, context, _open)


@app.train()
def train(msg: Message, context: Context) -> Message:
    return answer(msg, context, _open)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    return answer(msg, context, _open)


def local_update(
    msg: Message,
    context: Context,
    *,
    data: tuple[Any, Any],
    encoder: nn.Module,
    num_classes: int,
    latent: int | None = None,
    algorithm: type[Algorithm] | None = None,
) -> Message:
    """The answer to any message of an AlgorithmStrategy: for the train, evaluate and query functions of a ClientApp.

    `data` is this site's (train, test) pair of torch Datasets that give (input, label), and `encoder` a module built
    as on the server. The node is known by `domain` in its node-config, or by its partition-id. `algorithm` is the
    class of a method that fedcir does not bring.
    """

    def place(order: Order, context: Context) -> Place:
        (name, number), config = _name(context), order.config
        federation = federation_of({name: data}, encoder, num_classes, latent, config.run.seed)
        client = federation.clients[0]
        if client.test is None:
            raise InputError(f"{name!r} has no test Dataset, but every site must test: give data=(train, test)")
        sizes = len(client.train or ()), len(client.test)
        about = Introduction(name, (), *sizes, "", partition=number, shared=True, versions=VERSIONS)
        return Place(client, federation.task, about)

    return answer(msg, context, place, algorithm)


def answer(
    msg: Message,
    context: Context,
    place: Callable[[Order, Context], Place],
    algorithm: type[Algorithm] | None = None,
) -> Message:
    """Do what a message asks for, and note it. Errors are logged here; the server hears their public text or kind."""
    who = context.node_config.get("domain", context.node_config.get("partition-id"))
    audit = AuditLog(_state(context), {"by": "site", "site": who, "run": str(msg.metadata.run_id)})
    try:
        return Message(_content(msg, context, place, algorithm, audit), reply_to=msg)
    except Exception as error:
        logging.getLogger("flwr").error("fedcir: %s", error, exc_info=not isinstance(error, FedcirError))
        public = error.public if isinstance(error, FedcirError) else ""
        reason = public or f"{type(error).__name__} at the site"
        with contextlib.suppress(RunError):  # it may be the log itself that cannot be written
            event = "refused" if isinstance(error, Refused) else "failed"
            audit.note(
                event, asked=msg.metadata.message_type, round=msg.metadata.group_id.partition("-")[0], reason=reason
            )
        reason = f"{reason}; the site's log tells more"
        if msg.metadata.message_type == MessageType.QUERY and who is not None:
            reason = f"site {who!r}: {reason}"
        return Message(Error(CRASHED, reason), reply_to=msg)


def _content(
    msg: Message,
    context: Context,
    place: Callable[[Order, Context], Place],
    algorithm: type[Algorithm] | None,
    audit: AuditLog,
) -> RecordDict:
    """The answer, once the site's policy allows it and its audit log has it."""
    policy = read_policy(str(context.node_config.get("policy", "")))
    asks = msg.metadata.message_type
    groups, order = unpack_task(msg.content) if asks != MessageType.QUERY else ({}, unpack_query(msg.content))
    config = order.config
    policy.check_order(order)
    fields = config.algorithm.fields
    method = _algorithm(config, context) if algorithm is None else build(algorithm, fields, "algorithm")
    policy.check_names(f"{group}/" for group in (*method.trains, *method.sends))
    here = place(policy.narrowed(order), context)
    policy.check_data(here.client)
    if asks == MessageType.QUERY:
        about = replace(here.introduction, classes=policy.shown(here.introduction.classes))
        audit.note("introduced", algorithm=config.algorithm.name, train=about.train, test=about.test)
        return RecordDict({CONFIG: about.to_record()})
    number = order.clients[msg.metadata.dst_node_id]
    store = ClientStore(_state(context) / order.key, GENERATIONS * config.server.checkpoint_every)
    keep_memory()
    with threads(config.run.threads):
        worker = workbench(config, method, here.task, str(pick_device(str(context.node_config.get("device", "auto")))))
        worker.deployed = True
        what: What = "train" if asks == MessageType.TRAIN else "evaluate"
        reply = attend(worker, replace(here.client, id=number), store, what, groups, order.round)
    policy.check_names(f"{group}/{name}" for group, bag in reply.arrays.items() for name in bag)
    sent = {group: tensor_bytes({group: bag}) for group, bag in reply.arrays.items()}
    event = "trained" if what == "train" else "tested"
    audit.note(event, algorithm=config.algorithm.name, key=order.key, round=order.round, bytes=sent)
    return pack_reply(reply, method.trains)


def _state(context: Context) -> Path:
    return state_folder(str(context.node_config.get("state", "")))


def _open(order: Order, context: Context) -> Place:
    """The site's own folder, or its share of a dataset that all have."""
    config, node = _with_encoder(order.config, context), context.node_config
    root = node.get("data-root")
    if "domain" in node:
        if root is None:
            raise InputError(
                '--node-config names a domain but no data-root: add data-root="DIR", the folder of its <class>/<image>',
                public="its node-config names no data-root",
            )
        classes = order.classes or tuple(config.data.classes or ())
        here = _own(_text(config), Path(str(root)).expanduser(), str(node["domain"]), classes)
        digest = keyed(_state(context), here.introduction.content)
        return replace(here, introduction=replace(here.introduction, content=digest))
    if "partition-id" not in node:
        raise InputError(
            "--node-config must hold data-root and domain, or the partition-id of a shared dataset", public=NAMELESS
        )
    if root is not None:
        config = replace(config, data=replace(config.data, root=str(Path(str(root)).expanduser())))
    return _share(_text(config), _partition(context))


@lru_cache(maxsize=1)  # Flower's simulation asks one process again and again
def _own(text: str, root: Path, domain: str, classes: tuple[str, ...]) -> Place:
    config = config_from(json.loads(text))
    here = tuple(sorted({item.label for item in site_pictures(root, domain, config.data).pictures.items}))
    domains = open_site(root, domain, config.data, config.run.seed, classes)
    whole = domains.domains[0]
    rows = {} if domain == config.partition.hold_out else {domain: torch.arange(len(whole.train)).numpy()}
    share = capped(Share(domain, rows), {domain: whole.train.labels}, config.partition.max_samples, config.run.seed)
    federation = federation_from(config, domains, [share])
    size, channels = federation.card["image_size"], federation.card["channels"]
    client, trains = federation.clients[0], len(share.rows.get(domain, whole.train))
    about = Introduction(
        *(domain, here, trains, len(whole.test), domains.content, size, channels),
        validation=client.sizes.validation,
        versions=VERSIONS,
    )
    return Place(client, federation.task, about)


@lru_cache(maxsize=1)
def _shared(text: str) -> Federation:
    return open_federation(config_from(json.loads(text)))


def _share(text: str, number: int) -> Place:
    federation = _shared(text)
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


def _text(config: Config) -> str:
    """What decides on the data and the networks, as a key."""
    tables = config_tables(config)
    return json.dumps({name: tables[name] for name in ("data", "partition", "model", "run")})


def _name(context: Context) -> tuple[str, int]:
    node = context.node_config
    if "domain" in node:
        return str(node["domain"]), -1
    if "partition-id" in node:
        return f"client-{node['partition-id']}", _partition(context)
    raise InputError(
        '--node-config must name the site, as in domain="hospital-a", or hold its partition-id', public=NAMELESS
    )


def _partition(context: Context) -> int:
    number = context.node_config["partition-id"]
    if isinstance(number, bool) or not isinstance(number, int):
        raise InputError(
            f"partition-id in --node-config must be a whole number, got {number!r}",
            public="its partition-id is not a whole number",
        )
    return number


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


def _algorithm(config: Config, context: Context) -> Algorithm:
    """The run's method. A file is taken only if this site has it: a server cannot have a site run any other."""
    name = config.algorithm.name
    if name.endswith(".py"):
        own = str(context.node_config.get("algorithm", ""))
        if Path(own).name != Path(name).name:
            raise InputError(
                f"the run's algorithm is in {name}: name this site's copy of it in --node-config, as algorithm",
                public="its node-config names no copy of the run's algorithm file",
            )
        name = own
    return make_algorithm(AlgorithmConfig(name, config.algorithm.fields))
