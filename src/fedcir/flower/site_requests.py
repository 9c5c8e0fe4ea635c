"""Handle the messages that a site receives: describe itself, train, evaluate. `local_update` is for your own apps."""

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Error, Message, MessageType, RecordDict
from torch import nn

from fedcir.algorithms import make_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.client.client_requests import RequestKind, handle_request
from fedcir.client.head_bank import COALITIONS
from fedcir.client.local_update import LocalTrainer
from fedcir.client.masks import MASKS, mask_sums, unpack_keys
from fedcir.client.state import GENERATIONS, ClientStore
from fedcir.client.uploads import check_example_privacy, check_update_privacy
from fedcir.config import AlgorithmConfig, Config, config_to_tables
from fedcir.data.federation import Client
from fedcir.data.torch_datasets import federation_from_datasets
from fedcir.errors import FedcirError, InputError, RunError
from fedcir.files import hash_file, make_private_folder, write_file
from fedcir.flower.flwr_adapter import FAILURE_CODE
from fedcir.flower.site_data import VERSIONS, AuditLog, LocalSite, NodeConfig, open_mask_key, write_to_state
from fedcir.flower.site_manifest import SiteDescription
from fedcir.flower.site_policy import Policy, PolicyError, PrivacyBudget, read_policy
from fedcir.flower.wire import TaskHeader, pack_combined, pack_reply, unpack_header, unpack_task
from fedcir.machine import retain_freed_memory, use_threads
from fedcir.models.tensors import count_bytes
from fedcir.runtime.resolution import check_stored_sums, pick_device
from fedcir.runtime.session import hash_frozen, make_trainer
from fedcir.server.accounting import upload_accountant
from fedcir.tasks.classification import choose_task
from fedcir.tasks.task import Task
from fedcir.tensor_files import pack_groups, unpack_groups
from fedcir.types import ClientReply, Groups
from fedcir.validation import build_dataclass

REPLIES, REPLY_FILE = "replies", "round-{:06d}.safetensors"
"""Folder of a run in the state folder, and a file of a client in it."""
STORED_ROUNDS = 3
"""Rounds whose replies are stored. With noise, a server saves a checkpoint every round, so it repeats one at most."""

OTHER_WEIGHTS = (
    "the frozen tensors of its encoder are not the server's: install the same weights, and the same version of what "
    "makes the encoder"
)

SiteOpener = Callable[[TaskHeader, Context], LocalSite]


def local_update(
    msg: Message,
    context: Context,
    *,
    data: tuple[Any, Any],
    encoder: nn.Module,
    num_classes: int | None = None,
    task: Task | None = None,
    latent: int | None = None,
    algorithm: type[Algorithm] | None = None,
) -> Message:
    """Reply to any message of an AlgorithmStrategy, in the train, evaluate and query functions of a ClientApp.

    `data` is this site's (train, test) pair of torch Datasets of (input, target), and `encoder` a module built as on
    the server, like the `task` or the number of classes. The node is identified by `domain` in its node-config, or by
    its partition-id. `algorithm` is the class of a method that is not part of fedcir.
    """

    def open_datasets(header: TaskHeader, context: Context) -> LocalSite:
        node = NodeConfig(context)
        name = str(node.site) if node.partition < 0 else f"client-{node.partition}"
        predicted = choose_task(task, num_classes)
        federation = federation_from_datasets({name: data}, encoder, predicted, latent, header.config.run.seed)
        client = federation.clients[0]
        if client.test is None:
            raise InputError(f"{name!r} has no test Dataset, but every site must test: give data=(train, test)")
        counts = len(client.train or ()), len(client.test)
        site = SiteDescription(name, (), *counts, "", partition=node.partition, shared=True, versions=VERSIONS)
        return LocalSite(client, federation.builder.limit(header.config.model), site)

    return handle_message(msg, context, open_datasets, algorithm)


def handle_message(
    msg: Message, context: Context, open_site: SiteOpener, algorithm: type[Algorithm] | None = None
) -> Message:
    """Do what a message asks for, and record it. Errors are logged here; the server gets their public text only."""
    node, kind = NodeConfig(context), msg.metadata.message_type
    audit = AuditLog(node.state_folder, {"by": "site", "site": node.site, "run": str(msg.metadata.run_id)})
    request = SiteRequest(msg, node, open_site, algorithm, audit)
    if kind == MessageType.TRAIN and request.evaluates_first:
        tested = request.handle(MessageType.EVALUATE, rounds_back=1)
        return Message(pack_combined(tested, request.handle(kind)), reply_to=msg)
    content = request.handle(kind)
    if isinstance(content, Error) and kind == MessageType.QUERY and node.site is not None:
        content = Error(content.code, f"site {node.site!r}: {content.reason}")
    return Message(content, reply_to=msg)


@dataclass(frozen=True)
class SiteRequest:
    """Message that a site has received."""

    msg: Message
    node: NodeConfig
    open_site: SiteOpener
    algorithm: type[Algorithm] | None
    audit: AuditLog

    @property
    def evaluates_first(self) -> bool:
        """Whether the client evaluates the model it receives before it trains on it."""
        try:
            header = unpack_header(self.msg.content)
            return header.clients[self.msg.metadata.dst_node_id] in header.tests
        except Exception:  # handle() reports what is wrong with the message
            return False

    def handle(self, kind: str, rounds_back: int = 0) -> RecordDict | Error:
        """Return the reply to a request of this kind, for the message's round or an earlier one."""
        try:
            return self._handle(kind, rounds_back)
        except Exception as error:
            logging.getLogger("flwr").error("fedcir: %s", error, exc_info=not isinstance(error, FedcirError))
            public = error.public if isinstance(error, FedcirError) else ""
            reason = public or f"{type(error).__name__} at the site"
            number = self.msg.metadata.group_id.partition("-")[0]
            round = str(int(number) - rounds_back) if number.isdecimal() else number
            event = "refused" if isinstance(error, PolicyError) else "failed"
            with contextlib.suppress(RunError):  # the log itself may be what cannot be written
                self.audit.record(event, asked=kind, round=round, reason=reason)
            return Error(FAILURE_CODE, f"{reason}; the site's log tells more")

    def _handle(self, kind: str, rounds_back: int) -> RecordDict:
        """Reply after the site's policy has allowed it and its audit log has recorded it."""
        policy = read_policy(self.node.get("policy"))
        content = self.msg.content
        groups, header = ({}, unpack_header(content)) if kind == MessageType.QUERY else unpack_task(content)
        header = replace(header, round=header.round - rounds_back)
        config = header.config
        policy.check_header(header)
        method = self._make_algorithm(config)
        check_stored_sums(config, method)  # a server need not have checked it, and a bit for each image has no noise
        policy.check_names(f"{group}/" for group in method.uploads)
        site = self.open_site(policy.limit_classes(header), self.node.context)
        policy.check_data(site.client)
        if kind == MessageType.QUERY:
            policy.check_summary(site.description.data_summary)
            description = replace(site.description, classes=policy.filter_classes(site.description.classes))
            about: dict[str, Any] = {"train": description.train, "test": description.test}
            if config.server.masked:
                key = open_mask_key(self.node)
                about["mask_key"] = key.public_key().public_bytes_raw().hex()
                description = replace(description, mask_key=about["mask_key"])
            self.audit.record("introduced", algorithm=config.algorithm.name, **about)
            return description.to_content()
        client = replace(site.client, id=header.clients[self.msg.metadata.dst_node_id])
        part: RequestKind = "train" if kind == MessageType.TRAIN else "evaluate"
        retain_freed_memory()

        def compute() -> ClientReply:
            # As far back as a server that is killed may resume from; it may not have received the last round yet.
            generations = GENERATIONS * config.server.checkpoint_every + 1
            store = ClientStore(self.node.state_folder / header.key, generations)
            tested = (*method.trains, *((COALITIONS,) if config.server.store_sums and COALITIONS in groups else ()))
            received = groups if part == "train" else {name: groups[name] for name in tested}
            with use_threads(config.run.threads), self._open_trainer(site, config, method) as trainer:
                if header.frozen and header.frozen != trainer.frozen_hash:
                    raise InputError(OTHER_WEIGHTS, public=OTHER_WEIGHTS)
                if part == "train":
                    _check_noise(config, method, groups, trainer)
                reply = handle_request(trainer, client, store, part, received, header.round)
            policy.check_names(f"{group}/{name}" for group, bag in reply.tensors.items() for name in bag)
            if part == "train" and config.server.masked:
                key, keys = open_mask_key(self.node), groups.get(MASKS, {})
                policy.check_mask_keys(public for other, public in unpack_keys(keys).items() if other != client.id)
                tensors = mask_sums(reply.tensors, client.id, key, keys, digest_request(groups, header))
                reply = replace(reply, tensors=tensors)
            return reply

        fields: dict[str, Any] = {}
        if part == "train" and config.privacy.noised_uploads:
            reply, fields = self._count_upload(compute, client, groups, header, policy, method.one_shot)
        else:
            reply = compute()
        fields = {"bytes": {group: count_bytes({group: bag}) for group, bag in reply.tensors.items()}, **fields}
        event = "trained" if part == "train" else "tested"
        self.audit.record(event, algorithm=config.algorithm.name, key=header.key, round=header.round, **fields)
        return pack_reply(reply, method.trains)

    def _count_upload(
        self,
        compute: Callable[[], ClientReply],
        client: Client,
        groups: Groups,
        header: TaskHeader,
        policy: Policy,
        one_shot: bool,
    ) -> tuple[ClientReply, dict[str, Any]]:
        """Count a noised reply in the privacy budget, and return it with fields for the audit log.

        A repeated request gets the stored reply: fresh noise on the same update would average out.
        """
        folder, digest = self.node.state_folder, digest_request(groups, header)
        replies = folder / header.key / REPLIES / str(client.id)
        if (stored := load_reply(replies, client.id, header.round, digest)) is not None:
            return stored, {"repeated": True}
        config = header.config
        upload = upload_accountant(config.privacy, config.local, len(client.train or ()), one_shot)
        budget = PrivacyBudget(folder, str(self.node.site), policy.privacy)
        budget.check(*upload)  # before anything is computed
        reply = compute()
        uploads, epsilon = budget.spend(*upload)
        save_reply(replies, reply, header.round, digest)
        return reply, {"upload": uploads, **({} if epsilon is None else {"epsilon": epsilon})}

    @contextlib.contextmanager
    def _open_trainer(self, site: LocalSite, config: Config, method: Algorithm) -> Iterator[LocalTrainer]:
        """Reuse the networks of the last message if nothing has changed; after an error they are built anew."""
        device = str(pick_device(self.node.get("device") or "auto"))
        file = self.node.get("algorithm") if config.algorithm.name.endswith(".py") else ""
        key = json.dumps([config_to_tables(config), device, hash_file(Path(file)) if file else ""])
        trainer = site.trainers.pop(key, None)
        site.trainers.clear()
        if trainer is None:
            trainer = make_trainer(config, method, site.builder, device)
            trainer.deployed, trainer.frozen_hash = True, hash_frozen(site.builder, trainer.modules)
        yield trainer
        site.trainers[key] = trainer

    def _make_algorithm(self, config: Config) -> Algorithm:
        """Make the run's method. A file must be this site's own copy: a server cannot make a site run other code."""
        if self.algorithm is not None:
            return build_dataclass(self.algorithm, config.algorithm.fields, "algorithm")
        name = config.algorithm.name
        if name.endswith(".py"):
            own_copy = self.node.get("algorithm")
            if Path(own_copy).name != Path(name).name:
                raise InputError(
                    f"the run's algorithm is in {name}: name this site's copy of it in --node-config, as algorithm",
                    public="its node-config names no copy of the run's algorithm file",
                )
            name = own_copy
        return make_algorithm(AlgorithmConfig(name, config.algorithm.fields))


def _check_noise(config: Config, method: Algorithm, groups: Groups, trainer: LocalTrainer) -> None:
    """Refuse a run whose noise does not cover all that it uploads: a server need not have checked it."""
    try:
        check_update_privacy(config, method, {name: groups.get(name, {}) for name in method.trains})
        if config.privacy.by_steps:
            check_example_privacy(config, method, trainer.task, trainer.modules["model"])
    except InputError as error:
        raise InputError(str(error), public="the run's noise does not cover all that it would upload") from error


def digest_request(groups: Groups, header: TaskHeader) -> bytes:
    """Hash all that a reply depends on; node ids, which change when a site reconnects, are left out."""
    digest = hashlib.blake2b(replace(header, clients={}, tests=()).to_json().encode(), digest_size=32)
    for group, bag in sorted(groups.items()):
        for name, tensor in sorted(bag.items()):
            digest.update(f"{group}/{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            if tensor.numel():  # an empty tensor has no view of other types
                digest.update(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.digest()


def load_reply(folder: Path, client: int, round: int, digest: bytes) -> ClientReply | None:
    """Return the stored reply to the same request, if there is one."""
    try:
        groups, _ = unpack_groups(folder / REPLY_FILE.format(round), "reply", "about")
    except InputError:  # there is none, or it is damaged
        return None
    request, metrics = groups["about"]["request"], groups["about"]["metrics"]
    if bytes(request["digest"].tolist()) != digest:
        return None
    numbers = {name: float(value) for name, value in metrics.items()}
    return ClientReply(client, int(request["examples"]), groups["reply"], numbers)


def save_reply(folder: Path, reply: ClientReply, round: int, digest: bytes) -> None:
    """Store a reply with the digest of its request, and delete those of other than the last rounds."""
    request = {"digest": torch.tensor(list(digest)), "examples": torch.tensor(reply.num_examples)}
    metrics = {name: torch.tensor(value, dtype=torch.double) for name, value in reply.metrics.items()}
    content = pack_groups({"reply": reply.tensors, "about": {"metrics": metrics, "request": request}}, round)
    recent = {REPLY_FILE.format(number) for number in range(round - STORED_ROUNDS + 1, round + 1)}
    with write_to_state(folder.parents[1]):
        for path in (folder.parent, folder):
            make_private_folder(path)
        write_file(folder / REPLY_FILE.format(round), content)
        for path in folder.glob("round-*.safetensors"):
            if path.name not in recent:
                path.unlink()
