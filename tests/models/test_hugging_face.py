"""Encoders of transformers: folders of save_pretrained, in every step from training to export, and their outputs."""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcir import FedAvg, InputError, Predictor, load_run, train
from fedcir.config import Config, ConfigRequest, ModelConfig
from fedcir.conformance import check_model
from fedcir.data.examples import Normalisation
from fedcir.data.features import BATCH, FeatureCache
from fedcir.inference.exporting import export
from fedcir.models.builder import make_image_builder
from fedcir.models.onnx_encoder import OnnxEncoder
from fedcir.runtime.run_folder import RunFolder

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
IMAGES = {"image_size": 16, "patch_size": 8}
WORDS = {**SIZES, "vocab_size": 9, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NAMES = ("vit", "dinov2", "clip", "convnext")
Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may open a connection."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of save_pretrained for each of NAMES, and two of other tasks."""
    root = tmp_path_factory.mktemp("hugging-face")
    vit = transformers.ViTConfig(**SIZES, **IMAGES)
    clip = transformers.CLIPConfig(vision_config={**SIZES, **IMAGES}, text_config=WORDS, projection_dim=6)
    convnext = transformers.ConvNextConfig(hidden_sizes=[4, 6], depths=[1, 1], num_stages=2, image_size=16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, network in {
            "vit": transformers.ViTModel(vit),
            "dinov2": transformers.Dinov2Model(transformers.Dinov2Config(**SIZES, **IMAGES)),
            "clip": transformers.CLIPModel(clip),
            "convnext": transformers.ConvNextModel(convnext),
            "classifier": transformers.ViTForImageClassification(vit),
            "words": transformers.BertModel(transformers.BertConfig(**SIZES, vocab_size=9)),
        }.items():
            network.save_pretrained(root / name)
    return root


@pytest.fixture
def vit(folders: Path, tmp_path: Path) -> Path:
    """A copy of the folder, for tests that change it."""
    return shutil.copytree(folders / "vit", tmp_path / "vit")


def make_images(count: int = 2, size: int = 16) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def build(folder: Path, size: int = 16, **fields: Any) -> nn.Module:
    builder = make_image_builder(ModelConfig(f"hf:{folder}", **fields), 3, 3, seed=0, image_size=size)
    return (builder.frozen or builder.encoder()).eval()


def load_published(folder: Path) -> nn.Module:
    network: nn.Module = transformers.AutoModel.from_pretrained(folder)
    return network.eval()


@pytest.mark.parametrize("pooling", [None, "cls", "mean", "pooler"])
@torch.no_grad()
def test_features_of_a_vit_are_those_of_its_published_network(folders: Path, pooling: Any) -> None:
    encoder, published = build(folders / "vit", pooling=pooling), load_published(folders / "vit")(make_images())
    tokens = published.last_hidden_state
    expected = {"mean": tokens[:, 1:].mean(1), "pooler": published.pooler_output}.get(pooling, tokens[:, 0])
    torch.testing.assert_close(encoder(make_images()), expected)
    assert ("network.pooler.dense.weight" in encoder.state_dict()) == (pooling == "pooler")


@torch.no_grad()
def test_the_default_is_what_a_network_is_made_for(folders: Path) -> None:
    for name in ("dinov2", "convnext"):
        expected = load_published(folders / name)(make_images()).pooler_output
        torch.testing.assert_close(build(folders / name)(make_images()), expected)
    clip = load_published(folders / "clip").vision_model  # of two networks, that of images
    torch.testing.assert_close(build(folders / "clip")(make_images()), clip(make_images()).pooler_output)


def test_the_weights_of_a_classifier_fit_but_have_no_pooler(folders: Path) -> None:
    published = load_published(folders / "classifier")(make_images()).last_hidden_state[:, 0]
    torch.testing.assert_close(build(folders / "classifier")(make_images()), published)
    with pytest.raises(InputError, match=r"no weights that fit pooler\.dense\.bias of ViTModel: set model\.pooling to"):
        build(folders / "classifier", pooling="pooler")


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_conforms_and_runs_in_onnxruntime(folders: Path, name: str) -> None:
    pytest.importorskip("onnxruntime")
    check_model(f"hf:{folders / name}", image_size=16)
    encoder, x = build(folders / name, freeze=True), make_images(BATCH)
    with torch.inference_mode():
        torch.testing.assert_close(OnnxEncoder(encoder, torch.zeros_like(x))(x), encoder(x), rtol=1e-4, atol=1e-4)


def test_another_image_size_is_refused_with_the_fix_or_resized(folders: Path) -> None:
    with pytest.raises(InputError, match=r"takes images of 16 pixels, got 20: set data\.image_size=16$"):
        build(folders / "vit", 20)
    with pytest.raises(InputError, match=r"set data\.image_size=16, or model\.native_size=true"):
        build(folders / "vit", 20, freeze=True)
    resized = nn.functional.interpolate(make_images(size=20), (16, 16), mode="bilinear", antialias=True)
    with torch.no_grad():
        expected = build(folders / "vit")(resized)
        torch.testing.assert_close(
            build(folders / "vit", 20, freeze=True, native_size=True)(make_images(size=20)), expected
        )


def change_settings(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_code_beside_the_weights_does_not_run(vit: Path, tmp_path: Path) -> None:
    (vit / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    change_settings(vit, auto_map={"AutoConfig": "mine.Mine", "AutoModel": "mine.Mine"})
    build(vit)
    change_settings(vit, model_type="mine")
    with pytest.raises(InputError, match=r"transformers cannot build .*vit"):
        build(vit)
    assert not (tmp_path / "ran").exists()


def test_bad_folders_are_refused_in_one_line(folders: Path, vit: Path, tmp_path: Path) -> None:
    for folder, message in (
        (tmp_path / "nowhere", r"nowhere holds no config\.json: give a folder that save_pretrained wrote"),
        (folders / "words", r"words takes input_ids, not images"),
    ):
        with pytest.raises(InputError, match=message):
            build(folder)
    with pytest.raises(InputError, match=r"takes images of 3 channels, got \[1, 16, 16\]: set data\.channels"):
        make_image_builder(ModelConfig(f"hf:{vit}"), 3, 1, seed=0, image_size=16)
    with pytest.raises(InputError, match=r"model\.stages is 1, but the encoder has 0 stages"):
        build(vit, freeze=True, stages=1)
    (vit / "model.safetensors").rename(vit / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"holds no weights as safetensors: write it with save_pretrained"):
        build(vit)
    (vit / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"transformers cannot build .*vit"):
        build(vit)


def test_settings_name_a_folder_once() -> None:
    model = ModelConfig("hf:a+b/c")
    assert (model.name, model.weights, model.pretrained, model.foreign) == ("hf", "a+b/c", True, False)
    for fields, message in (
        ({"name": "hf:"}, "hf: names no folder: write hf:DIR"),
        ({"name": "hf:a", "weights": "b"}, r"hf:a has weights: leave out model\.weights=b"),
        ({"name": "hf:a", "arguments": {"x": 1}}, r"hf:a takes no model\.arguments"),
        ({"name": "cnn", "pooling": "mean"}, r"model\.pooling is for transformers, such as hf:DIR, not for cnn"),
    ):
        with pytest.raises(InputError, match=message):
            ModelConfig(**fields)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"model\.name=hf needs a folder"):
        make_image_builder(ModelConfig("hf"), 3, 3, seed=0)
    with pytest.raises(InputError, match=r"model\.pooling cannot be .max.; choose from cls, mean, pooler"):
        ConfigRequest.from_options({"model": "hf:a"}, set=["model.pooling=max"]).resolve()


def test_a_settings_file_names_a_folder_beside_it(tmp_path: Path) -> None:
    (tmp_path / "fedcir.toml").write_text('[model]\nname = "hf:vit"\n')
    config = ConfigRequest(file=tmp_path / "fedcir.toml").resolve()
    assert config.model.weights == str(tmp_path / "vit")


def test_normalisation_is_that_of_the_folder(vit: Path) -> None:
    model = ModelConfig(f"hf:{vit}")
    assert Normalisation.from_model(model, 3) == Normalisation.default(3)
    path = vit / "preprocessor_config.json"
    values = {"do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1]}
    path.write_text(json.dumps({**values, "rescale_factor": 1 / 255}))
    assert Normalisation.from_model(model, 3) == Normalisation((0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
    path.write_text(json.dumps({"do_normalize": False}))
    assert Normalisation.from_model(model, 3) == Normalisation((0.0,) * 3, (1.0,) * 3)
    own = replace(model, mean=(0.1,) * 3, std=(0.2,) * 3)
    assert Normalisation.from_model(own, 3).mean == (0.1,) * 3
    path.write_text("{}")
    with pytest.raises(InputError, match=r"preprocessor_config\.json names no image_mean and image_std"):
        Normalisation.from_model(model, 3)


def test_stored_features_depend_on_contents_and_not_on_the_folder(folders: Path, vit: Path) -> None:
    def make_key(folder: Path, **fields: Any) -> str:
        model = ModelConfig(f"hf:{folder}", freeze=True, **fields)
        network = make_image_builder(model, 3, 3, seed=0, image_size=16).frozen
        assert network is not None
        return FeatureCache(model, network, Normalisation.default(3), (16, 16, 3)).key("torch")

    first = make_key(vit)
    assert first == make_key(folders / "vit")
    change_settings(vit, num_attention_heads=3)  # the tensors and modules are the same
    assert len({first, make_key(vit), make_key(folders / "vit", pooling="mean")}) == 3


@pytest.mark.parametrize(
    ("algorithm", "freeze"), [("fedavg", "false"), ("fedcir", "false"), ("fedcirone", "true"), ("fedfa", "true")]
)
def test_a_run_is_a_model_without_its_folder(
    algorithm: str, freeze: str, vit: Path, tiny: Callable[..., Config], train: Callable[..., Path], tmp_path: Path
) -> None:
    config = tiny(algorithm, f"model.freeze={freeze}", "server.rounds=2", "data.image_size=16")
    config = replace(config, model=ModelConfig(f"hf:{vit}", freeze=freeze == "true"))
    if algorithm == "fedcirone":
        config = replace(config, server=replace(config.server, rounds=1))
    out = train(config, tmp_path / "run")
    images = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), np.uint8)
    before = [prediction.probability for prediction in Predictor(out)(list(images))]
    moved = vit.rename(tmp_path / "moved")
    assert str(tmp_path).encode() not in (out / "model.safetensors").read_bytes()
    assert [prediction.probability for prediction in Predictor(out)(list(images))] == before
    assert export(out, tmp_path / "model.onnx").difference < 1e-4
    if algorithm == "fedavg":
        longer = replace(config, model=ModelConfig(f"hf:{moved}"), server=replace(config.server, rounds=3))
        assert len(load_run(train(longer, out, resume=True)).records) == 3
        change_settings(moved, hidden_dropout_prob=0.1)
        with pytest.raises(InputError, match=r"moved has changed since"):
            train(replace(longer, server=replace(config.server, rounds=4)), out, resume=True)
    assert RunFolder(out).card()["model"]["name"] == "hf"


def test_a_package_may_bring_a_folder_under_a_name(
    vit: Path, tiny: Callable[..., Config], train: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packed.py").write_text(f"from pathlib import Path\nFOLDER = Path({str(vit)!r})\n")
    (tmp_path / "packed-1.0.dist-info").mkdir()
    (tmp_path / "packed-1.0.dist-info/METADATA").write_text("Name: packed\nVersion: 1.0\n")
    (tmp_path / "packed-1.0.dist-info/entry_points.txt").write_text("[fedcir.models]\npacked-vit = packed:FOLDER\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tiny("fedcirone", "server.rounds=1")
    named, by_path = (ModelConfig(name, freeze=True, native_size=True) for name in ("packed-vit", f"hf:{vit}"))
    one, two = (
        train(replace(config, model=model), tmp_path / f"run{number}") for number, model in enumerate((named, by_path))
    )
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert (
        Predictor(one)(np.zeros((1, 8, 8, 3), np.uint8))[0].label
        == Predictor(two)(np.zeros((8, 8, 3), np.uint8))[0].label
    )


OWN = """
import transformers

def make(kind="ViTModel"):
    config = transformers.ViTConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                                    image_size=16, patch_size=8, num_labels=7)
    return getattr(transformers, kind)(config)
"""


@pytest.mark.parametrize("kind", ["ViTModel", "ViTForImageClassification"])
def test_a_callable_may_return_a_network_of_transformers(kind: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    builder = make_image_builder(ModelConfig(f"{tmp_path}/mine.py:make", arguments={"kind": kind}), 3, 3, 0, 16)
    assert builder.features == 12  # and no classifier of seven classes
    assert builder.encoder()(make_images()).shape == (2, 12)


class Tokens(nn.Module):
    """Cut images into tokens (B, T, F), of which the first is of no patch."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.ones(1, 1, 4))
        self.patches = nn.Conv2d(3, 4, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.cls_token.expand(len(x), 1, 4), self.patches(x).flatten(2).mT], dim=1)


def make_sites() -> Iterator[tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]]]:
    for seed in (0, 1):
        rng = torch.Generator().manual_seed(seed)
        data = [(torch.randn(3, 16, 16, generator=rng), number % 2) for number in range(8)]
        yield data, data


@pytest.mark.parametrize("kind", ["vit", "tokens"])
def test_python_takes_a_network_of_transformers_and_one_that_gives_tokens(
    kind: str, folders: Path, tmp_path: Path
) -> None:
    encoder = Tokens() if kind == "tokens" else load_published(folders / "vit")
    options: dict[str, Any] = {"num_classes": 2, "algorithm": FedAvg(), "rounds": 1, "local_steps": 1, "workers": 1}
    result = train(list(make_sites()), encoder=encoder, out=tmp_path / "run", **options)
    assert result.records[-1].accuracy_mean is not None
    x = make_images()
    expected = result.model(x)
    with torch.no_grad():
        torch.testing.assert_close(load_run(tmp_path / "run").model(encoder=encoder)(x), expected)
    assert not encoder._forward_hooks  # the caller's own is as it was
