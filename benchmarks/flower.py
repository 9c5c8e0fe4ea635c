"""Seconds of a round on Flower's deployment engine: ours, and a bare Flower app that sends the same bytes.

One federation of four sites with TLS and registered keys serves both; they take turns. A round of ours may train what
the next one needs, so a mean over whole runs is told beside the median of rounds.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np

from fedcir.flower.local_federation import LocalFederation
from fedcir.runtime.run_folder import RunFolder

BARE = Path(__file__).parent / "contestants" / "bare_flower"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of a run")
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3, help="runs of each")
    parser.add_argument("--algorithms", default="fedavg,fedcir", help="methods of ours")
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="fedcir-") as name:
        work = Path(name)
        _write_data(work / "data", given.sites)
        own = {"data-root": str(work / "data"), "state": str(work / "state")}
        nodes = [{"partition-id": number, **own} for number in range(given.sites)]
        with LocalFederation(work / "flower", nodes) as federation:
            for turn in range(given.turns):
                for method in ["bare", *given.algorithms.split(",")]:
                    out = work / f"{method}-{turn}"
                    seconds.setdefault(method, []).extend(_run(federation, method, out, work / "data", given))
                    print(method, [f"{each:.1f}" for each in seconds[method][-given.rounds :]], flush=True)
    for method, rounds in seconds.items():
        middle, mean = (
            (average(rounds), average(rounds) / average(seconds["bare"]))
            for average in (statistics.median, statistics.mean)
        )
        print(
            f"{method}: median {middle[0]:.1f} s a round, {middle[1]:.2f} of bare; mean {mean[0]:.1f} s, {mean[1]:.2f}"
        )


def _run(federation: LocalFederation, method: str, out: Path, data: Path, given: argparse.Namespace) -> list[float]:
    if method == "bare":
        settings = {"root": str(data), "rounds": given.rounds, "sites": given.sites, "out": str(out)}
        federation.submit(out.name, settings, BARE).wait()
        times: list[float] = json.loads(out.read_text(encoding="utf-8"))
        return times
    asked = f"data.name=arrays data.root={data} server.rounds={given.rounds} algorithm.name={method}"
    federation.submit(out.name, {"set": asked, "out": str(out), "sites": given.sites}).wait()
    return [record.seconds["total"] for record in RunFolder(out).records()]


def _write_data(folder: Path, sites: int) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for site in range(sites):
        parts = {}
        for part, samples in (("train", 200), ("test", 100)):
            parts[f"x_{part}"] = rng.integers(0, 256, (samples, 28, 28, 1), dtype=np.uint8)
            parts[f"y_{part}"] = np.arange(samples) % 10
        np.savez(folder / f"site-{site}.npz", **parts)


if __name__ == "__main__":
    main()
