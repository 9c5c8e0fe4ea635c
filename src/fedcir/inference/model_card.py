"""The model card, in the layout of the Hugging Face hub."""

import json
from typing import Any

from fedcir.algorithms import find_algorithm, list_algorithms
from fedcir.inference.evaluation import wilson_interval
from fedcir.inference.model import TrainedModel
from fedcir.runs.reader import Run
from fedcir.server.accounting import get_adjacency, upload_epsilon
from fedcir.text import escape_controls, escape_markdown, format_code

UNIT = {"client": "a client with all its training images", "example": "one training image"}
PLACE = {
    "server": "by the server, which saw each client's plain update and must be trusted",
    "client": "by each client, so the server did not have to be trusted",
}
ADJACENT = {
    ("client", "zero-out"): "a client counts as one that did not reply",
    ("client", "replace-one"): "a client has other data",
    ("example", "zero-out"): "one training image of a client counts as nothing",
    ("example", "replace-one"): "one training image of a client is another one",
}

OWN_LAYERS = (
    "the site trained some layers of this model without noise and kept them, so no epsilon covers it: "
    "do not give it to others"
)


def guarantee_of(run: Run) -> dict[str, Any] | None:
    """Return epsilon, delta, unit, place, adjacency and randomness of a run; None if it added no noise."""
    config, saved = run.config, (run.summary or {}).get("privacy")
    if not config.privacy.noise or saved is None:
        return None
    randomness = "system" if "key" in run.manifest else "seed"
    guarantee = {"adjacency": get_adjacency(config.privacy), "randomness": randomness, **saved}
    if "adjacency" not in saved and config.privacy.by_clients:  # where earlier versions counted too little
        largest = upload_epsilon(config.privacy, config.local, 1, len(run.records))
        guarantee["epsilon"] = max(saved["epsilon"], largest)
    return guarantee


def describe_guarantee(guarantee: dict[str, Any], site: str | None = None) -> str:
    """Write the section of a model card on privacy. A site's own layers are trained without noise."""
    if site is not None:
        return f"## Privacy\n\n{OWN_LAYERS[0].upper()}{OWN_LAYERS[1:]}."
    unit, adjacency = guarantee["unit"], guarantee["adjacency"]
    lines = [
        f"Training was differentially private: epsilon {guarantee['epsilon']:.3g} at delta {guarantee['delta']:g}, for "
        f"{UNIT[unit]}. Noise was added {PLACE[guarantee['place']]}.",
        f"Adjacency is `{adjacency}`: epsilon compares two runs that are alike, except that in one of them "
        f"{ADJACENT[unit, adjacency]}.",
        "Epsilon covers what this file tells of the training images. Test and validation images are not covered. So "
        "nothing that was measured on images of clients without noise is part of this export: no accuracies, no "
        "temperature and no numbers of images.",
    ]
    if guarantee["randomness"] == "seed":
        lines.append("The noise came from the seed of an experiment on one machine: it protects nobody.")
    return "## Privacy\n\n" + "\n\n".join(lines)


CARD = "MODEL_CARD.md"


def make_model_card(trained: TrainedModel, file: str, format: str, tested: dict[str, Any], note: str = "") -> str:
    """Write the text of MODEL_CARD.md, without paths, times and versions.

    `tested` holds the scores of the file, and `note` why it predicts in another way than the run, where it does.
    """
    guarantee = guarantee_of(trained.run)
    is_private = guarantee is not None
    parts = [
        _write_front_matter(trained, format, tested, is_private),
        _describe_model(trained),
        _describe_data(trained, is_private),
        _describe_method(trained, is_private),
        *([] if guarantee is None else [describe_guarantee(guarantee, trained.site)]),
        _describe_accuracy(trained, tested, note, is_private),
        *([_describe_calibration(trained, note, is_private)] if trained.task.has_classes else []),
        _describe_limits(trained, tested["scores"], is_private),
        _describe_use(trained, file, format),
    ]
    return "\n\n".join(parts) + "\n"


def _write_front_matter(trained: TrainedModel, format: str, tested: dict[str, Any], is_private: bool) -> str:
    """Write YAML in which every text is JSON, so that no name can be misread."""
    task, metric = _name_hub_task(trained), trained.task.primary.name
    tags = [task, "federated-learning", "fedcir", str(trained.card["algorithm"]["name"]), format]
    lines = [
        "license: unknown  # fill in the licence under which you give the model to others",
        "library_name: fedcir",
        f"pipeline_tag: {task}",
        f"tags: {json.dumps(tags)}",
    ]
    if not is_private:
        name, data = _quote(trained.run.path.resolve().name), _quote(trained.run.config.data.name)
        lines += [f"metrics: [{metric}]", "model-index:", f"- name: {name}", "  results:"]
        for domain, value in {"mean over domains": tested["mean"], **tested["scores"]}.items():
            if value is not None:
                lines += [
                    f"  - task: {{type: {task}}}",
                    f"    dataset: {{name: {data}, type: {data}, split: test}}",
                    f"    metrics: [{{type: {metric}, name: {_quote(domain)}, value: {value:.4f}}}]",
                ]
    return "\n".join(["---", *lines, "---"])


def _name_hub_task(trained: TrainedModel) -> str:
    """Name of the task on the Hugging Face hub, for images, or for tables and arrays."""
    kind, name = "image" if trained.takes_images else "tabular", trained.task.name
    has_classes = trained.task.has_classes or name == "multilabel"
    return (
        "image-segmentation"
        if name == "segmentation"
        else f"{kind}-{'classification' if has_classes else 'regression'}"
    )


def describe_input(trained: TrainedModel) -> str:
    """Describe the shape of a batch."""
    return f"({', '.join(['batch', *map(str, trained.shape)])})"


def describe_output(trained: TrainedModel) -> str:
    """Describe the predictions of a task without classes, with the names of their columns."""
    task = trained.task
    what = {
        "multilabel": "the probability of each label",
        "survival": "the log of the hazard, up to a constant",
        "segmentation": "the probability of each class for each pixel",
    }.get(task.name, "the values of")
    rest = ", height, width" if task.uses_maps else ""
    return f"predictions: float32 (batch, {len(task.predicted_names)}{rest}), {what}: {', '.join(task.predicted_names)}"


def _describe_model(trained: TrainedModel) -> str:
    card, model = trained.card, trained.run.config.model
    task, encoding = trained.task, trained.encoding
    if trained.takes_images:
        kind = "An image classifier" if task.has_classes else "A model of images"
        colours = "RGB" if trained.channels == 3 else f"{trained.channels}-channel"
        takes = (
            f"It takes {colours} images of {trained.size} x {trained.size} pixels. "
            f"Pixels are divided by 255, then normalised with mean {_format_numbers(card['mean'])} and "
            f"standard deviation {_format_numbers(card['std'])}."
        )
    elif encoding is None:
        kind, takes = "A model of arrays", f"It takes floats {describe_input(trained)}."
    else:
        kind, names = "A model of tables", (format_code(column.name) for column in encoding.columns)
        takes = (
            f"It takes rows with the columns {', '.join(names)}, encoded as {len(encoding.features)} features. "
            "The file's metadata hold their encoding: the categories, means and standard deviations of the columns."
        )
    if task.has_classes:
        purpose = f"for {len(trained.classes)} classes: {', '.join(map(format_code, trained.classes))}"
    else:
        purpose = f"for {task.name}: {', '.join(map(format_code, task.names))}"
    site = f" It is the model of the site {format_code(trained.site)}." if trained.site else ""
    method = trained.run.config.algorithm.name
    training = f"Several clients trained it together with fedcir; their {trained.noun} never left them."
    if method in list_algorithms() and find_algorithm(method).pools:
        training = f"It was trained with fedcir on the {trained.noun} of all clients in one place."
    return (
        f"# {escape_markdown(trained.run.path.resolve().name)}\n\n"
        f"{kind} ({format_code(model.name)}) {purpose}.{site} {training}\n\n{takes}"
    )


def _describe_data(trained: TrainedModel, is_private: bool) -> str:
    counts: dict[str, list[int]] = {}
    for client in trained.run.manifest["clients"]:
        images = client.get("train", 0)
        counts.setdefault(client["domain"], []).append(images if isinstance(images, int) else len(images))
    rows = ["| domain | clients that train |", "|---|---:|"]
    if not is_private:
        rows = [
            f"| domain | clients that train | training {trained.noun} | test {trained.noun} |",
            "|---|---:|---:|---:|",
        ]
    tested = trained.run.test_images
    for name, numbers in counts.items():
        row = f"| {escape_markdown(name)} | {sum(number > 0 for number in numbers)} |"
        shown = f" {sum(numbers):,} | {f'{tested[name]:,}' if name in tested else ''} |"
        rows.append(row if is_private else row + shown)
    return f"## Training data\n\nDataset: {format_code(trained.run.config.data.name)}.\n\n" + "\n".join(rows)


def _describe_method(trained: TrainedModel, is_private: bool) -> str:
    config = trained.run.config
    fields = {name: value for name, value in trained.card["algorithm"].items() if name != "name"}
    values = f" ({escape_markdown(', '.join(f'{name} {value}' for name, value in fields.items()))})" if fields else ""
    seed = "" if is_private else f", with seed {config.run.seed}"  # the noise of an experiment is the seed's
    start = "from published weights" if config.model.weights else "from its usual initial weights"
    name, local = escape_markdown(str(trained.card["algorithm"]["name"])), config.local
    return (
        f"## Method\n\n{name}{values}: {config.server.rounds} rounds of {local.work}, batches of "
        f"{local.batch_size}, learning rate {local.lr:g}. Training started {start}{seed}."
    )


def _describe_accuracy(trained: TrainedModel, tested: dict[str, Any], note: str, is_private: bool) -> str:
    if is_private:
        return "## Accuracy\n\nAccuracies are not given: clients count them on their images without noise."
    counts, unseen, metric = trained.run.test_images, tested.get("unseen") or [], trained.task.primary
    has_intervals = trained.task.has_classes
    rows = [f"| domain | test {metric.label} |", "|---|---:|"]
    if has_intervals:
        rows = [f"{rows[0]} 95 % interval (Wilson) |", f"{rows[1]}---|"]
    for name, value in tested["scores"].items():
        mark, interval = " (not trained on)" if name in unseen else "", ""
        if has_intervals and (count := counts.get(name)):
            ends = wilson_interval(round(value * count), count)
            interval = f"{100 * ends.low:.1f} to {100 * ends.high:.1f}"
        row = f"| {escape_markdown(name)}{mark} | {metric.format(value)} |"
        rows.append(f"{row} {interval} |" if has_intervals else row)
    if tested["mean"] is not None:
        row = f"| mean over domains{' trained on' if unseen else ''} | {metric.format(tested['mean'])} |"
        rows.append(f"{row} |" if has_intervals else row)
    parts = ["## Accuracy"]
    if note:
        parts.append(f"Note: {escape_markdown(note)}. The run's own scores do not hold for it.")
    if tested["scores"] and tested.get("measured"):
        parts.append("These accuracies were measured with this file, on the run's test images.")
    if tested["scores"]:
        parts.append("\n".join(rows))
    elif note or trained.site:
        parts.append("Its accuracy was not measured, because the run's data could not be opened.")
    else:
        parts.append("The run was not tested.")
    return "\n\n".join(parts)


def _describe_calibration(trained: TrainedModel, note: str, is_private: bool) -> str:
    if trained.calibrated:
        fitted = trained.calibration
        return (
            f"## Calibration\n\nProbabilities are calibrated by a temperature of {fitted.temperature:.3g}, fitted on "
            f"{fitted.images:,} images that the clients set aside. Only sums over these images left the clients."
        )
    reason = "the run's temperature is that of its own predictions" if note else "the clients set no images aside"
    if is_private:
        reason = "a temperature would be fitted on images of clients without noise"
    return f"## Calibration\n\nProbabilities are not calibrated: {reason}. Treat them as scores, not as frequencies."


def _describe_limits(trained: TrainedModel, scores: dict[str, float | None], is_private: bool) -> str:
    metric, noun = trained.task.primary, trained.noun
    limits = ["It always answers, whatever it is given."]
    if trained.task.has_classes:
        limits = [
            f"It always answers with one of its classes, whatever the {noun.removesuffix('s')} shows. fedcir's own "
            f"predictor also scores the novelty of each {noun.removesuffix('s')}."
        ]
    known = {name: value for name, value in scores.items() if value is not None}
    if len(known) > 1:
        value = metric.find_worst(known.values())
        worst = next(name for name in known if known[name] == value)
        limits.append(
            f"Its weakest domain is {escape_markdown(worst)}, with a test {metric.label} of {metric.format(value)}."
        )
    hold = "" if is_private else f"The scores hold for {noun} like those of the domains above. "
    limits.append(f"{hold}Evaluate it on your own {noun} first: `fedcir evaluate`.")
    if not is_private:
        limits.append("They are those of one training run; another seed gives other numbers.")
    return "## Limits\n\n" + "\n".join(f"- {limit}" for limit in limits)


PICTURE = """picture = Image.open("image.jpg")
picture.draft("{mode}", ({size}, {size}))
picture = picture.convert("{mode}").resize(({size}, {size}), Image.Resampling.BILINEAR, reducing_gap=3.0)
images = np.asarray(picture, np.uint8).reshape(1, {size}, {size}, {channels})"""
RESIZE = "\n\nResize pictures as shown: resized in another way, some get another class."
OTHER_CODE = {
    "onnx": """import numpy as np
import onnxruntime
{imports}
session = onnxruntime.InferenceSession({file})
about = session.get_modelmeta().custom_metadata_map  # input, output, and the encoding of columns
{make}
(predictions,) = session.run(None, {{{source}: {name}}})""",
    "torch": """import numpy as np
import torch
{imports}
about = {{"fedcir.json": ""}}  # input, output, and the encoding of columns
model = torch.export.load({file}, extra_files=about).module()
{make}
predictions = model(torch.tensor({name}))""",
}
"""Code that uses files that take tables or arrays, or predict anything but classes, for `str.format`."""
CODE = {
    "onnx": f"""import json

import numpy as np
import onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession({{file}})
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
{PICTURE}
(probabilities,) = session.run(["probabilities"], {{{{"images": images}}}})
print(classes[probabilities[0].argmax()], probabilities[0].max())""",
    "torch": f"""import json

import numpy as np
import torch
from PIL import Image

about = {{{{"fedcir.json": ""}}}}
model = torch.export.load({{file}}, extra_files=about).module()
classes = json.loads(json.loads(about["fedcir.json"])["classes"])
{PICTURE}
probabilities = model(torch.tensor(images))[0]
print(classes[probabilities.argmax()], float(probabilities.max()))""",
    "safetensors": """from safetensors import safe_open

with safe_open({file}, framework="pt") as model:
    about = model.metadata()["fedcir"]  # JSON: classes, image size, normalisation, network, temperature
    weights = {{name: model.get_tensor(name) for name in model.keys()}}""",
}
"""Code that uses a file of each format, for `str.format`."""


def _describe_use(trained: TrainedModel, file: str, format: str) -> str:
    name, imports, make = "inputs", "", f"inputs = np.zeros({(1, *trained.shape)}, np.float32)"
    values: dict[str, Any] = {}
    if trained.takes_images:
        values = {"size": trained.size, "channels": trained.channels, "mode": "RGB" if trained.channels == 3 else "L"}
        name, imports, make = "images", "from PIL import Image\n", PICTURE.format(**values)
    code = CODE[format]
    if not (trained.takes_images and trained.task.has_classes) and format in OTHER_CODE:
        code = OTHER_CODE[format]
        values |= {"source": _quote(name), "name": name, "imports": imports, "make": make}
    code = code.format(file=_quote(file), **values)
    resize = RESIZE if trained.takes_images and format != "safetensors" else ""
    return f"## How to use it\n\n```python\n{code}\n```{resize}"


def _quote(text: str) -> str:
    return escape_controls(json.dumps(text, ensure_ascii=False))


def _format_numbers(values: list[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
