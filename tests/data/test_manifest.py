"""The manifest: who holds which sample, and one hash that tells whether two runs had the same."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.config import Config
from fedcir.data.examples import ImageExamples
from fedcir.data.federation import open_federation, partition_dataset
from fedcir.data.manifest import build_manifest

Make = Callable[..., Config]

SCHEMES = {
    "domain": [],
    "dirichlet": ["partition.scheme=dirichlet", "partition.clients=7"],
    "iid": ["partition.scheme=iid", "partition.clients=4"],
    "csv": ["partition.scheme=csv"],
}
KINDS = ["arrays", "folders"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three domains of three classes, ten images each, all different."""
    root, rng = tmp_path_factory.mktemp("tree"), np.random.default_rng(0)
    for path in (f"{domain}/{label}" for domain in ("ink", "pen", "wax") for label in ("cat", "dog", "emu")):
        (root / path).mkdir(parents=True)
        for number in range(10):
            picture = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
            picture.save(root / path / f"{number}.png")
    return root


@pytest.fixture
def make(tiny: Make, tree: Path, tmp_path: Path) -> Make:
    """A config by the kind of dataset and the scheme; the CSV file gives odd images to one and even to the other."""

    def config(kind: str, scheme: str = "dirichlet", *assignments: str, root: Path | None = None) -> Config:
        data = ["data.name=folders", "data.image_size=8", f"data.root={tree}"] if kind == "folders" else []
        more = [*data, *([] if root is None else [f"data.root={root}"]), *SCHEMES[scheme], *assignments]
        if scheme == "csv":
            domains, _ = partition_dataset(tiny("fedavg", *data, *assignments))
            names = [name for domain in domains for name in domain.train.ids]
            rows = [f"{name},{'even' if row % 2 else 'odd'}\n" for row, name in enumerate(names)]
            (tmp_path / "owners.csv").write_text("path,client\n" + "".join(rows), encoding="utf-8")
            more.append(f"partition.file={tmp_path / 'owners.csv'}")
        return tiny("fedavg", *more)

    return config


def manifest(config: Config) -> dict[str, Any]:
    return build_manifest(*partition_dataset(config))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_training_image_is_with_exactly_one_client_and_none_is_a_test_image(
    make: Make, kind: str, scheme: str
) -> None:
    config = make(kind, scheme, "data.val_fraction=0.2")
    domains, result = partition_dataset(config)[0], manifest(config)
    held = list(chain.from_iterable(client["train"] for client in result["clients"]))
    everything = [name for domain in domains for name in domain.train.ids]
    assert sorted(held) == sorted(everything)
    assert len(set(held)) == len(held)
    tests = set(chain.from_iterable(result["test"].values()))
    aside = set(chain.from_iterable(result["validation"].values()))
    assert not tests & set(held)
    assert not aside & (tests | set(held))
    assert len(tests) + len(aside) + len(held) == (108 if kind == "arrays" else 90)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_clients_of_a_domain_share_its_test_set_and_one_of_them_tests(make: Make, kind: str, scheme: str) -> None:
    federation = open_federation(make(kind, scheme))
    for client in federation.clients:
        assert isinstance(client.test, ImageExamples)
        assert list(client.test.split.ids) == federation.manifest["test"][client.domain]
    assert sorted(federation.evaluators.values()) == ["ink", "pen", "wax"]
    for number, domain in federation.evaluators.items():
        assert number == min(client.id for client in federation.clients if client.domain == domain)


@pytest.mark.parametrize(
    ("kind", "scheme"), [("arrays", "dirichlet"), ("arrays", "iid"), ("folders", "domain"), ("folders", "iid")]
)
def test_the_hash_is_the_same_for_the_same_seed_only(make: Make, kind: str, scheme: str) -> None:
    first, again, other = (manifest(make(kind, scheme, f"run.seed={seed}"))["hash"] for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_data_with_a_split_of_their_own_have_one_hash_for_all_seeds(make: Make) -> None:
    assert manifest(make("arrays", "domain"))["hash"] == manifest(make("arrays", "domain", "run.seed=1"))["hash"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_hash_does_not_depend_on_where_the_data_lie(
    make: Make, kind: str, data_root: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = shutil.copytree(data_root if kind == "arrays" else tree, tmp_path / "copy", copy_function=shutil.copyfile)
    before = manifest(make(kind))
    assert manifest(make(kind, root=copied)) == before
    monkeypatch.setenv("FEDCIR_CACHE", str(tmp_path / "another cache"))
    monkeypatch.chdir(tmp_path)
    assert manifest(make(kind, root=Path("copy"))) == before


@pytest.mark.slow
def test_the_manifest_does_not_depend_on_the_process(data_root: Path, tree: Path) -> None:
    script = (
        "import json, sys\n"
        "from fedcir.data.federation import partition_dataset\n"
        "from fedcir.data.manifest import build_manifest, to_json\n"
        "from fedcir.config import ConfigRequest\n"
        "for name, root in (('arrays', sys.argv[1]), ('folders', sys.argv[2])):\n"
        "    given = {'dataset': name, 'data_root': root, 'clients': 6}\n"
        "    asked = ConfigRequest(options=given, assignments=['data.val_fraction=0.2'])\n"
        "    print(json.dumps(json.loads(to_json(build_manifest(*partition_dataset(asked.resolve()))))))\n"
    )
    command = [sys.executable, "-c", script, str(data_root), str(tree)]
    first, second = (
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    )
    assert first == second
    assert [len(json.loads(line)["clients"]) for line in first.splitlines()] == [6, 6]


def test_a_run_keeps_the_manifest_that_the_command_shows(
    make: Make, train: Callable[..., Path], fedcir: Callable[..., Any], tree: Path, tmp_path: Path
) -> None:
    run = train(make("folders", "dirichlet", "server.rounds=1"), tmp_path / "run")
    more = ["--data-root", tree, "--image-size", 8, "--clients", 7, "--json"]
    shown = json.loads(fedcir("data", "partition", "folders", *more).out)
    kept = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    del kept["checksum"]
    assert kept == shown


@pytest.mark.parametrize("part", ["train", "test", "validation"])
@pytest.mark.parametrize("kind", KINDS)
def test_another_image_anywhere_is_another_hash(
    make: Make, kind: str, part: str, data_root: Path, tree: Path, tmp_path: Path
) -> None:
    root = shutil.copytree(data_root if kind == "arrays" else tree, tmp_path / "copy")
    config = make(kind, "domain", "data.val_fraction=0.2", root=root)
    before = manifest(config)
    name = before["clients"][0]["train"][0] if part == "train" else before.get(part, before["test"])["ink"][0]
    if kind == "folders":
        Image.new("RGB", (8, 8), "red").save(root / name)
    else:
        with np.load(root / "ink.npz") as archive:
            arrays = dict(archive)
        arrays[f"x_{name.split('/')[1]}"][int(name.split("/")[2])] ^= 255
        np.savez(root / "ink.npz", **arrays)
    after = manifest(config)
    assert after["clients"] == before["clients"]
    assert after["hash"] != before["hash"]


def test_the_order_in_which_an_array_lies_in_memory_does_not_matter(
    make: Make, data_root: Path, tmp_path: Path
) -> None:
    for file in data_root.glob("*.npz"):
        with np.load(file) as archive:
            np.savez(tmp_path / file.name, **{name: np.asfortranarray(archive[name]) for name in archive.files})
    assert manifest(make("arrays", root=tmp_path)) == manifest(make("arrays"))


def test_of_a_held_out_domain_the_manifest_names_test_images_only(make: Make) -> None:
    result = manifest(make("folders", "domain", "partition.hold_out=pen", "data.val_fraction=0.2"))
    assert [client["domain"] for client in result["clients"]] == ["ink", "wax", "pen"]
    assert result["clients"][2]["train"] == []
    assert result["test"].keys() == {"ink", "pen", "wax"}
    assert result["validation"].keys() == {"ink", "wax"}
