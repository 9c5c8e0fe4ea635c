"""A loop as one writes it by hand: `python bare.py W1 PROCESSES THREADS`. Prints the seconds of each round as JSON."""

import json
import sys
import time

import torch
from torch import nn
from torch.multiprocessing import get_context
from workload import WORKLOADS, cohort, images, local_steps, network

State = dict[str, torch.Tensor]
model: nn.Module
data: list[tuple[torch.Tensor, torch.Tensor]]


def prepare(name: str, threads: int) -> None:
    global model, data
    torch.set_num_threads(threads)
    work = WORKLOADS[name]
    model, data = network(work), [images(work, client) for client in range(work.clients)]


def train(job: tuple[str, int, int, State]) -> State:
    name, round, client, state = job
    model.load_state_dict(state)
    local_steps(model, WORKLOADS[name], *data[client], seed=1000 * round + client)
    return {key: value.clone() for key, value in model.state_dict().items()}


def mean(states: list[State]) -> State:
    return {
        key: torch.stack([state[key] for state in states]).mean(0) if first.is_floating_point() else first
        for key, first in states[0].items()
    }


def main(name: str, processes: int, threads: int) -> None:
    work = WORKLOADS[name]
    prepare(name, threads)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    pool = get_context("fork").Pool(processes) if processes > 1 else None
    seconds = []
    for round in range(work.rounds):
        started = time.perf_counter()
        jobs = [(name, round, client, state) for client in cohort(work, round)]
        states = list(map(train, jobs)) if pool is None else pool.map(train, jobs, chunksize=1)
        state = mean(states)
        seconds.append(time.perf_counter() - started)
    if pool is not None:
        pool.close()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
