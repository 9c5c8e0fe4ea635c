"""fedcir: `python ours.py W1 WORKERS`. Prints the seconds of each round as JSON."""

import json
import sys

import torch
from torch.utils.data import TensorDataset
from workload import CLASSES, WORKLOADS, encoder, images

import fedcir


def main(name: str, workers: int, algorithm: str = "FedAvg") -> None:
    work = WORKLOADS[name]
    clients = []
    for client in range(work.clients):
        data = TensorDataset(*images(work, client))
        clients.append((data, TensorDataset(*data[:2])))
    seconds: list[float] = []
    fedcir.train(
        clients,
        encoder=encoder(work)[0],
        num_classes=CLASSES,
        algorithm=getattr(fedcir, algorithm)(),
        rounds=work.rounds,
        local_steps=work.steps,
        batch_size=work.batch,
        active=work.active,
        eval_every=work.rounds,
        device="cpu",
        workers=workers,
        layout="channels_last",
        on_round=lambda record: seconds.append(record.seconds["total"]),
    )
    print(json.dumps(seconds))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
