"""BatchNorm as declared: running statistics are averaged with the weights, counters take the maximum."""

import torch

from fedcir.config import AlgorithmConfig, Config, LocalConfig, ModelConfig, PartitionConfig, ServerConfig
from fedcir.simulate import open_run


def final_accuracy(config: Config) -> float:
    with open_run(config) as (_, rounds):
        *_, last = rounds
    assert last.accuracy_mean is not None
    return last.accuracy_mean


def config(scheme: str, norm: str = "batch") -> Config:
    return Config(
        partition=PartitionConfig(scheme=scheme),
        model=ModelConfig(width=8, norm=norm),
        local=LocalConfig(steps=10, lr=0.05),
        server=ServerConfig(rounds=6, eval_every=6),
        algorithm=AlgorithmConfig("fedavg"),
    )


def test_iid_clients_converge_with_averaged_statistics() -> None:
    assert final_accuracy(config("iid")) > 0.75


def test_the_same_clients_learn_less_when_each_holds_one_domain() -> None:
    assert final_accuracy(config("domain")) < final_accuracy(config("iid"))


def test_running_statistics_are_the_mean_over_clients() -> None:
    with open_run(config("domain")) as (session, rounds):
        replies = []
        server_step = session.algorithm.server_step

        class Spy(type(session.algorithm)):
            def server_step(self, state, given, modules, ctx):  # type: ignore[no-untyped-def]
                replies.extend(given)
                return server_step(state, replies, modules, ctx)

        session.algorithm = Spy()
        next(rounds)
        names = [n for n in session.state.shared["model"] if n.endswith(("running_mean", "running_var"))]
        assert names
        for name in names:
            want = torch.stack([reply.arrays["model"][name].double() for reply in replies]).mean(0).float()
            assert torch.equal(session.state.shared["model"][name], want)
