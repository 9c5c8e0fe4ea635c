"""The model card: what a stranger must know of a model, in the layout of the Hugging Face hub."""

import json
from typing import Any

from fedcir.algorithms import algorithm_class, names
from fedcir.analysis.metrics import wilson_interval
from fedcir.config.display import escape_controls, escape_markdown, markdown_code
from fedcir.use.guarantee import describe_guarantee, guarantee_of
from fedcir.use.trained import Trained

CARD = "MODEL_CARD.md"


def model_card(trained: Trained, file: str, format: str, tested: dict[str, Any], note: str = "") -> str:
    """The text of MODEL_CARD.md. It names no path, no time and no version.

    `tested` holds the accuracies of the file, and `note` why it predicts in another way than the run, where it does.
    """
    front = "\n".join(_front(trained, format, tested))
    parts = [_model(trained), _data(trained), _method(trained)]
    if (guarantee := guarantee_of(trained.run)) is not None:
        parts.append(describe_guarantee(guarantee, trained.site))
    parts += [_accuracy(trained, tested, note), _calibration(trained, note), _limits(trained, tested)]
    return "\n\n".join([f"---\n{front}\n---", *parts, _use(trained, file, format)]) + "\n"


def _front(trained: Trained, format: str, tested: dict[str, Any]) -> list[str]:
    """YAML, in which every text is written as JSON, so that no name can be misread."""
    config = trained.run.config
    tags = ["image-classification", "federated-learning", "fedcir", str(trained.card["algorithm"]["name"]), format]
    lines = [
        "license: unknown  # fill in the licence under which you give the model to others",
        "library_name: fedcir",
        "pipeline_tag: image-classification",
        f"tags: {json.dumps(tags)}",
    ]
    if _is_private(trained):
        return lines
    lines += [
        "metrics: [accuracy]",
        "model-index:",
        f"- name: {_quoted(trained.run.path.resolve().name)}",
        "  results:",
    ]
    shown = {"mean over domains": tested["accuracy_mean"], **tested["accuracy"]}
    for name, value in shown.items():
        if value is not None:
            lines += [
                "  - task: {type: image-classification}",
                f"    dataset: {{name: {_quoted(config.data.name)}, type: {_quoted(config.data.name)}, split: test}}",
                f"    metrics: [{{type: accuracy, name: {_quoted(name)}, value: {value:.4f}}}]",
            ]
    return lines


def _model(trained: Trained) -> str:
    card, model = trained.card, trained.run.config.model
    colours = "RGB" if trained.channels == 3 else f"{trained.channels}-channel"
    own = f" It is the model of the site {markdown_code(trained.site)}." if trained.site else ""
    return (
        f"# {escape_markdown(trained.run.path.resolve().name)}\n\n"
        f"An image classifier ({markdown_code(model.name)}) for {len(trained.classes)} classes: "
        f"{', '.join(map(markdown_code, trained.classes))}.{own} {_together(trained)}\n\n"
        f"It takes {colours} images of {trained.size} x {trained.size} pixels. "
        f"Pixels are divided by 255, then normalised with mean {_numbers(card['mean'])} and standard deviation "
        f"{_numbers(card['std'])}."
    )


def _together(trained: Trained) -> str:
    name = trained.run.config.algorithm.name
    if name in names() and algorithm_class(name).pools:
        return "It was trained with fedcir on the images of all clients in one place."
    return "Several clients trained it together with fedcir; their images never left them."


def _data(trained: Trained) -> str:
    run = trained.run
    counts: dict[str, list[int]] = {}
    for client in run.manifest["clients"]:
        held = client.get("train", 0)
        counts.setdefault(client["domain"], []).append(held if isinstance(held, int) else len(held))
    if _is_private(trained):
        rows = [f"| {_cell(name)} | {sum(1 for each in held if each)} |" for name, held in counts.items()]
        head = "| domain | clients that train |\n|---|---:|"
    else:
        tested = _test_images(trained)
        rows = [
            f"| {_cell(name)} | {sum(1 for each in held if each)} | {sum(held):,} | {_count(tested.get(name))} |"
            for name, held in counts.items()
        ]
        head = "| domain | clients that train | training images | test images |\n|---|---:|---:|---:|"
    return f"## Training data\n\nDataset: {markdown_code(run.config.data.name)}.\n\n{head}\n" + "\n".join(rows)


def _method(trained: Trained) -> str:
    config = trained.run.config
    fields = {name: value for name, value in trained.card["algorithm"].items() if name != "name"}
    given = f" ({escape_markdown(', '.join(f'{name} {value}' for name, value in fields.items()))})" if fields else ""
    seed = "" if _is_private(trained) else f", with seed {config.run.seed}"  # the noise of an experiment is the seed's
    start = "from published weights" if config.model.weights else "from its usual initial weights"
    return (
        f"## Method\n\n{_cell(str(trained.card['algorithm']['name']))}{given}: {config.server.rounds} rounds of "
        f"{config.local.steps} local steps, batches of {config.local.batch_size}, learning rate {config.local.lr:g}. "
        f"Training started {start}{seed}."
    )


def _accuracy(trained: Trained, tested: dict[str, Any], note: str) -> str:
    if _is_private(trained):
        return "## Accuracy\n\nAccuracies are not given: clients count them on their images without noise."
    counts, unseen = _test_images(trained), tested.get("unseen") or []
    rows = []
    for name, value in tested["accuracy"].items():
        mark = " (not trained on)" if name in unseen else ""
        interval = ""
        if count := counts.get(name):
            ends = wilson_interval(round(value * count), count)
            interval = f"{100 * ends.low:.1f} to {100 * ends.high:.1f}"
        rows.append(f"| {_cell(name)}{mark} | {100 * value:.1f} | {interval} |")
    if tested["accuracy_mean"] is not None:
        rows.append(f"| mean over domains{' trained on' if unseen else ''} | {100 * tested['accuracy_mean']:.1f} | |")
    table = "| domain | test accuracy (%) | 95 % interval (Wilson) |\n|---|---:|---|\n" + "\n".join(rows)
    how = [f"Note: {escape_markdown(note)}. The run's own accuracies do not hold for it."] if note else []
    if tested["accuracy"]:
        measured = "These accuracies were measured with this file, on the run's test images."
        return "\n\n".join(["## Accuracy", *how, *([measured] if tested.get("measured") else []), table])
    if note or trained.site:
        how.append("Its accuracy was not measured, because the run's data could not be opened.")
    return "\n\n".join(["## Accuracy", *(how or ["The run was not tested."])])


def _calibration(trained: Trained, note: str) -> str:
    known = trained.calibration
    if not trained.calibrated:
        reason = "the run's temperature is that of its own predictions" if note else "the clients set no images aside"
        if _is_private(trained):
            reason = "a temperature would be fitted on images of clients without noise"
        return (
            f"## Calibration\n\nProbabilities are not calibrated: {reason}. Treat them as scores, not as frequencies."
        )
    return (
        f"## Calibration\n\nProbabilities are calibrated by a temperature of {known.temperature:.3g}, fitted on "
        f"{known.images:,} images that the clients set aside. Only sums over these images left the clients."
    )


def _limits(trained: Trained, tested: dict[str, Any]) -> str:
    said = [
        "It always answers with one of its classes, whatever the image shows. fedcir's own predictor also tells how "
        "unlike anything seen an image is.",
        "The accuracies hold for images like those of the domains above. Evaluate it on your own images first: "
        "`fedcir evaluate`.",
        "They are those of one training run; another seed gives other numbers.",
    ]
    if _is_private(trained):
        said[1:] = ["Evaluate it on your own images first: `fedcir evaluate`."]
    if len(accuracy := tested["accuracy"]) > 1:
        worst = min(accuracy, key=lambda name: accuracy[name])
        said.insert(1, f"Its weakest domain is {_cell(worst)}, with {100 * accuracy[worst]:.1f} % test accuracy.")
    return "## Limits\n\n" + "\n".join(f"- {each}" for each in said)


def _use(trained: Trained, file: str, format: str) -> str:
    size = trained.size
    mode = "RGB" if trained.channels == 3 else "L"
    picture = (
        f'picture = Image.open("image.jpg")\npicture.draft("{mode}", ({size}, {size}))\n'
        f'picture = picture.convert("{mode}").resize(({size}, {size}), Image.Resampling.BILINEAR, reducing_gap=3.0)\n'
        f"images = np.asarray(picture, np.uint8).reshape(1, {size}, {size}, {trained.channels})\n"
    )
    codes = {
        "onnx": "import json\n\nimport numpy as np\nimport onnxruntime\nfrom PIL import Image\n\n"
        f"session = onnxruntime.InferenceSession({_quoted(file)})\n"
        'classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])\n'
        f'{picture}(probabilities,) = session.run(["probabilities"], {{"images": images}})\n'
        "print(classes[probabilities[0].argmax()], probabilities[0].max())",
        "torch": "import json\n\nimport numpy as np\nimport torch\nfrom PIL import Image\n\n"
        f'about = {{"fedcir.json": ""}}\nmodel = torch.export.load({_quoted(file)}, extra_files=about).module()\n'
        'classes = json.loads(json.loads(about["fedcir.json"])["classes"])\n'
        f"{picture}probabilities = model(torch.tensor(images))[0]\n"
        "print(classes[probabilities.argmax()], float(probabilities.max()))",
        "safetensors": "from safetensors import safe_open\n\n"
        f'with safe_open({_quoted(file)}, framework="pt") as model:\n'
        '    about = model.metadata()["fedcir"]  # JSON: classes, image size, normalisation, network, temperature\n'
        "    weights = {name: model.get_tensor(name) for name in model.keys()}",
    }
    how = (
        ""
        if format == "safetensors"
        else "\n\nResize pictures as shown: resized in another way, some get another class."
    )
    return f"## How to use it\n\n```python\n{codes[format]}\n```{how}"


def _test_images(trained: Trained) -> dict[str, int]:
    """Test images by domain, where the run knows."""
    manifest = trained.run.manifest
    if "test" in manifest:
        return {name: len(ids) for name, ids in manifest["test"].items()}
    return {c["domain"]: int(c["test"]) for c in manifest["clients"] if isinstance(c.get("test"), int)}


def _is_private(trained: Trained) -> bool:
    return guarantee_of(trained.run) is not None


def _quoted(text: str) -> str:
    return escape_controls(json.dumps(text, ensure_ascii=False))


def _cell(text: str) -> str:
    return escape_markdown(text)


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
