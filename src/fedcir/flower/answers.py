"""What a site answers: it says who it is, trains and tests. `local_update` does so in an app of one's own."""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, MessageType, RecordDict
from torch import nn

from fedcir.algorithms import make_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import AlgorithmConfig, Config, build, config_tables
from fedcir.data.federation import Client, federation_of
from fedcir.engine.accounting import upload_accountant
from fedcir.engine.client import What, Workbench, attend
from fedcir.engine.dpsgd import check_examples
from fedcir.engine.files import file_hash
from fedcir.engine.machine import keep_memory, pick_device, threads
from fedcir.engine.privacy import check_private
from fedcir.engine.session import workbench
from fedcir.engine.store import GENERATIONS, ClientStore
from fedcir.flower.audit_log import AuditLog
from fedcir.flower.budget import REPLIES, PrivacyBudget, ReplyStore, request_digest
from fedcir.flower.introduction import Introduction
from fedcir.flower.place import VERSIONS, Place, name_of, state_of
from fedcir.flower.policy import Policy, Refused, read_policy
from fedcir.flower.wire import CONFIG, CRASHED, Order, pack_both, pack_reply, unpack_query, unpack_task
from fedcir.models.tensors import tensor_bytes
from fedcir.types import ClientReply, FedcirError, Groups, InputError, RunError

Places = Callable[[Order, Context], Place]


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
        (name, number), config = name_of(context), order.config
        federation = federation_of({name: data}, encoder, num_classes, latent, config.run.seed)
        client = federation.clients[0]
        if client.test is None:
            raise InputError(f"{name!r} has no test Dataset, but every site must test: give data=(train, test)")
        sizes = len(client.train or ()), len(client.test)
        about = Introduction(name, (), *sizes, "", partition=number, shared=True, versions=VERSIONS)
        return Place(client, federation.task, about)

    return answer(msg, context, place, algorithm)


def answer(msg: Message, context: Context, place: Places, algorithm: type[Algorithm] | None = None) -> Message:
    """Do what a message asks for, and note it. Errors are logged here; the server hears their public text or kind."""
    who = context.node_config.get("domain", context.node_config.get("partition-id"))
    audit = AuditLog(state_of(context), {"by": "site", "site": who, "run": str(msg.metadata.run_id)})
    question = Question(msg, context, place, algorithm, audit)
    asks = msg.metadata.message_type
    if asks == MessageType.TRAIN and question.tests_too:
        tested = question.answered(MessageType.EVALUATE, back=1)
        return Message(pack_both(tested, question.answered(asks)), reply_to=msg)
    content = question.answered(asks)
    if isinstance(content, Error) and asks == MessageType.QUERY and who is not None:
        content = Error(content.code, f"site {who!r}: {content.reason}")
    return Message(content, reply_to=msg)


@dataclass(frozen=True)
class Question:
    """A message at a site, and all that it takes to answer it."""

    msg: Message
    context: Context
    place: Places
    algorithm: type[Algorithm] | None
    audit: AuditLog

    @property
    def tests_too(self) -> bool:
        """Whether the client is to test what it receives before it trains on it."""
        try:
            order = unpack_query(self.msg.content)
            return order.clients[self.msg.metadata.dst_node_id] in order.tests
        except Exception:  # what is wrong with the message is told when it is answered
            return False

    def answered(self, asked: str, back: int = 0) -> RecordDict | Error:
        """The answer to one thing that was asked for, of the message's round or of one that lies `back`."""
        try:
            return self._content(asked, back)
        except Exception as error:
            logging.getLogger("flwr").error("fedcir: %s", error, exc_info=not isinstance(error, FedcirError))
            public = error.public if isinstance(error, FedcirError) else ""
            reason = public or f"{type(error).__name__} at the site"
            event, number = "failed", self.msg.metadata.group_id.partition("-")[0]
            if isinstance(error, Refused):
                event = "refused"
            round = str(int(number) - back) if number.isdecimal() else number
            with contextlib.suppress(RunError):  # it may be the log itself that cannot be written
                self.audit.note(event, asked=asked, round=round, reason=reason)
            return Error(CRASHED, f"{reason}; the site's log tells more")

    def _content(self, asked: str, back: int) -> RecordDict:
        """The answer, once the site's policy allows it and its audit log has it."""
        msg, context, audit = self.msg, self.context, self.audit
        policy = read_policy(str(context.node_config.get("policy", "")))
        groups, order = ({}, unpack_query(msg.content)) if asked == MessageType.QUERY else unpack_task(msg.content)
        order = replace(order, round=order.round - back)
        config = order.config
        policy.check_order(order)
        method = self._method(config)
        policy.check_names(f"{group}/" for group in (*method.trains, *method.sends))
        here = self.place(policy.narrowed(order), context)
        policy.check_data(here.client)
        if asked == MessageType.QUERY:
            about = replace(here.introduction, classes=policy.shown(here.introduction.classes))
            audit.note("introduced", algorithm=config.algorithm.name, train=about.train, test=about.test)
            return RecordDict({CONFIG: about.to_record()})
        what: What = "train" if asked == MessageType.TRAIN else "evaluate"
        if what == "evaluate":
            groups = {name: groups[name] for name in method.trains}
        number = order.clients[msg.metadata.dst_node_id]
        # As far back as a server that is killed may go; it may not have taken in the last round yet.
        store = ClientStore(state_of(context) / order.key, GENERATIONS * config.server.checkpoint_every + 1)
        keep_memory()

        def compute() -> ClientReply:
            with threads(config.run.threads), _bench(here, config, method, context) as worker:
                if what == "train":
                    _check_noise(config, method, groups, worker)
                reply = attend(worker, replace(here.client, id=number), store, what, groups, order.round)
            policy.check_names(f"{group}/{name}" for group, bag in reply.arrays.items() for name in bag)
            return reply

        if what == "train" and config.privacy.noised_uploads:
            reply, noted = self._counted(groups, order, policy, replace(here.client, id=number), compute)
        else:
            reply, noted = compute(), {}
        sent = {group: tensor_bytes({group: bag}) for group, bag in reply.arrays.items()}
        event = "trained" if what == "train" else "tested"
        audit.note(event, algorithm=config.algorithm.name, key=order.key, round=order.round, bytes=sent, **noted)
        return pack_reply(reply, method.trains)

    def _counted(
        self, groups: Groups, order: Order, policy: Policy, client: Client, compute: Callable[[], ClientReply]
    ) -> tuple[ClientReply, dict[str, Any]]:
        """A noised reply and what the audit log says of it: stored if the request came before, else new and counted."""
        config, state = order.config, state_of(self.context)
        replies, digest = ReplyStore(state / order.key / REPLIES), request_digest(groups, order)
        if (stored := replies.load(client.id, order.round, digest)) is not None:
            return stored, {"repeated": True}
        accountant, steps = upload_accountant(config.privacy, config.local, len(client.train or ()))
        budget = PrivacyBudget(state, str(self.audit.about["site"]))
        budget.check(accountant, steps, policy.privacy)
        reply = compute()
        uploads, epsilon = budget.spend(accountant, steps, policy.privacy)
        replies.save(order.round, digest, reply)
        return reply, {"upload": uploads, **({} if epsilon is None else {"epsilon": epsilon})}

    def _method(self, config: Config) -> Algorithm:
        if self.algorithm is not None:
            return build(self.algorithm, config.algorithm.fields, "algorithm")
        return _algorithm(config, self.context)


@contextlib.contextmanager
def _bench(here: Place, config: Config, method: Algorithm, context: Context) -> Iterator[Workbench]:
    """The networks, those of the message before if nothing has changed; not after an error, which leaves them as is."""
    device = str(pick_device(str(context.node_config.get("device", "auto"))))
    own = str(context.node_config.get("algorithm", "")) if config.algorithm.name.endswith(".py") else ""
    key = json.dumps([config_tables(config), device, file_hash(Path(own)) if own else ""])
    bench = here.benches.pop(key, None)
    here.benches.clear()
    if bench is None:
        bench = workbench(config, method, here.task, device)
        bench.deployed = True
    yield bench
    here.benches[key] = bench


def _check_noise(config: Config, method: Algorithm, groups: Groups, worker: Workbench) -> None:
    """Refuse a run whose noise does not cover all that it uploads: a server need not have checked it."""
    try:
        check_private(config, method, {name: groups.get(name, {}) for name in method.trains})
        if config.privacy.by_steps:
            check_examples(config, method, worker.modules["model"])
    except InputError as error:
        raise InputError(str(error), public="the run's noise does not cover all that it would upload") from error


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
