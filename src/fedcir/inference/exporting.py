"""A run's model as one file for other programs. Before it is written, it is checked against the run."""

import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch.export import Dim, ExportedProgram

from fedcir.algorithms.algorithm import Algorithm
from fedcir.client.calibration import Calibration
from fedcir.data.domains import Domains, Split
from fedcir.data.encoding import encode_domains
from fedcir.errors import InputError, RunError, suggest_name
from fedcir.files import check_output_file, write_file
from fedcir.inference.model import AlgorithmChoice, ExportedModule, TrainedModel, open_model
from fedcir.inference.model_card import (
    CARD,
    OWN_LAYERS,
    describe_input,
    describe_output,
    guarantee_of,
    make_model_card,
)
from fedcir.rng import numpy_rng
from fedcir.runs.evaluation_data import open_run_data
from fedcir.runs.reader import RunSource
from fedcir.tensor_files import copy_shared_tensors

Format = Literal["onnx", "torch", "safetensors"]
ENDINGS: dict[str, Format] = {".onnx": "onnx", ".pt2": "torch", ".safetensors": "safetensors"}
Inputs = NDArray[Any]
"""Images, uint8 (B, H, W, C), or floats (B, ...), such as encoded rows of a table."""
Predict = Callable[[Inputs], NDArray[np.float32]]

TOLERANCE = 1e-4
"""Largest difference of probabilities; of other numbers relative to the largest one, if that is above 1."""
BATCHES = (1, 7)
CHECKED = 70
"""Largest number of images that an export is checked on."""


@dataclass(frozen=True)
class Exported:
    """Exported file and the result of its check."""

    path: Path
    card: Path
    new_card: bool
    """Whether the card is new; one that is there already is kept."""
    difference: float
    """Largest difference between a prediction of the file and of the run, relative to the largest one above 1."""
    images: int
    """Number of examples that it was checked on."""
    real: bool
    """Whether they are of the run's data, and not random."""
    note: str = ""
    """Reason why the file predicts in another way than the run; empty if it does not."""


def export(
    run: RunSource,
    out: str | Path,
    *,
    format: Format | None = None,
    site: str | None = None,
    algorithm: AlgorithmChoice | None = None,
    data_root: str | Path | None = None,
    trust_code: bool = False,
) -> Exported:
    """Write the model of a finished run to a file, and a MODEL_CARD.md beside it.

    `onnx` and `torch` (a torch.export program, .pt2) take uint8 RGB (batch, height, width, 3) and give probabilities.
    Those of tables and arrays take floats, and those of other tasks give their predictions; the metadata describe both.
    `safetensors` holds the weights. If `format` is not given, the ending of the file says which. `data_root` holds the
    run's data now, if they were moved. `trust_code` lets code of the run's own run.
    """
    path = Path(out)
    if format is not None and format not in get_args(Format):
        raise InputError(f"there is no format {format!r}; {suggest_name(str(format), get_args(Format))}")
    check_output_file(path)
    ending = ENDINGS.get(path.suffix.lower())
    if format is not None and ending not in (None, format):
        names = f"the name of a file of format {ending}, and the format asked for is {format}"
        raise InputError(f"{path} is {names}: change one")
    if (format := format or ending) is None:
        raise InputError(f"{path} does not say which format to write: name it {path.stem}.onnx, .pt2 or .safetensors")
    missing = [package for package in ("onnx", "onnxscript", "onnxruntime") if not find_spec(package)]
    if format == "onnx" and missing:
        raise InputError(f"format onnx needs {missing[0]}: pip install 'fedcir[onnx]'")
    trained = open_model(run, site=site, algorithm=algorithm, device="cpu", trust_code=trust_code)
    images, domains = _select_check_images(trained, data_root)
    file = _make_file(trained, format, images)
    write_file(path, file.data)
    card = path.parent / CARD
    new = not card.exists()
    if new:
        write_file(card, make_model_card(file.trained, path.name, format, _list_scores(file, domains), file.note))
    return Exported(path, card, new, file.difference, len(images), domains is not None, file.note)


@dataclass(frozen=True)
class _File:
    """Content of an exported file, and a function that predicts with it."""

    data: bytes
    predict: Predict
    trained: TrainedModel
    difference: float
    note: str = ""


def _make_file(trained: TrainedModel, format: Format, images: Inputs) -> _File:
    """Make a file that predicts as the run does, or else as its plain network does."""

    def make(model: TrainedModel, note: str = "") -> _File:
        write = {"onnx": _write_onnx, "torch": _write_torch, "safetensors": _write_safetensors}[format]
        data, predict = write(model)
        return _File(data, predict, model, _compare_predictions(model, predict, images), note)

    plain = replace(trained, algorithm=Algorithm())  # the answer is what the network gives
    if measure_difference(plain.predict(images)[0].numpy(), trained.predict(images)[0].numpy()) <= TOLERANCE:
        return make(plain)
    if format != "safetensors":  # which holds a network and no rule
        with suppress(Exception):  # a method's own code need not be one that torch can export
            return make(trained)
    name = trained.card["algorithm"]["name"]
    note = f"{name} predicts in a way of its own, which a file of format {format} does not carry: it holds the network"
    return make(replace(plain, calibration=Calibration()), note)


def _list_scores(file: _File, domains: Domains | None) -> dict[str, Any]:
    """List a file's scores by the primary metric: the run's if both predict alike, else measured on its test images."""
    run, site = file.trained.run, file.trained.site
    if run.config.privacy.noise:  # scores have no noise
        return {"scores": {}, "mean": None}
    name = run.task.primary.name_in_files
    saved = run.saved_scores
    scores, unseen = saved[name("scores")], saved.get("unseen") or []
    if not file.note and site is None:
        return {"scores": scores, "mean": saved[name("score_mean")], "unseen": unseen}
    if domains is None or not run.task.has_classes:
        return {"scores": {d: value for d, value in scores.items() if d == site and not file.note}, "mean": None}
    accuracy = {domain.name: _measure_accuracy(file.predict, domain.test) for domain in domains}
    seen = [value for name, value in accuracy.items() if name not in unseen]
    mean = float(np.mean(seen)) if seen else None
    return {"scores": accuracy, "mean": mean, "unseen": unseen, "measured": True}


def _measure_accuracy(predict: Predict, images: Split) -> float:
    parts = np.split(np.arange(len(images)), range(CHECKED, len(images), CHECKED))
    predicted = [predict(np.ascontiguousarray(images.pixels(rows))).argmax(-1) for rows in parts]
    return float((np.concatenate(predicted) == images.labels).mean())


def make_metadata(trained: TrainedModel) -> dict[str, str]:
    """Return metadata for programs that use the file."""
    card, encoding = trained.card, trained.encoding
    about = {"algorithm": str(card["algorithm"]["name"]), **_describe_privacy(trained)}
    if trained.task.has_classes:
        about |= {
            "classes": json.dumps(card["classes"], ensure_ascii=False),
            "temperature": repr(trained.calibration.temperature),
            "calibrated_on": str(trained.calibration.images),
            "output": "probabilities: float32 (batch, classes)",
        }
    else:
        about |= {"task": json.dumps(card["task"], ensure_ascii=False), "output": describe_output(trained)}
    if trained.takes_images:
        text = "images: uint8 (batch, height, width, channels), RGB, resized to image_size; normalised inside"
        about |= {name: json.dumps(card[name]) for name in ("image_size", "channels", "mean", "std")}
    elif encoding is None:
        text = f"inputs: float32 {describe_input(trained)}"
    else:
        text = f"inputs: float32 {describe_input(trained)}, the columns in `features`, encoded as `table` says"
        about |= {"features": json.dumps(encoding.features, ensure_ascii=False)}
        about |= {"table": json.dumps(card["table"], ensure_ascii=False)}
    return {**about, "input": text}


def _describe_privacy(trained: TrainedModel) -> dict[str, str]:
    """Metadata entry on differential privacy, as JSON; empty if the run added no noise."""
    if (guarantee := guarantee_of(trained.run)) is None:
        return {}
    return {"privacy": json.dumps(guarantee if trained.site is None else {"epsilon": None, "reason": OWN_LAYERS})}


def _write_onnx(trained: TrainedModel) -> tuple[bytes, Predict]:
    import onnxruntime

    source = "images" if trained.takes_images else "inputs"
    target = "probabilities" if trained.task.has_classes else "predictions"
    with _silence_exporter():
        program: Any = torch.onnx.export(
            _trace_program(trained), input_names=[source], output_names=[target], verbose=False
        )
    proto = program.model_proto
    for name, value in make_metadata(trained).items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = name, value
    data: bytes = proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, lambda inputs: session.run([target], {source: inputs})[0]


def _write_torch(trained: TrainedModel) -> tuple[bytes, Predict]:
    file = io.BytesIO()
    with _silence_exporter():
        torch.export.save(
            _trace_program(trained), file, extra_files={"fedcir.json": json.dumps(make_metadata(trained))}
        )
        module = torch.export.load(io.BytesIO(file.getvalue())).module()

    def predict(images: Inputs) -> NDArray[np.float32]:
        with torch.inference_mode():
            return module(torch.from_numpy(images)).numpy()  # type: ignore[no-any-return]

    return file.getvalue(), predict


def _write_safetensors(trained: TrainedModel) -> tuple[bytes, Predict]:
    arrays = {name: tensor.cpu() for name, tensor in trained.network.state_dict().items()}
    metadata = {**trained.card, "temperature": trained.calibration.temperature}
    metadata |= {name: json.loads(value) for name, value in _describe_privacy(trained).items()}
    data = save(copy_shared_tensors(arrays), {"fedcir": json.dumps(metadata, sort_keys=True, ensure_ascii=False)})
    network = copy.deepcopy(trained.network)
    network.load_state_dict(load(data))
    reloaded = trained.with_network(network)
    return data, lambda images: reloaded.predict(images)[0].float().numpy()


def _trace_program(trained: TrainedModel) -> ExportedProgram:
    example = torch.zeros(2, *trained.shape, dtype=torch.uint8 if trained.takes_images else torch.float32)
    return torch.export.export(ExportedModule(trained).eval(), (example,), dynamic_shapes=({0: Dim("batch")},))


@contextmanager
def _silence_exporter() -> Iterator[None]:
    """Suppress the messages of torch's exporter about optional packages and its own internals."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _select_check_images(trained: TrainedModel, data_root: str | Path | None) -> tuple[Inputs, Domains | None]:
    """Select test examples of each domain, and open the data; random ones if the data cannot be opened."""
    try:
        _, domains, _ = open_run_data(trained.run, None if data_root is None else str(data_root))
    except (InputError, OSError):
        if data_root is not None:
            raise
        shape, rng = (CHECKED, *trained.shape), numpy_rng(0, "export")
        if not trained.takes_images:
            return rng.standard_normal(shape, dtype=np.float32), None
        return rng.integers(0, 256, shape, dtype=np.uint8), None
    if trained.encoding is not None:
        domains = encode_domains(domains, trained.encoding)
    samples = []
    for split in (domain.test for domain in domains):
        count = min(-(-CHECKED // len(domains)), len(split))
        samples.append(split.pixels(np.linspace(0, len(split) - 1, count).astype(np.int64)))
    return np.concatenate(samples)[:CHECKED], domains


def measure_difference(predicted: NDArray[Any], expected: NDArray[Any]) -> float:
    """Measure the largest difference of predictions, relative to the largest expected one if that is above 1."""
    return float(np.abs(predicted - expected).max()) / max(1.0, float(np.abs(expected).max()))


def _compare_predictions(trained: TrainedModel, predict: Predict, images: Inputs) -> float:
    expected = trained.predict(images)[0].numpy()
    largest = 0.0
    for size in BATCHES:
        rows = range(0, len(images), size) if size > 1 else range(min(7, len(images)))
        for start in rows:
            batch = np.ascontiguousarray(images[start : start + size])
            largest = max(largest, measure_difference(predict(batch), expected[start : start + size]))
    if not largest <= TOLERANCE:
        raise RunError(
            f"nothing was written: the exported model's predictions differ from the run's by up to {largest:.2g}, "
            f"more than {TOLERANCE:g}; please report it"
        )
    return largest
