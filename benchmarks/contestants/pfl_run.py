"""pfl-research: `torchrun --nproc-per-node 2 pfl_run.py W1`. Prints the seconds of each round as JSON."""

import json
import os
import sys
import time

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn
from workload import LR, MOMENTUM, WEIGHT_DECAY, WORKLOADS, batches, images, network, normalised


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.train()
        return nn.functional.cross_entropy(self(normalised(x)), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        return {}


class Clock(TrainingProcessCallback):
    def __init__(self, rounds: int) -> None:
        self.rounds, self.seconds, self.last = rounds, [], time.perf_counter()

    def on_train_begin(self, *, model: object) -> Metrics:
        self.last = time.perf_counter()
        return Metrics()

    def after_central_iteration(self, *args: object, central_iteration: int, **more: object) -> tuple[bool, Metrics]:
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now
        return False, Metrics()


def main(name: str) -> None:
    work = WORKLOADS[name]
    torch.set_num_threads(1)
    data = [images(work, client) for client in range(work.clients)]

    def user(number: int) -> PyTorchTensorDataset:
        rows = torch.cat(batches(work, seed=number))  # so many samples that one pass is so many steps
        x, y = data[number]
        return PyTorchTensorDataset((x[rows], y[rows]), user_id=str(number))

    federated = FederatedDataset(user, get_user_sampler("minimize_reuse", list(range(work.clients))))
    net = Net(network(work))
    model = PyTorchModel(
        net,
        lambda parameters, lr: torch.optim.SGD(
            parameters, lr=lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, foreach=True
        ),
        torch.optim.SGD(net.parameters(), lr=1.0),
    )
    clock = Clock(work.rounds)
    FederatedAveraging().run(
        NNAlgorithmParams(work.rounds, evaluation_frequency=10**6, train_cohort_size=work.active, val_cohort_size=0),
        SimulatedBackend(federated, federated),
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=work.batch, local_max_grad_norm=None
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(clock.seconds[: work.rounds]), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # its process group aborts now and then when Python ends


if __name__ == "__main__":
    main(sys.argv[1])
