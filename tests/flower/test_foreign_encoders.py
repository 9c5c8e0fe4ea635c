"""Encoders across sites: a frozen one stays at each, and one of others' code is called only where a site allows it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from grid import MemoryGrid, run_of_flower, site  # noqa: F401

from fedcir.config import Config, ModelConfig
from fedcir.errors import InputError, RunError
from fedcir.flower.server_app import DeploymentSettings, open_deployment

Tiny = Callable[..., Config]
Train = Callable[..., Path]
NODES = (5000, 17, 903)

MINE = """
from pathlib import Path
from torch import nn

def make(mark=""):
    if mark:
        Path(mark).touch()
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
"""


def across(config: Config, out: Path, **node: str) -> Path:
    nodes = {
        name: site(partition_id=number, state=str(out.parent / "state" / str(number)), device="cpu", **node)
        for number, name in enumerate(NODES)
    }
    with open_deployment(MemoryGrid(nodes), DeploymentSettings(config, out, False, 3, 0.0, 60.0)) as (_, rounds):
        for _ in rounds:
            pass
    return out


def own(config: Config, name: str, **arguments: object) -> Config:
    return replace(config, model=replace(config.model, name=name, width=None, arguments=arguments))


WAYS = ["model.freeze=true", "model.freeze=false", "model.train=1", "model.adapter=lora"]


def write_files(folder: Path, **codes: str) -> None:
    for name, code in codes.items():
        (folder / name).mkdir()
        (folder / name / "mine.py").write_text(code)


@pytest.mark.parametrize("way", WAYS)
def test_an_encoder_of_ones_own_gives_the_same_bits_across_sites(
    way: str, tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    write_files(tmp_path, server=MINE, site=MINE)
    config = tiny("fedcir", "server.rounds=2", "run.workers=1", way)
    config = own(config, str(tmp_path / "server/mine.py:make"))
    one = train(config, tmp_path / "one")
    two = across(config, tmp_path / "two", encoder=str(tmp_path / "site/mine.py:make"))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


@pytest.mark.parametrize("allowed", ["", "torch.nn:Conv2d", "other.py:make"])
def test_a_server_cannot_have_a_site_call_what_the_site_does_not_allow(
    allowed: str, tiny: Tiny, tmp_path: Path
) -> None:
    touched = tmp_path / "touched"
    (tmp_path / "mine.py").write_text(MINE)
    config = own(tiny("fedavg"), str(tmp_path / "mine.py:make"), mark=str(touched))
    with pytest.raises(RunError, match=r"its node-config does not allow the run's encoder, mine\.py:make"):
        across(config, tmp_path / "run", encoder=allowed)
    assert not touched.exists()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "model.freeze=false"])
def test_a_site_whose_frozen_weights_are_others_than_the_servers_is_refused(
    way: str, tiny: Tiny, tmp_path: Path
) -> None:
    other = MINE.replace("    return", "    nn.Linear(1, 1)  # draws two random numbers\n    return")
    write_files(tmp_path, server=MINE, site=other)
    config = own(tiny("fedavg", "server.rounds=1", way), str(tmp_path / "server/mine.py:make"))
    with pytest.raises(RunError, match="clients 0, 1, 2: the frozen tensors of its encoder are not the server's"):
        across(config, tmp_path / "other", encoder=str(tmp_path / "site/mine.py:make"))


@pytest.mark.parametrize("way", ["freeze=true", "train=1", "adapter=lora"])
def test_weights_in_a_file_cannot_be_frozen_across_sites(way: str, tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("fedavg", f"model.{way}", f"model.weights={tmp_path / 'w.pth'}")
    setting = way.partition("=")[0]
    with pytest.raises(InputError, match=rf"model\.weights cannot be used with model\.{setting} across sites"):
        across(config, tmp_path / "run")


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of save_pretrained."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    folder = tmp_path_factory.mktemp("encoder") / "vit"
    transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=8, patch_size=4)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "trained"])
def test_a_folder_of_weights_at_every_site_gives_the_same_bits(
    freeze: bool, vit: Path, tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    copy = shutil.copytree(vit, tmp_path / "copy")
    config = tiny("fedcirone" if freeze else "fedavg", "server.rounds=1")
    config = replace(config, model=ModelConfig(f"hf:{vit}", freeze=freeze))
    one = train(config, tmp_path / "one")
    two = across(config, tmp_path / "two", encoder=f"hf:{copy}")
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


def test_a_site_uses_no_other_folder_than_its_own_copy(vit: Path, tiny: Tiny, tmp_path: Path) -> None:
    config = replace(tiny("fedavg", "server.rounds=1"), model=ModelConfig(f"hf:{vit}"))
    other = shutil.copytree(vit, tmp_path / "other")
    (other / "config.json").write_text((vit / "config.json").read_text() + " ")
    for number, encoder in enumerate(("", f"hf:{other}", "torch.nn:Conv2d")):
        with pytest.raises(RunError, match=r"its node-config names no copy of the folder of the run's encoder"):
            across(config, tmp_path / f"run{number}", encoder=encoder)
