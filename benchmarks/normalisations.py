"""Which normalisation suits feature shift: FedAvg with one `cnn` and many norms, on validation images.

    python benchmarks/normalisations.py PACS [--lists LISTS] [--rounds 40] [--lr 0.01] [--seeds 0,1] [--only NAME;NAME]

PACS at 32 pixels, at most 2,000 training images a domain, one client a domain, 20 steps of 32 a round. A fifth of each
domain's training images is set aside and tested on; the test images are not looked at. An accuracy is the mean over
domains and over the last five of the rounds that are evaluated, every second one. Runs go to results/normalisation.json
as they end, and those that are there are not done again. Prints a Markdown table. `--only ""` prints what is there.

IBN, InstanceNorm on half of the channels, comes from IBN-Net (https://arxiv.org/abs/1807.09441).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedcir import FedAvg
from fedcir.config import Config, config_from_tables
from fedcir.data.federation import Federation, open_federation
from fedcir.models.networks import CNN, StandardisedConv
from fedcir.models.normalisation import InstanceNorm
from fedcir.reporting.methods import format_estimate
from fedcir.reporting.page import to_markdown
from fedcir.runs.statistics import Estimate
from fedcir.runtime.simulation import open_rounds
from fedcir.types import RoundRecord

RESULTS = Path(__file__).parents[1] / "results" / "normalisation.json"
EVERY, LAST = 2, 5  # evaluated every second round, and averaged over the last five of those

Norm = Callable[[int], nn.Module]


def instance(channels: int, affine: bool = True) -> nn.Module:
    return InstanceNorm(channels, affine=affine)


def group(size: int | None = 16, affine: bool = True) -> Norm:
    """GroupNorm of so many channels a group; all in one if no size is given."""
    return lambda channels: nn.GroupNorm(channels // (size or channels), channels, affine=affine)


class Halves(nn.Module):
    """IBN: InstanceNorm on the first half of the channels, another norm on the second."""

    def __init__(self, channels: int, other: Norm) -> None:
        super().__init__()
        self.parts = nn.ModuleList([InstanceNorm(channels // 2), other(channels - channels // 2)])

    def forward(self, x: Tensor) -> Tensor:
        halves = x.chunk(2, dim=1)
        return torch.cat([part(half) for part, half in zip(self.parts, halves, strict=True)], dim=1)


def network(*norms: Norm, standardised: bool = False) -> nn.Module:
    """A cnn with these norms after its three convolutions."""
    encoder = CNN()
    widths = [conv.out_channels for conv in encoder.convs]
    encoder.norms = nn.ModuleList(norm(width) for norm, width in zip(norms, widths, strict=True))
    if standardised:
        for place, (conv, norm) in enumerate(zip(encoder.convs, encoder.norms, strict=True)):
            bias = isinstance(norm, nn.Identity)  # a norm brings its own
            encoder.convs[place] = StandardisedConv(conv.in_channels, conv.out_channels, 3, padding=1, bias=bias)
    return encoder


def nothing(channels: int) -> nn.Module:
    return nn.Identity()


VARIANTS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: network(*[nn.BatchNorm2d] * 3),
    "invariant: InstanceNorm in 1 stage, groups of 16": lambda: network(instance, group(), group()),
    "InstanceNorm in 0 stages (GroupNorm)": lambda: network(group(), group(), group()),
    "InstanceNorm in 2 stages": lambda: network(instance, instance, group()),
    "InstanceNorm in 3 stages": lambda: network(instance, instance, instance),
    "invariant, groups of 4": lambda: network(instance, group(4), group(4)),
    "invariant, groups of 8": lambda: network(instance, group(8), group(8)),
    "invariant, one group": lambda: network(instance, group(None), group(None)),
    "invariant without weight and bias": lambda: network(
        lambda channels: instance(channels, affine=False), group(affine=False), group(affine=False)
    ),
    "InstanceNorm, then BatchNorm": lambda: network(instance, nn.BatchNorm2d, nn.BatchNorm2d),
    "IBN, then BatchNorm": lambda: network(lambda c: Halves(c, nn.BatchNorm2d), nn.BatchNorm2d, nn.BatchNorm2d),
    "IBN with GroupNorm": lambda: network(lambda c: Halves(c, group(8)), group(), group()),
    "weight standardisation, no norm": lambda: network(nothing, nothing, nothing, standardised=True),
    "InstanceNorm, then weight standardisation": lambda: network(instance, nothing, nothing, standardised=True),
    "invariant and weight standardisation": lambda: network(instance, group(), group(), standardised=True),
}


def validating(config: Config) -> Federation:
    """The configured federation with the images set aside in the place of the test images."""
    federation = open_federation(config)
    clients = tuple(replace(client, test=client.validation, validation=None) for client in federation.clients)
    return replace(federation, clients=clients)


def trained(config: Config, federation: Federation, encoder: Callable[[], nn.Module]) -> dict[str, float]:
    """Each domain's accuracy on its validation images."""
    own = replace(federation, builder=replace(federation.builder, make_encoder=encoder))
    with open_rounds(config, FedAvg(), own, None, False) as (_, rounds):
        evaluated: list[RoundRecord] = [record for record in rounds if record.accuracy_mean is not None]
    last = [record.accuracy for record in evaluated[-LAST:]]
    return {name: round(statistics.fmean(each[name] for each in last), 4) for name in last[0]}


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Accuracies over seeds, best first, and the differences to BatchNorm of the same seeds."""
    means = {name: {s: statistics.fmean(run.values()) for s, run in each.items()} for name, each in found.items()}
    base = means.get("BatchNorm", {})
    rows = [["norm", "seeds", *next(iter(next(iter(found.values())).values())), "mean (%)", "to BatchNorm"]]
    for name in sorted(means, key=lambda name: -statistics.fmean(means[name].values())):
        domains = zip(*(run.values() for run in found[name].values()), strict=True)
        shared = [value - base[seed] for seed, value in means[name].items() if seed in base]
        gain = f"{100 * statistics.fmean(shared):+.1f}" if shared and name != "BatchNorm" else ""
        mean = format_estimate(Estimate.of(list(means[name].values())))
        rows.append([name, str(len(means[name])), *(f"{100 * statistics.fmean(d):.1f}" for d in domains), mean, gain])
    return to_markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pacs", type=Path)
    parser.add_argument("--lists", type=Path, help="the folder of the official train and test lists")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--only", help="names of variants, by semicolons", default=";".join(VARIANTS))
    given = parser.parse_args()
    scale = f"{given.rounds} rounds, learning rate {given.lr:g}"
    runs = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for seed in given.seeds.split(","):
        config = config_from_tables(
            {
                "data": {
                    "name": "pacs",
                    "root": str(given.pacs),
                    "image_size": 32,
                    "train_per_domain": 2000,
                    "val_fraction": 0.2,
                    **({} if given.lists is None else {"lists": str(given.lists)}),
                },
                "local": {"lr": given.lr},
                "server": {"rounds": given.rounds, "eval_every": EVERY},
                "algorithm": {"name": "fedavg"},
                "run": {"seed": int(seed), "workers": 1, "device": "cpu"},
            }
        )
        federation = validating(config)
        for name in filter(None, given.only.split(";")):
            seeds = runs.setdefault(scale, {}).setdefault(name, {})
            if seed not in seeds:
                seeds[seed] = trained(config, federation, VARIANTS[name])
                RESULTS.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
                print(f"{name}, seed {seed}: {statistics.fmean(seeds[seed].values()):.3f}", file=sys.stderr)
    print(table(runs[scale]) if scale in runs else "no runs yet\n", end="")


if __name__ == "__main__":
    main()
