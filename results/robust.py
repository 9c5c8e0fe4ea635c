"""Make the runs of docs/robust.md: FedAvg with bad clients, under each attack and each aggregation.

python results/robust.py --seeds 0 1 2

Each run is added to results/robust/<bad>-of-<clients>-seed-<seed>.json as it ends; those that are there are not
repeated. `make docs` writes the tables.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from fedcir.config import AttackConfig, config_from_tables, nest_settings
from fedcir.errors import RunError
from fedcir.reporting.page import join_markdown
from fedcir.runtime.simulation import open_run
from fedcir.server.aggregation import RULES
from fedcir.server.attacks import backdoor_success

PLACE = Path(__file__).parent / "robust"
ATTACKS = get_args(AttackConfig.__annotations__["kind"])
AGGREGATIONS = tuple(RULES)
SETTINGS = {
    "algorithm.name": "fedavg",
    "data.image_size": 16,
    "model.width": 8,
    "local.batch_size": 16,
    "local.lr": 0.02,
    "server.rounds": 15,
    "server.eval_every": 15,
    "run.workers": 1,
    "run.device": "cpu",
}
STUDIES: dict[str, dict[str, Any]] = {
    "1-of-4": {"attack.clients": 1},
    "3-of-20": {
        "attack.clients": 3,
        "partition.scheme": "dirichlet",
        "partition.clients": 20,
        "partition.beta": 1e6,
        "local.steps": 5,
        "local.lr": 0.05,
    },
}


def file_of(study: str, seed: int) -> Path:
    return PLACE / f"{study}-seed-{seed}.json"


def found_in(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """What was measured, by attack and aggregation."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def left(studies: list[str], seeds: list[int]) -> Iterator[tuple[str, int, str, str]]:
    for seed in seeds:
        for study in studies:
            for attack in ATTACKS:
                for aggregation in AGGREGATIONS:
                    done = found_in(file_of(study, seed)).get(attack, {})
                    if aggregation not in done:
                        yield study, seed, attack, aggregation


def measured(study: str, seed: int, attack: str, aggregation: str) -> dict[str, float]:
    """The accuracy after the last round, and how often a backdoor works."""
    own = {"run.seed": seed, "attack.kind": attack, "server.aggregation": aggregation}
    with open_run(config_from_tables(nest_settings({**SETTINGS, **STUDIES[study], **own}))) as (session, rounds):
        try:
            *_, last = rounds
        except RunError:  # no client can train any more: its weights are not finite
            return {}
        found = {"accuracy_mean": last.accuracy_mean, "accuracy_worst": last.accuracy_worst}
        if attack in ("none", "backdoor"):
            model = session.modules["model"]
            model.load_state_dict(session.state.shared["model"])
            clients = {client.domain: client.test for client in session.roster.clients}
            found["backdoor_success"] = backdoor_success(model, clients.values())
    return {name: round(value, 4) for name, value in found.items()}


def table(which: str) -> str:
    """Mean accuracy over seeds in percent, attacks down and aggregations across; or `1-of-4 backdoor`: its success."""
    study, _, success = which.partition(" ")
    runs = [found_in(path) for path in sorted(PLACE.glob(f"{study}-seed-*.json"))]
    name, attacks = ("backdoor_success", ("none", "backdoor")) if success else ("accuracy_mean", ATTACKS)
    rows = [["attack", *AGGREGATIONS]]
    for attack in attacks:
        values = [[run[attack][each].get(name) for run in runs if each in run.get(attack, {})] for each in AGGREGATIONS]
        rows.append([attack, *(shown(each) for each in values)])
    return join_markdown(rows)


def shown(values: list[float | None]) -> str:
    """The mean and range in percent of the runs that came to their end, and how many did not."""
    ended = [100 * value for value in values if value is not None]
    words = []
    if ended:
        words.append(f"{statistics.fmean(ended):.1f}")
    if len(ended) > 1:
        words.append(f"({min(ended):.1f} to {max(ended):.1f})")
    if broken := len(values) - len(ended):
        words.append(f"{broken} of {len(values)} broke down")
    return " ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", nargs="*", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=60, help="No run is started after so long.")
    given = parser.parse_args()
    PLACE.mkdir(exist_ok=True)
    until = time.monotonic() + 60 * given.minutes
    for study, seed, attack, aggregation in list(left(given.studies, given.seeds)):
        if time.monotonic() > until:
            break
        result = measured(study, seed, attack, aggregation)
        path = file_of(study, seed)
        found = found_in(path)
        found.setdefault(attack, {})[aggregation] = result
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)
        print(study, seed, attack, aggregation, result, flush=True)


if __name__ == "__main__":
    main()
