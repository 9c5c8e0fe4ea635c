"""Where a generator of representations should stand: variants of FedCiR under label skew and long local training.

    python benchmarks/generators.py --digits DIR --pacs DIR --lists DIR

Every variant is tested on a fifth of the training images, which is set aside; no test image is read. A trial's figure
is the mean over its last five evaluations, since under label skew rounds differ by whom they sample. Rows are added to
results/generator-trials.json as trials end, and a trial that it holds is not run again. Prints a Markdown table of all
of them; docs/generator.md reads it. `--plan "digits beta=0.1 invariant: fedcir; prior: 0,1,2"` runs others.

Variants named `oracle` cheat: their generator hands out real representations of all clients, by the mean model. So they
tell what the best possible generator would gain.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from contestants.generated import ORACLE, Corrected, Variant
from scipy.stats import t as student
from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm
from fedcir.algorithms.fedavg import FedAvg
from fedcir.algorithms.fedcir import FedCiR
from fedcir.config import Config, config_from_tables
from fedcir.data.federation import Federation, open_federation
from fedcir.models.classifier import GaussianClassifier
from fedcir.reporting.page import to_markdown
from fedcir.runtime.session import Session
from fedcir.runtime.simulation import open_rounds

RESULTS = Path(__file__).parents[1] / "results" / "generator-trials.json"
KEYS = ("setting", "scale", "seed", "variant")
BASELINES = ("fedcir", "prior")
NONE: dict[str, Any] = {"lambda_reg": 0.0, "lambda_align": 0.0}
GROUNDED: dict[str, Any] = {"ground": 1.0, "generator_batch": 128, "generator_steps": 20, "lambda_align": 0.0}
ALIGNED: dict[str, Any] = {"lambda_reg": 0.0, "lambda_align": 0.0, "align_share": 0.3}

VARIANTS: dict[str, Algorithm] = {
    "fedavg": FedAvg(),
    "fedcir": FedCiR(),
    "fedavg, prior": Corrected(),
    "prior": Variant(**NONE, prior=1.0),
    "fedcir, prior": Variant(prior=1.0),
    # the best that any generator could do
    "oracle reg": Variant(source="oracle", lambda_align=0.0),
    "oracle reg 5": Variant(source="oracle", lambda_align=0.0, lambda_reg=5.0),
    "oracle reg, prior": Variant(source="oracle", lambda_align=0.0, prior=1.0),
    "oracle align": Variant(source="oracle", **ALIGNED),
    "oracle align, prior": Variant(source="oracle", **ALIGNED, prior=1.0),
    "oracle contrast, prior": Variant(source="oracle", **NONE, contrast=0.5, prior=1.0),
    "oracle calibrate": Variant(source="oracle", **NONE, calibrate=50),
    "oracle calibrate, prior": Variant(source="oracle", **NONE, calibrate=50, prior=1.0),
    # (a) moments of z
    "ground": Variant(**GROUNDED),
    "ground, prior": Variant(**GROUNDED, prior=1.0),
    # (b) a sphere
    "sphere": Variant(sphere=True, lambda_align=0.0),
    # (c) more steps at a lower rate
    "slow generator": Variant(generator_steps=50, generator_lr=1e-3, lambda_align=0.0),
    # (d) alignment that counts
    "ground, align, prior": Variant(**{**GROUNDED, **ALIGNED}, prior=1.0),
    # no generator at all; other uses of heads
    "dual, prior": Variant(source="dual", lambda_align=0.0, prior=1.0),
    "rows, prior": Variant(**NONE, rows=True, prior=1.0),
    "ground, calibrate": Variant(**{**GROUNDED, "lambda_reg": 0.0}, calibrate=50),
    "ground, calibrate, prior": Variant(**{**GROUNDED, "lambda_reg": 0.0}, calibrate=50, prior=1.0),
    "anchor, prior": Variant(**NONE, anchor=0.5, prior=1.0),
}

PLAN = (
    "digits beta=0.1 invariant: fedcir; prior; oracle reg, prior; oracle calibrate, prior; ground, prior: 0,1,2",
    "digits beta=0.1 invariant: "
    "fedavg; fedavg, prior; fedcir, prior; oracle reg 5; oracle align, prior; oracle contrast, prior; "
    "oracle calibrate; ground; sphere; slow generator; ground, align, prior; dual, prior; rows, prior; "
    "ground, calibrate, prior; anchor, prior: 0",
    "digits beta=0.1 invariant: oracle reg; ground, calibrate: 0,1",
    "pacs beta=0.1 invariant: fedcir; prior; oracle reg, prior; oracle calibrate, prior; ground, prior: 0,1,2",
    "pacs beta=0.1 invariant: "
    "fedavg; fedcir, prior; oracle reg; oracle align, prior; oracle calibrate; ground, align, prior; "
    "dual, prior; ground, calibrate: 0",
    "digits E=100 invariant: fedcir; oracle reg; oracle align: 0",
    "digits beta=0.1 batch: fedcir; prior; oracle reg: 0",
    "digits beta=0.5 invariant: fedcir; prior; oracle reg, prior: 0",
    "pacs E=100 invariant: fedcir; oracle reg: 0",
    "digits beta=100000 invariant: fedavg: 0",
)

SCALES: dict[str, dict[str, Any]] = {
    "small": {"data": {"image_size": 16, "train_per_domain": 2000}, "model": {"width": 8}, "rounds": 30},
    "full": {"data": {"image_size": 32, "train_per_domain": 2000}, "model": {"width": 16}, "rounds": 60},
}
"""Images, the network, and rounds of label skew, of 200 steps each."""


def config_of(setting: str, scale: str, seed: int, roots: dict[str, str]) -> Config:
    """The settings of a trial such as "pacs beta=0.1 invariant"."""
    data, shift, norm = setting.split()
    size = SCALES[scale]
    tables: dict[str, dict[str, Any]] = {
        "data": {"name": "arrays" if data == "digits" else data, "root": roots[data], "val_fraction": 0.2},
        "model": {"norm": norm, **size["model"]},
        "server": {"rounds": size["rounds"], "eval_every": size["rounds"] // 15},
        "run": {"seed": seed, "workers": 1},
    }
    tables["data"] |= size["data"] | ({"lists": roots["lists"]} if data == "pacs" else {})
    if shift == "E=100":
        tables["local"] = {"steps": 100}
        tables["server"] = {"rounds": size["rounds"] // 2, "eval_every": 1}
    else:
        tables["partition"] = {"scheme": "dirichlet", "clients": 20, "beta": float(shift.removeprefix("beta="))}
        tables["server"]["active"] = 10
    return config_from_tables(tables)


def on_validation(federation: Federation) -> Federation:
    """The same, tested on the images that are set aside."""
    clients = tuple(replace(c, test=c.validation, validation=None) for c in federation.clients)
    return replace(federation, clients=clients)


def look(federation: Federation, per_client: int = 8, per_class: int = 64) -> None:
    """Show the oracle real images: of every class as many, from all clients that hold it."""
    by_class: dict[int, list[Tensor]] = {}
    for client in federation.clients:
        assert client.train is not None
        labels = client.train.labels().numpy()
        for label in np.unique(labels):
            rows = np.flatnonzero(labels == label)[:per_client]
            x, _ = client.train.batch(rows, torch.device("cpu"), torch.contiguous_format)
            by_class.setdefault(int(label), []).append(x)
    pools = [torch.cat(by_class[label]) for label in sorted(by_class)]
    ORACLE["images"] = torch.stack([pool[torch.arange(per_class) * len(pool) // per_class] for pool in pools])


def standing(session: Session) -> dict[str, float]:
    """Where generated class means are beside real ones, both about their centre: cosine, and ratio of lengths."""
    model, shared = session.modules["model"], session.state.shared
    if not isinstance(model, GaussianClassifier) or "gaussians" not in shared:
        return {}
    model.load_state_dict(shared["model"])
    images = ORACLE["images"]
    with torch.no_grad():
        z, _ = model.eval().encoder(images.flatten(0, 1))
    real, made = z.view(*images.shape[:2], -1).mean(1), shared["gaussians"]["mean"]
    real, made = real - real.mean(0), made - made.mean(0)
    ratio = made.norm(dim=-1) / real.norm(dim=-1)
    return {"cosine": round(float(F.cosine_similarity(made, real).mean()), 3), "length": round(float(ratio.mean()), 3)}


def trial(config: Config, algorithm: Algorithm, federation: Federation) -> dict[str, Any]:
    look(federation)
    started = time.process_time()
    curve, losses = {}, {}
    with open_rounds(config, algorithm, federation, None, False) as (session, rounds):
        for record in rounds:
            losses = record.losses
            if record.accuracy_mean is not None:
                curve[record.round] = round(100 * record.accuracy_mean, 2)
    return {
        "validation": round(statistics.fmean(list(curve.values())[-5:]), 2),
        "curve": curve,
        "losses": {name: float(f"{value:.3g}") for name, value in losses.items()},
        "generated": standing(session),
        "cpu_seconds": round(time.process_time() - started),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A line a setting and variant, with its paired differences to the baselines over the seeds that both have."""
    found: dict[tuple[str, str], dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        found.setdefault((row["setting"], row["scale"]), {}).setdefault(row["variant"], {})[row["seed"]] = row
    lines = [
        [
            "setting",
            "variant",
            "seeds",
            "validation",
            *(f"to {name} (95 %)" for name in BASELINES),
            "L_reg",
            "cosine",
            "length",
        ]
    ]
    for (setting, scale), variants in found.items():
        for name in sorted(variants, key=list(VARIANTS).index):
            seeds = variants[name]
            line = [f"{setting}, {scale}", name, ", ".join(map(str, sorted(seeds)))]
            line.append(f"{statistics.fmean(row['validation'] for row in seeds.values()):.1f}")
            line += [paired(seeds, variants.get(base, {})) if name != base else "" for base in BASELINES]
            last = seeds[min(seeds)]
            line.append(f"{last['losses'].get('reg', float('nan')):.2g}".replace("nan", ""))
            line += [f"{last['generated'][key]:.2f}" if last["generated"] else "" for key in ("cosine", "length")]
            lines.append(line)
    return to_markdown(lines)


def paired(seeds: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> str:
    both = [seeds[seed]["validation"] - base[seed]["validation"] for seed in seeds if seed in base]
    if len(both) < 2:
        return f"{both[0]:+.1f}" if both else ""
    half = student.ppf(0.975, len(both) - 1) * statistics.stdev(both) / len(both) ** 0.5
    return f"{statistics.fmean(both):+.1f} ± {half:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--digits", "--pacs", "--lists"):
        parser.add_argument(name, default="")
    parser.add_argument("--plan", nargs="*", default=PLAN)
    parser.add_argument("--scale", choices=list(SCALES), default="small")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else []
    done = {tuple(row[key] for key in KEYS) for row in rows}
    for entry in given.plan:
        setting, variants, seeds = (part.strip() for part in entry.split(":"))
        for seed in map(int, seeds.split(",")):
            keys = [(setting, given.scale, seed, variant.strip()) for variant in variants.split(";")]
            if not (missing := [key for key in keys if key not in done]):
                continue
            config = config_of(setting, given.scale, seed, vars(given))
            federation = on_validation(open_federation(config))
            for key in missing:
                rows.append(dict(zip(KEYS, key, strict=True)) | trial(config, VARIANTS[key[-1]], federation))
                given.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    print(table(rows), end="")


if __name__ == "__main__":
    main()
