"""The networks of a finished run, loaded as the run itself tests them."""

from dataclasses import dataclass, replace

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import Config
from fedcir.data.federation import Client
from fedcir.engine.client import BATCHNORM, Workbench, ready_to_test
from fedcir.engine.files import RESTORE
from fedcir.engine.session import workbench
from fedcir.engine.store import ClientStore
from fedcir.models.task import Task
from fedcir.runs.run import Run
from fedcir.types import Groups, InputError, LocalContext


@dataclass(frozen=True)
class Restored:
    """A finished run's networks, and everything that is loaded into them for a client."""

    bench: Workbench
    received: Groups
    """What the server sends for a test."""
    store: ClientStore
    """What the clients of this machine keep."""
    round: int
    """The round whose model the run saved."""

    def load(self, client: Client) -> LocalContext:
        """Load the networks as a client tests them; gives the context of `predict`."""
        kept = self.store.load(client.id, self.round + 1)
        shared = self.received.get("model", {})
        if of_all := {name: shared[name] for name in self.bench.own if name in shared}:  # a frozen encoder's BatchNorm
            kept = {**kept, BATCHNORM: {**of_all, **kept.get(BATCHNORM, {})}}
        return ready_to_test(self.bench, client, self.received, kept, self.round)


def restore(run: Run, config: Config, algorithm: Algorithm, task: Task, device: str = "cpu") -> Restored:
    """The networks of a finished run for a task: on images, or on the features of a frozen encoder."""
    bench = workbench(replace(config, run=replace(config.run, compile=False)), algorithm, task, device)
    folder = run.path / "clients"
    received: Groups = {}
    if algorithm.one_model:
        model, weights = bench.modules["model"], run.weights()
        names = model.state_dict()
        if task.frozen is not None:
            weights = {name: tensor for name, tensor in weights.items() if name in names}
        own = {name: names[name] for name in bench.own if folder.is_dir()}
        run.fitting(model, {**own, **weights})
        received["model"] = weights
    elif not folder.is_dir():
        raise InputError(
            f"each client of {run.path} keeps a model of its own, and none is in this folder: use it where they lie"
        )
    if missing := [name for name in algorithm.trains if name not in received]:
        state = run.state()
        for name in missing:
            if state is None or name not in state.shared:
                raise InputError(f"{run.path}/checkpoint lacks {name}, which the run needs to predict; {RESTORE}")
            received[name] = state.shared[name]
    return Restored(bench, received, ClientStore(folder), run.saved_round)
