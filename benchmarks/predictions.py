"""Predictions a second on the same image files: fedcir's Predictor, the exported ONNX file, and a bare torch loop.

    python benchmarks/predictions.py RUN FOLDER [--images 500] [--repeats 3]

RUN is a finished run and FOLDER holds images, which all three read from their files. They take turns, and each one's
number is the median over its turns. On a busy machine, processor time tells more than the clock. Reading and decoding
counts: for small networks it is most of the work.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from PIL import Image

from fedcir import Predictor, export, load_run
from fedcir.inference.predictor import files_in
from fedcir.reporting.page import to_markdown

BATCH = 64
Contestant = Callable[[Sequence[str]], list[int]]


def batches(paths: Sequence[str], size: int) -> Iterator[np.ndarray]:
    """Squares of bytes as a plain loop would read them."""
    for start in range(0, len(paths), BATCH):
        yield np.stack([_square(path, size) for path in paths[start : start + BATCH]])


def _square(path: str, size: int) -> np.ndarray:
    """As the model card says: read in another way, some images get another class."""
    picture = Image.open(path)
    picture.draft("RGB", (size, size))
    return np.asarray(picture.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0))


def with_predictor(run: Path) -> Contestant:
    predictor = Predictor(run, device="cpu", batch_size=BATCH, top=1)
    numbers = {name: number for number, name in enumerate(predictor.classes)}
    return lambda paths: [numbers[answer.label] for _, answer in predictor.files(paths) if not isinstance(answer, str)]


def with_onnx(run: Path, size: int, folder: Path) -> Contestant:
    file = export(run, folder / "model.onnx").path
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def predict(paths: Sequence[str]) -> list[int]:
        answers = [session.run(None, {"images": images})[0] for images in batches(paths, size)]
        return [int(each) for each in np.concatenate(answers).argmax(axis=1)]

    return predict


def with_torch(run: Path, size: int) -> Contestant:
    model, card = load_run(run).model(), load_run(run).card
    mean, std = (torch.tensor(card[name]).view(1, -1, 1, 1) for name in ("mean", "std"))

    @torch.inference_mode()
    def predict(paths: Sequence[str]) -> list[int]:
        answers = []
        for images in batches(paths, size):
            x = (torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - mean) / std
            answers.append(model(x).softmax(-1))
        return [int(each) for each in torch.cat(answers).argmax(-1)]

    return predict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    found = files_in([given.folder])
    paths = found[:: max(1, len(found) // given.images)][: given.images]
    size = int(load_run(given.run).card["image_size"])
    with tempfile.TemporaryDirectory() as folder:
        contestants = {
            "`Predictor`, as `fedcir predict`": with_predictor(given.run),
            "exported ONNX, onnxruntime": with_onnx(given.run, size, Path(folder)),
            "bare torch loop": with_torch(given.run, size),
        }
    answers = {name: each(paths) for name, each in contestants.items()}  # also warms them up
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    busy: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(given.repeats):
        for name, each in contestants.items():
            started, spent = time.perf_counter(), time.process_time()
            each(paths)
            seconds[name].append(time.perf_counter() - started)
            busy[name].append(time.process_time() - spent)
    first = next(iter(answers.values()))
    rows = [["what predicts", "images a second", "images a second of processor time", "same class"]]
    for name in contestants:
        alike = np.mean([one == other for one, other in zip(answers[name], first, strict=True)])
        rates = [f"{len(paths) / statistics.median(times):,.0f}" for times in (seconds[name], busy[name])]
        rows.append([name, *rates, f"{alike:.1%}"])
    print(f"{len(paths)} images, {size} pixels, {torch.get_num_threads()} torch threads\n")
    print(to_markdown(rows), end="")


if __name__ == "__main__":
    main()
