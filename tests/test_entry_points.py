"""Algorithms, datasets and aggregators by entry point: the examples of the docs, as an installed distribution.

Models by entry point: tests/models/test_model_plugins.py.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.algorithms import find_algorithm
from fedcir.conformance import check_aggregator, check_dataset
from fedcir.data.opening import get_source, list_datasets
from fedcir.errors import InputError
from fedcir.server.aggregation import find_aggregator

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"algorithm": "add-an-algorithm", "dataset": "add-a-dataset", "aggregator": "add-an-aggregator"}
CLASSES = {"algorithm": "Prox", "dataset": "Scanners", "aggregator": "DropLongest"}
NAMES = {"algorithm": "prox-term", "dataset": "scanner-images", "aggregator": "drop-longest"}
FINDERS: dict[str, Callable[[str], Any]] = {
    "algorithm": find_algorithm,
    "dataset": get_source,
    "aggregator": find_aggregator,
}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution whose modules are the first example of each page, and images for the dataset."""
    entries = []
    for kind, page in PAGES.items():
        code = re.search(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
        assert code is not None
        (tmp_path / f"installed_{kind}.py").write_text(code[1], encoding="utf-8")
        module = f"installed_{kind}"
        names = {NAMES[kind]: CLASSES[kind], "missing": "Missing", "number": "NUMBER"}
        entries += [f"[fedcir.{kind}s]", *(f"{name} = {module}:{attribute}" for name, attribute in names.items())]
        with (tmp_path / f"installed_{kind}.py").open("a", encoding="utf-8") as file:
            file.write("\nNUMBER = 3\n")
    (tmp_path / "extensions-1.0.dist-info").mkdir()
    (tmp_path / "extensions-1.0.dist-info/METADATA").write_text("Name: extensions\nVersion: 1.0\n")
    (tmp_path / "extensions-1.0.dist-info/entry_points.txt").write_text("\n".join(entries))
    (tmp_path / "images").mkdir()
    rng = np.random.default_rng(0)
    for name in (f"{scanner}_{label}_{number}" for scanner in "ab" for label in "xy" for number in range(5)):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(tmp_path / f"images/{name}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDCIR_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_run_takes_all_three_by_the_names_of_their_entry_points(fedcir: Callable[..., Any]) -> None:
    assert find_algorithm("prox-term")().mu == 0.1
    check_dataset("scanner-images", root="images", image_size=8)
    check_aggregator(find_aggregator("drop-longest"))
    assert "scanner-images" in list_datasets()
    data = ["--dataset", "scanner-images", "--data-root", "images", "--image-size", 16]
    short = ["--rounds", 1, "--local-steps", 1, "--device", "cpu", "--quiet", "--out", "run"]
    method = ["--algorithm", "prox-term", "--set", "algorithm.mu=0.5", "--set", "server.aggregation=drop-longest"]
    output = fedcir("run", *data, *method, *short)
    assert (output.code, output.err) == (0, "")
    assert Path("run/summary.json").is_file()


@pytest.mark.parametrize("kind", PAGES)
def test_an_entry_point_that_cannot_be_used_is_named_with_its_value(kind: str) -> None:
    find = FINDERS[kind]
    assert CLASSES[kind] in str(find(NAMES[kind]))
    with pytest.raises(InputError, match=rf"no {kind} .*did you mean '{NAMES[kind]}'"):
        find(NAMES[kind].replace("-", "_"))
    with pytest.raises(InputError, match=rf"{kind} 'missing' .installed_{kind}:Missing. cannot be loaded"):
        find("missing")
    with pytest.raises(InputError, match=rf"{kind} 'number' .installed_{kind}:NUMBER. must be one subclass of"):
        find("number")
