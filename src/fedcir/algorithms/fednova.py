"""FedNova: updates are divided by how far their client's steps can go, before they are averaged.

Clients that take more steps than others (`local.epochs`) pull FedAvg's mean towards their own optimum. FedNova averages
the updates of one step, and goes the mean number of steps along that average: equation 8 of the paper with
a_i = (1 - rho^k) / (1 - rho) for the k-th last step of SGD with momentum rho, and tau_eff = sum_i p_i ||a_i||_1, as in
the authors' code. The server computes ||a_i||_1 itself, and nothing more is uploaded.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor. Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization. NeurIPS 2020. https://arxiv.org/abs/2007.07481
"""

from dataclasses import dataclass, replace
from itertools import chain

from fedcir.algorithms.algorithm import Algorithm, Replies
from fedcir.algorithms.scaffold import count_plain_steps
from fedcir.models.tensors import trained_parameters
from fedcir.types import ClientReply, Modules, ServerContext, ServerState


@dataclass(frozen=True)
class FedNova(Algorithm):
    """Wang et al., NeurIPS 2020. https://arxiv.org/abs/2007.07481"""

    needs_sgd = True
    counts_steps = True

    def server_step(self, state: ServerState, replies: Replies, modules: Modules, ctx: ServerContext) -> ServerState:
        stream, start = iter(replies), state.shared["model"]
        trained = [name for name in trained_parameters(modules["model"]) if name in start]

        def norm(reply: ClientReply) -> float:  # ||a_i||_1
            return count_plain_steps(ctx.count_steps(reply.num_examples), ctx.momentum)

        first = next(stream)
        unit = norm(first)  # instead of 1, so that equal numbers of steps change no bit

        def normalise(reply: ClientReply) -> ClientReply:
            if norm(reply) == unit:
                return reply
            model, scale = dict(reply.tensors["model"]), unit / norm(reply)
            model |= {name: start[name] + scale * (model[name] - start[name]) for name in trained}
            return replace(reply, tensors={**reply.tensors, "model": model})

        def weigh(reply: ClientReply) -> tuple[float, float]:
            return ctx.weigh_reply(reply), norm(reply) / unit

        means, weighed = self.merge(map(normalise, chain([first], stream)), ctx, weigh)
        tau = sum(weight * steps for weight, steps in weighed) / sum(weight for weight, _ in weighed)  # in units
        if tau != 1:
            for name in trained:
                means["model"][name] = start[name] + tau * (means["model"][name] - start[name])
        return replace(state, round=ctx.round, shared={**state.shared, **means})
