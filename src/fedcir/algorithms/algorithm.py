"""What a federated algorithm is: hooks whose defaults are FedAvg.

A method is a frozen dataclass of hyper-parameters in one file, and overrides what it does differently.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from fedcir.config import check_bounds
from fedcir.models.aggregation import Krum, aggregator
from fedcir.models.task import Task
from fedcir.models.tensors import pooled_variances, second_moments, snapshot
from fedcir.types import Arrays, ClientReply, Groups, LocalContext, Losses, Modules, ServerContext, ServerState

T = TypeVar("T")
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Algorithm:
    """Hyper-parameters and no other state. `local_*` runs on a client, `server_*` on the server."""

    trains: ClassVar[tuple[str, ...]] = ("model",)
    """The modules that clients train, upload, and the server averages."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """The modules that clients train and keep to themselves from round to round."""
    keeps_batchnorm: ClassVar[bool] = False
    """Whether the model's BatchNorm layers, weights and statistics, stay with each client."""
    pools: ClassVar[Literal["steps", "batch"] | None] = None
    """If all data go to one client: whether it takes as many steps as all active ones, or their batches as one."""
    sends: ClassVar[tuple[str, ...]] = ()
    """The groups that `local_summary` adds to the upload."""
    remembers: ClassVar[tuple[str, ...]] = ()
    """The groups that `local_finish` leaves for the client's next round; they are never uploaded."""
    uses_total_rounds: ClassVar[bool] = False
    """Whether the method depends on the total number of rounds, so that a finished run cannot be extended."""
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings of other sections that suit it, {"local": {"prior": "client"}}; what a user sets wins."""
    ranges: ClassVar[Mapping[str, str]] = {}
    """Values of its fields that `fedcir tune` tries: {"mu": "0.1,0.5,0.9"}, or {"mu": "0.01..1"} for all between."""

    def __post_init__(self) -> None:
        check_bounds(self, "algorithm")

    @property
    def one_model(self) -> bool:
        """Whether there is one model for all, and not one for each client."""
        return "model" in self.trains

    def build(self, task: Task) -> Modules:
        """The networks, with their first weights."""
        return {"model": task.classifier()}

    def start(self, modules: Modules, ctx: ServerContext) -> ServerState:
        """The state before round 1, from the networks as built."""
        return ServerState(round=0, shared={name: snapshot(modules[name]) for name in self.trains})

    def local_start(self, modules: Modules, ctx: LocalContext) -> None:
        """Before the steps of a round, with what was received and kept loaded: make other networks ready for them."""

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        """What one SGD step minimises on one batch."""
        loss = ctx.cross_entropy(modules["model"](x), y)
        return Losses(loss, {"ce": loss})

    def local_summary(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        """Further groups to upload after training, as `sends` declares.

        `data` goes once over the client's training set in batches; the networks are in evaluation mode. Without any
        data it gives groups of the same names and shapes, which replies are checked against.
        """
        return {}

    def local_finish(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        """What the client keeps for its next round, which finds it in `ctx.kept`, as `remembers` declares.

        `data` and the networks are as for `local_summary`, which has been asked before.
        """
        return {}

    def server_step(
        self, state: ServerState, replies: Iterable[ClientReply], modules: Modules, ctx: ServerContext
    ) -> ServerState:
        """The next state. Replies come once, in client order; `state.private` is a copy that may be written to."""
        means, _ = self.merge(replies, ctx, keep=lambda reply: None)
        return replace(state, round=ctx.round, shared={**state.shared, **means})

    def predict(self, modules: Modules, x: Tensor, ctx: LocalContext) -> Tensor:
        """Logits (or log-probabilities) of a batch, with the networks in evaluation mode.

        Of what the server shares, only the groups that `trains` names are received for it.
        """
        logits: Tensor = modules["model"](x)
        return logits

    def merge(
        self, replies: Iterable[ClientReply], ctx: ServerContext, keep: Callable[[ClientReply], T]
    ) -> tuple[Groups, list[T]]:
        """What clients train as one, the mean or as server.aggregation says, and what `keep` picks out of each reply.

        The mean is folded as replies come. The reply that Krum chooses stands for all, also in what is kept.
        """
        total = aggregator(ctx, self._averaged(ctx.sent, ctx))
        kept = []
        for reply in replies:
            weight = float(reply.num_examples) if ctx.weighting == "samples" else 1.0
            total.add(self._averaged(reply.arrays, ctx), weight)
            kept.append(keep(reply))
        one = total.value()
        if isinstance(total, Krum):
            kept = [kept[total.chosen]] * len(kept)
        merged: Groups = {group: {} for group in self.trains}
        for key, tensor in (pooled_variances(one) if ctx.batchnorm == "pooled" else one).items():
            place, _, name = key.partition("/")
            merged[self.trains[int(place)]][name] = tensor
        return merged, kept

    def _averaged(self, groups: Groups, ctx: ServerContext) -> Arrays:
        """The groups that clients train as one bag, in the form that can be averaged."""
        bag = {
            f"{place}/{name}": tensor
            for place, group in enumerate(self.trains)
            for name, tensor in groups.get(group, {}).items()
        }
        return second_moments(bag) if ctx.batchnorm == "pooled" else bag
