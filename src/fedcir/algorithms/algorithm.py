"""Base class of federated algorithms: hooks whose defaults are FedAvg.

A method is a frozen dataclass of hyper-parameters in one file that overrides some hooks.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedcir.errors import InputError
from fedcir.models.builder import NetworkBuilder
from fedcir.models.optimizers import RoundOptimizer
from fedcir.models.tensors import RunningMean, from_second_moments, snapshot, to_second_moments
from fedcir.types import ClientReply, Groups, LocalContext, Losses, Modules, ServerContext, ServerState, Tensors
from fedcir.validation import check_bounds

Batch = tuple[Tensor, Tensor]
Replies = Iterable[ClientReply]

PERSONAL = "personal"
"""Name in `remembers` of the model with which a client predicts, in place of the global one."""


@dataclass(frozen=True)
class Algorithm:
    """Hyper-parameters and no other state. `local_*` runs on a client, `server_*` on the server."""

    trains: ClassVar[tuple[str, ...]] = ("model",)
    """The modules that clients train, upload, and the server averages."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """The modules that clients train and keep as client state."""
    keeps_batchnorm: ClassVar[bool] = False
    """Whether the model's BatchNorm layers, weights and statistics, stay with each client."""
    keeps_head: ClassVar[bool] = False
    """Whether the model's head stays with each client."""
    pools: ClassVar[Literal["steps", "batch"] | None] = None
    """Where all data are pooled: whether a round takes the steps of all active clients, or joins their batches."""
    one_shot: ClassVar[bool] = False
    """Whether clients take no steps, and upload only what `local_summary` returns; then a run has one round."""
    sends: ClassVar[tuple[str, ...]] = ()
    """The groups that `local_summary` adds to the upload."""
    remembers: ClassVar[tuple[str, ...]] = ()
    """The groups of client state that `local_finish` returns; they are never uploaded."""
    needs_classes: ClassVar[bool] = False
    """Whether the method computes with classes, so that it takes no other task than classification."""
    needs_sgd: ClassVar[bool] = False
    """Whether the method computes with the steps of SGD, so that it takes no other `local.optimizer`."""
    uses_total_rounds: ClassVar[bool] = False
    """Whether the method depends on the total number of rounds, so that a finished run cannot be extended."""
    counts_clients: ClassVar[bool] = False
    """Whether `server_step` reads `ctx.clients`, so that every round depends on the number of clients."""
    counts_steps: ClassVar[bool] = False
    """Whether `server_step` reads `ctx.count_steps` for each reply, which privacy.clip makes alike."""
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings of other sections that suit it, {"local": {"prior": "client"}}; what a user sets wins."""
    ranges: ClassVar[Mapping[str, str]] = {}
    """Values of its fields that `fedcir tune` tries: {"mu": "0.1,0.5,0.9"}, or {"mu": "0.01..1"} for all between."""

    def __post_init__(self) -> None:
        check_bounds(self, "algorithm")

    @property
    def one_model(self) -> bool:
        """Whether there is a global model, instead of one for each client."""
        return "model" in self.trains

    @property
    def uploads(self) -> tuple[str, ...]:
        """The groups of a reply."""
        return self.sends if self.one_shot else tuple(dict.fromkeys((*self.trains, *self.sends)))

    @property
    def overrides_local_update(self) -> bool:
        """Whether a round is more than steps of `local_loss`."""
        return type(self).local_update is not Algorithm.local_update

    def build(self, builder: NetworkBuilder) -> Modules:
        """Build the networks with their initial weights."""
        return {"model": builder.classifier()}

    def start(self, modules: Modules, ctx: ServerContext) -> ServerState:
        """The state before round 1, from the networks as built."""
        return ServerState(round=0, shared={name: snapshot(modules[name]) for name in self.trains})

    def local_start(self, modules: Modules, ctx: LocalContext) -> None:
        """Prepare other networks before the steps of a round, after broadcast and client state are loaded."""

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        """Loss that one SGD step minimises on one batch."""
        loss = ctx.loss(modules["model"](x), y)
        return Losses(loss, {ctx.loss_name: loss})

    def local_update(
        self, modules: Modules, batches: Iterable[Batch], optimizer: RoundOptimizer, ctx: LocalContext
    ) -> dict[str, float]:
        """Train for a round, and return the mean of each loss term over the steps.

        `batches` yields `ctx.steps` augmented batches, and `optimizer` holds the parameters of `trains` and `keeps`.
        """
        sums: Tensors = {}
        steps = 0
        for x, y in batches:
            with ctx.autocast():
                losses = self.local_loss(modules, x, y, ctx)
            optimizer.zero_grad()
            losses.total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            for name, term in {**losses.terms, "total": losses.total}.items():
                sums[name] = sums[name] + term.detach() if name in sums else term.detach()
            steps += 1
        return {name: float(total) / steps for name, total in sums.items()}

    def local_summary(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        """Further groups to upload after training, as `sends` declares.

        `data` goes once over the client's training set in batches; the networks are in evaluation mode. Without any
        data it gives groups of the same names and shapes, which replies are checked against.
        """
        return {}

    def local_finish(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        """Return the client state for the next round, declared by `remembers` and read from `ctx.client_state`.

        `data` and the networks are as for `local_summary`, which has been called before.
        """
        return {}

    def covers_examples(self, clip: float) -> bool:
        """Whether privacy.unit=example covers the method: DP-SGD does, or `local_summary` adds `ctx.noise`."""
        return type(self).local_loss is Algorithm.local_loss and not (self.overrides_local_update or self.sends)

    def check_masks(self) -> None:
        """Raise InputError unless the server needs only the total of what clients send, which are exact sums."""
        raise InputError("server.masked adds up sums, which only fedcirone sends: leave it out")

    def find_reply_fault(self, reply: ClientReply, ctx: ServerContext) -> str | None:
        """Return why the groups that `local_summary` adds cannot be used, so that the reply is dropped."""
        return None

    def server_step(self, state: ServerState, replies: Replies, modules: Modules, ctx: ServerContext) -> ServerState:
        """Compute the next state. Replies come once, in client order; `state.private` is a copy that may be changed."""
        means, _ = self.merge(replies, ctx)
        return replace(state, round=ctx.round, shared={**state.shared, **means})

    def predict(self, modules: Modules, x: Tensor, ctx: LocalContext) -> Tensor:
        """Outputs of the head for a batch, such as logits or log-probabilities, with networks in evaluation mode.

        Of what the server shares, only the groups that `trains` names are received for it.
        """
        outputs: Tensor = modules["model"](x)
        return outputs

    def merge(
        self, replies: Replies, ctx: ServerContext, keep: Callable[[ClientReply], Any] = lambda reply: None
    ) -> tuple[Groups, list[Any]]:
        """Combine what clients train by the run's aggregation rule, and collect what `keep` picks out of each reply.

        The mean is folded as replies come. Where the rule selects one reply, that one stands for all, also in what is
        collected.
        """

        def flatten(groups: Groups) -> Tensors:  # in the form that can be averaged
            trained = [(index, groups.get(group, {})) for index, group in enumerate(self.trains)]
            bag = {f"{index}/{name}": tensor for index, group in trained for name, tensor in group.items()}
            return to_second_moments(bag) if ctx.batchnorm == "pooled" else bag

        aggregator = RunningMean() if ctx.make_aggregator is None else ctx.make_aggregator(flatten(ctx.broadcast))
        collected = []
        for reply in replies:
            aggregator.add(flatten(reply.tensors), ctx.weigh_reply(reply))
            collected.append(keep(reply))
        combined = aggregator.value()
        if aggregator.chosen is not None:
            collected = [collected[aggregator.chosen]] * len(collected)
        merged: Groups = {group: {} for group in self.trains}
        for key, tensor in (from_second_moments(combined) if ctx.batchnorm == "pooled" else combined).items():
            index, _, name = key.partition("/")
            merged[self.trains[int(index)]][name] = tensor
        return merged, collected


def get_head(reply: ClientReply) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the head in a reply."""
    return reply.tensors["model"]["head.weight"], reply.tensors["model"]["head.bias"]
