"""Differential privacy of a finished run, as its exports state it."""

from typing import Any

from fedcir.engine.accounting import adjacency_of, upload_epsilon
from fedcir.runs.run import Run

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
    """Epsilon, delta, unit, place, adjacency and source of randomness of a run; None if it added no noise."""
    config, saved = run.config, (run.summary or {}).get("privacy")
    if not config.privacy.noise or saved is None:
        return None
    randomness = "system" if "key" in run.manifest else "seed"
    guarantee = {"adjacency": adjacency_of(config.privacy), "randomness": randomness, **saved}
    if "adjacency" not in saved and config.privacy.by_clients:  # where earlier versions counted too little
        largest = upload_epsilon(config.privacy, config.local, 1, len(run.records))
        guarantee["epsilon"] = max(saved["epsilon"], largest)
    return guarantee


def describe_guarantee(guarantee: dict[str, Any], site: str | None = None) -> str:
    """The section of a model card on privacy. A site's own layers are made without noise."""
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
