"""What data cost: preparing and opening a dataset of image files, and the memory that training on it takes.

    python benchmarks/data.py --dataset pacs --data-root DIR

Preparation is measured against a plain Pillow loop over two processes that writes the same pixels to disk, in turn, in
one run. Memory is the peak of a training process on the dataset over the peak of the same training on one random
batch that is never read from anywhere.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = 128
REPEATS = 5


def plain_part(job: tuple[list[str], str]) -> None:
    paths, out = job
    images = []
    for path in paths:
        with Image.open(path) as image:
            images.append(np.asarray(image.convert("RGB").resize((SIZE, SIZE))))
    np.save(out, np.stack(images))


def plain(paths: list[str], folder: str) -> float:
    started = time.perf_counter()
    with Pool(2) as pool:
        pool.map(plain_part, [(paths[part::2], f"{folder}/{part}.npy") for part in range(2)])
    return time.perf_counter() - started


OPEN = """
import json, sys, time
import torch
from fedcir.config import DataConfig
from fedcir.data.opening import open_dataset
started = time.perf_counter()
open_dataset(DataConfig(**json.loads(sys.argv[1])), seed=0)
print(time.perf_counter() - started)
"""

TRAIN = """
import json, resource, sys
import torch
from fedcir.config import config_from
from fedcir.data.federation import Client, Federation
from fedcir.models.builder import make_image_builder
from fedcir.runtime.simulation import open_rounds, open_run
from fedcir.runtime.resolution import resolve_config
from fedcir.algorithms import make_algorithm

class OneBatch:
    def __init__(self, size, image_size):
        self.size = size
        self.x = torch.randn(256, 3, image_size, image_size)
    def __len__(self):
        return self.size
    def batch(self, positions, device, layout):
        count = len(positions)
        return self.x[:count].contiguous(memory_format=layout), torch.arange(count) % 7

tables, kind, sizes = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
config = config_from(tables)
if kind == "dataset":
    with open_run(config) as (session, rounds):
        list(rounds)
else:
    one = OneBatch(1, tables["data"]["image_size"])
    clients = []
    for number, (train, test) in enumerate(sizes):
        parts = []
        for size in (train, test):
            part = OneBatch.__new__(OneBatch)
            part.size, part.x = size, one.x
            parts.append(part)
        clients.append(Client(number, str(number), *parts))
    builder = make_image_builder(config.model, 7, 3, 0)
    federation = Federation("random", tuple(clients), builder, {"classes": []}, {"hash": ""})
    algorithm = make_algorithm(config.algorithm)
    config = resolve_config(config, algorithm, federation)
    with open_rounds(config, algorithm, federation, None, False) as (session, rounds):
        list(rounds)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def script(text: str, cache: str, *arguments: str) -> float:
    environment = {**os.environ, "FEDCIR_CACHE": cache}
    command = [sys.executable, "-c", text, *arguments]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="pacs")
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    data = {"name": given.dataset, "root": given.data_root, "image_size": SIZE}
    paths = sorted(str(path) for path in Path(given.data_root).rglob("*.jpg"))
    ours, theirs, again = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(REPEATS):
            cache = f"{folder}/{repeat}"
            ours.append(script(OPEN, cache, json.dumps(data)))
            again.append(script(OPEN, cache, json.dumps(data)))
            theirs.append(plain(paths, folder))
        first, second, loop = map(statistics.median, (ours, again, theirs))
        print(f"{len(paths)} images at {SIZE}x{SIZE}, medians of {REPEATS}")
        print(f"| first opening | {first:.2f} s |\n| plain Pillow loop, 2 processes | {loop:.2f} s |")
        print(f"| loop / first opening | {loop / first:.2f} |\n| second opening | {1000 * second:.0f} ms |")
        for model in ("resnet18", "cnn"):
            peaks = memory(data, model, given.rounds, cache)
            print(f"| peak memory, {model}, dataset | {peaks['dataset']:.0f} MB |")
            print(f"| peak memory, {model}, one random batch | {peaks['batch']:.0f} MB |")
            print(f"| ratio | {peaks['dataset'] / peaks['batch']:.2f} |")


def memory(data: dict[str, object], model: str, rounds: int, cache: str) -> dict[str, float]:
    tables = {
        "data": data,
        "model": {"name": model},
        "server": {"rounds": rounds},
        "algorithm": {"name": "fedavg"},
        "run": {"device": "cpu"},
    }
    sizes = [[1638, 410], [1875, 469], [1336, 334], [3143, 786]]
    return {kind: script(TRAIN, cache, json.dumps(tables), kind, json.dumps(sizes)) for kind in ("dataset", "batch")}


if __name__ == "__main__":
    main()
