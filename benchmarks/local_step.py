"""What a local step of FedCiR, and one under autocast to bfloat16, costs beside FedAvg's in single precision.

    python benchmarks/local_step.py [--image-size 64] [--steps 30]

resnet18, batch of 32, one thread, steps interleaved. Prints ratios to FedAvg's step, which hold on a noisy machine
where the milliseconds do not.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from fedcir import Algorithm, FedAvg, FedCiR
from fedcir.config import ModelConfig
from fedcir.models.builder import NetworkBuilder, make_image_builder
from fedcir.types import ClientReply, LocalContext, ServerContext

CLASSES = 7
BATCH = 32


def prepared_step(
    algorithm: Algorithm, builder: NetworkBuilder, size: int, precision: torch.dtype = torch.float32
) -> Callable[[], None]:
    """One SGD step as in client.local_update.fit, in a round in which everything that can be received has been."""
    modules = algorithm.build(builder)
    for module in modules.values():
        module.to(memory_format=torch.channels_last)
    server = ServerContext(1, 2, CLASSES, BATCH, "uniform", "average", torch.Generator().manual_seed(0))
    state = algorithm.start(modules, server)
    reply = ClientReply(0, BATCH, {"model": state.shared["model"]}, {})
    state = algorithm.server_step(state, [reply], modules, server)
    ctx = LocalContext(2, 2, CLASSES, BATCH, state.shared, torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(modules["model"].parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)
    x = torch.randn(BATCH, 3, size, size).contiguous(memory_format=torch.channels_last)
    y = torch.randint(CLASSES, (BATCH,))

    def step() -> None:
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            losses = algorithm.local_loss(modules, x, y, ctx)
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    builder = make_image_builder(ModelConfig(name="resnet18"), CLASSES, channels=3, seed=0)
    steps = {type(a).__name__: prepared_step(a, builder, arguments.image_size) for a in (FedAvg(), FedCiR())}
    steps["FedAvg, bfloat16"] = prepared_step(FedAvg(), builder, arguments.image_size, torch.bfloat16)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(arguments.steps + 3):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if turn >= 3:  # the first steps warm up
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {
        name: [other / base for base, other in zip(seconds["FedAvg"], values, strict=True)]
        for name, values in seconds.items()
    }
    print(
        json.dumps(
            {
                "image_size": arguments.image_size,
                "steps": arguments.steps,
                "milliseconds": {name: round(1000 * value, 1) for name, value in medians.items()},
                "ratio_of_medians": {name: round(value / medians["FedAvg"], 4) for name, value in medians.items()},
                "median_of_ratios": {name: round(statistics.median(values), 4) for name, values in ratios.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
