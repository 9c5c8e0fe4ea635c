"""Courier files: a site's message without a network, and the model of several, the same bytes as of a run."""

import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcir
from fedcir.analysis.courier_heads import make_head_reply
from fedcir.config import Config, config_from_tables
from fedcir.courier import CourierFile, describe_courier_file, make_courier_file, merge_courier_files, read_courier_file
from fedcir.courier.message_file import pack_signed_file
from fedcir.data.federation import open_federation
from fedcir.errors import InputError
from fedcir.models.closed_form import FeatureSums
from fedcir.runs.reader import load_run
from fedcir.signing import open_key

SITES = ("east", "north", "south")
Write = Callable[..., CourierFile]
Train = Callable[..., Path]


def paths(files: list[CourierFile]) -> list[Path]:
    return [file.path for file in files]


def merged(files: list[CourierFile], encoder: str, out: Path, **other: Any) -> bytes:
    merge_courier_files(paths(files), out, encoder=encoder, **other)
    return (out / "model.safetensors").read_bytes()


def run_config(folders: Path, encoder: str, **algorithm: Any) -> Config:
    """The settings of a run over the folders of all sites."""
    return config_from_tables(
        {
            "data": {"name": "folders", "root": str(folders), "image_size": 16, "val_fraction": 0.2},
            "model": {"name": encoder, "freeze": True},
            "algorithm": {"name": "fedcirone", **algorithm},
            "server": {"rounds": 1},
            "run": {"workers": 1, "device": "cpu"},
        }
    )


@pytest.mark.parametrize("algorithm", [{}, {"standardise": "client"}, {"head": "lda", "balance": "labels"}], ids=str)
def test_the_model_has_the_bytes_of_a_run_over_all_folders(
    folders: Path, encoder: str, sent: list[CourierFile], train: Train, tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    run = train(run_config(folders, encoder, **algorithm), tmp_path / "run")
    settings = {f"algorithm.{name}": value for name, value in algorithm.items()}
    model = merged(sent[::-1], encoder, tmp_path / "merged", set=settings)
    assert model == (run / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_model_has_the_bytes_of_a_run_on_flower(
    folders: Path, encoder: str, sent: list[CourierFile], tmp_path: Path
) -> None:
    from fedcir.flower.local_federation import run_local_federation

    config = run_config(folders, encoder)
    list(run_local_federation(replace(config, run=replace(config.run, workers=None)), tmp_path / "flower"))
    assert merged(sent, encoder, tmp_path / "merged") == (tmp_path / "flower" / "model.safetensors").read_bytes()


def test_the_result_is_an_ordinary_run(folders: Path, encoder: str, sent: list[CourierFile], tmp_path: Path) -> None:
    merged(sent, encoder, tmp_path / "run")
    run = load_run(tmp_path / "run", trust_code=True)
    assert run.finished
    assert run.summary is not None
    assert run.summary["final"] is None  # no site sent an accuracy
    predictor = fedcir.Predictor(tmp_path / "run", site="north", trust_code=True, device="cpu")
    images = sorted((folders / "north").rglob("*.png"))
    assert np.mean([p.label == path.parent.name for p, path in zip(predictor(images), images, strict=True)]) > 0.9
    evaluated = fedcir.evaluate(tmp_path / "run", data_root=str(folders), trust_code=True, out=tmp_path / "evaluation")
    assert evaluated.mean.value > 0.9


def test_the_worth_of_merged_files_is_that_of_a_run_after_one_more_message(
    folders: Path, encoder: str, sent: list[CourierFile], train: Train, tmp_path: Path
) -> None:
    run = train(run_config(folders, encoder), tmp_path / "one" / "run")
    merged(sent, encoder, out := tmp_path / "two" / "run", worth=True)
    with pytest.raises(InputError, match="have not tested its heads yet"):
        fedcir.worth(out, trust_code=True)
    merged_run = load_run(out, trust_code=True)
    replies = []
    for file in sent:
        site, reply = file.header.site, tmp_path / f"{file.header.site}.hits"
        make_head_reply(merged_run, folders / site, reply, key=file.path.with_suffix(".key"))
        replies.append(reply)
    worth = fedcir.worth(out, replies=replies[::-1], trust_code=True)
    assert (
        worth.to_json() == fedcir.worth(run, trust_code=True).to_json() == fedcir.worth(out, trust_code=True).to_json()
    )
    with pytest.raises(InputError, match="the reply of 'south' is missing"):
        fedcir.worth(out, replies=replies[:2], trust_code=True)
    with pytest.raises(InputError, match="is the second reply of 'east'"):
        fedcir.worth(out, replies=[replies[0], *replies], trust_code=True)


def test_a_reply_about_heads_is_taken_from_the_sites_key_and_of_this_run_only(
    folders: Path, encoder: str, sent: list[CourierFile], tmp_path: Path
) -> None:
    merged(sent, encoder, tmp_path / "run", worth=True)
    merged(sent[:2], encoder, tmp_path / "other", worth=True)
    run, other = (load_run(tmp_path / name, trust_code=True) for name in ("run", "other"))
    keys = [file.path.with_suffix(".key") for file in sent]
    reply = tmp_path / "east.hits"
    make_head_reply(run, folders / "east", reply, key=keys[1])
    with pytest.raises(InputError, match="and not by the key of 'east'"):
        fedcir.worth(tmp_path / "run", replies=[reply], trust_code=True)
    make_head_reply(other, folders / "east", reply, key=keys[0])
    with pytest.raises(InputError, match="about the heads of another run"):
        fedcir.worth(tmp_path / "run", replies=[reply], trust_code=True)
    make_head_reply(run, folders / "east", reply, key=keys[0])
    whole = reply.read_bytes()
    for position in (5, 150, len(whole) - 1):
        reply.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(InputError, match=r"cannot read .*; ask the site for the file again"):
            fedcir.worth(tmp_path / "run", replies=[reply], trust_code=True)
    for site, folder, key, message in (
        ("west", "east", keys[0], "'west' is no site"),
        ("east", "south", keys[0], "does not have the"),
        ("east", "east", tmp_path / "none.key", "there is no key"),
    ):
        with pytest.raises(InputError, match=message):
            make_head_reply(run, folders / folder, tmp_path / "new.hits", site=site, key=key)
        assert not (tmp_path / "new.hits").exists()
    merged(sent, encoder, tmp_path / "plain")
    with pytest.raises(InputError, match="fedcir merge --worth"):
        make_head_reply(load_run(tmp_path / "plain", trust_code=True), folders / "east", reply, key=keys[0])


def test_a_file_holds_the_sums_of_its_training_and_validation_images(
    folders: Path, encoder: str, sent: list[CourierFile]
) -> None:
    client = open_federation(run_config(folders, encoder)).clients[2]
    for part, examples in (("train", client.train), ("validation", client.validation)):
        assert examples is not None
        z, labels = examples.batch(np.arange(len(examples)), torch.device("cpu"), torch.contiguous_format)
        halves = {half: sent[2].sums[f"{part}_{half}"] for half in ("high", "low")}
        sums = FeatureSums.from_exact(halves, z.shape[1])
        assert torch.allclose(sums.gram, z.double().T @ z.double(), atol=1e-6)
        assert sums.counts.tolist() == torch.bincount(labels, minlength=3).tolist() == sent[2].images_by_class(part)
    assert sent[2].images_by_class("train")[1] == 0  # the site has no dog


def test_a_file_is_described_in_words_with_all_that_it_holds(sent: list[CourierFile]) -> None:
    about = dict(describe_courier_file(sent[0]))
    assert about["site"] == "east, of the federation pets"
    assert about["signed by"].startswith(sent[0].signature.fingerprint)
    assert about["images"].startswith("29 for training + 7 for validation (a share of 0.2); 9 for the site's own tests")
    assert about["classes"].startswith("3, with the number of images of each: cat ")
    assert about["encoder"].startswith("mine.py:small")
    assert sent[0].header.encoder in about["encoder"]
    assert "9 numbers of an image, which are 6 features and 3 class labels; 2 x 45 whole numbers" in about["sums"]
    text = sent[0].path.read_bytes()
    assert b".png" not in text
    assert str(sent[0].path.parent).encode() not in text


def test_equal_images_give_equal_files(write: Write, sent: list[CourierFile], tmp_path: Path) -> None:
    again = write("east", tmp_path, key=sent[0].path.with_suffix(".key"))
    assert again.path.read_bytes() == sent[0].path.read_bytes()


def test_the_key_is_made_for_its_owner_only(sent: list[CourierFile]) -> None:
    assert stat.S_IMODE(os.stat(sent[0].path.with_suffix(".key")).st_mode) == 0o600


def replaced(file: CourierFile, out: Path, key: Path | None = None, **fields: Any) -> CourierFile:
    """The same message with another header, signed again: by the site, or with another key."""
    key = key or file.path.with_suffix(".key")
    content = pack_signed_file("courier", replace(file.header, **fields), file.sums, open_key(key))
    out.write_bytes(content)
    return read_courier_file(out)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"federation": "plants"}, r"differ in federation \(pets and plants\): give all sites the same --federation"),
        ({"classes": ("cat", "dog", "owl")}, "has the class 'fox' and .* has not: give the same --classes"),
        ({"classes": ("dog", "cat", "fox")}, "differ in classes"),
        ({"image_size": 32}, r"differ in image_size \(16 and 32\)"),
        ({"mean": (0.0, 0.0, 0.0)}, "differ in mean"),
        ({"encoder": "0" * 64}, "differ in encoder .*: give all sites the same version of the encoder"),
        (
            {"model": {"name": "cnn", "freeze": True}},
            r"differ in model.batchnorm \(average and None\), model.name \(mine.py:small and cnn\)",
        ),
        ({"seed": 1}, r"differ in seed \(0 and 1\)"),
        ({"val_fraction": 0.5}, "differ in val_fraction"),
        ({"site": "east"}, "are of the same site: leave one of them out"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mixed_up_files_are_refused(
    encoder: str, sent: list[CourierFile], tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    other = replaced(sent[1], tmp_path / "other.fedcir", **fields)
    with pytest.raises(InputError, match=message):
        merged([sent[0], other, sent[2]], encoder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_message_counts_once(encoder: str, sent: list[CourierFile], tmp_path: Path) -> None:
    renamed = replaced(sent[0], tmp_path / "renamed.fedcir", site="west")
    copied = replaced(sent[0], tmp_path / "copied.fedcir", tmp_path / "west.key", site="west")
    for other, message in ((sent[0], "same site"), (renamed, "same key"), (copied, "same sums")):
        with pytest.raises(InputError, match=message):
            merged([*sent, other], encoder, tmp_path / "run")


def test_only_known_keys_are_merged_where_they_are_named(
    encoder: str, sent: list[CourierFile], write: Write, tmp_path: Path
) -> None:
    known = {file.signature.fingerprint: file.header.site for file in sent}
    merged(sent, encoder, tmp_path / "run", known_keys=known)
    forged = write("east", tmp_path)  # the same images, and another key
    with pytest.raises(InputError, match="which is no known key"):
        merged([forged, *sent[1:]], encoder, tmp_path / "two", known_keys=known)
    swapped = dict(zip(known, list(known.values())[::-1], strict=True))
    with pytest.raises(InputError, match="is signed by the key of 'south', but says that it is 'east'"):
        merged(sent, encoder, tmp_path / "two", known_keys=swapped)


def test_code_that_a_file_names_is_not_run(sent: list[CourierFile], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is code of the sites' own: name your copy as --encoder"):
        merge_courier_files(paths(sent), tmp_path / "run")


def test_an_encoder_with_other_weights_is_refused(encoder: str, sent: list[CourierFile], tmp_path: Path) -> None:
    text = Path(encoder.removesuffix(":small")).read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(text.replace("manual_seed(7)", "manual_seed(8)"), encoding="utf-8")
    with pytest.raises(InputError, match="has other weights here"):
        merged(sent, f"{tmp_path}/mine.py:small", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_class_that_no_site_has_is_refused(write: Write, encoder: str, tmp_path: Path) -> None:
    file = write("south", tmp_path)
    with pytest.raises(InputError, match="no site has a training image of 'dog'"):
        merged([file], encoder, tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"set": ["algorithm.head=lda"]}, "give it to `fedcir merge`"),
        ({"set": ["server.rounds=3"]}, r"\[server\] does not change a site's message"),
        ({"set": ["model.freeze=false"]}, "is of a frozen encoder"),
        ({"site": "\x1b[31mred"}, "printable"),
        ({"federation": " "}, "printable"),
        ({"classes": ("cat",)}, "a classifier needs two classes"),
    ],
    ids=str,
)
def test_what_no_message_can_be_made_of_is_refused_and_leaves_nothing(
    write: Write, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        write("east", tmp_path, **settings)
    assert list(tmp_path.iterdir()) == []


def test_a_merge_takes_settings_of_the_head_only(encoder: str, sent: list[CourierFile], tmp_path: Path) -> None:
    for setting in ("data.image_size=32", "model.stages=2", "server.rounds=2"):
        with pytest.raises(InputError, match="was decided at the sites"):
            merged(sent, encoder, tmp_path / "run", set=[setting])


def test_a_site_hears_of_images_that_are_not_used(folders: Path, encoder: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {"federation": "pets", "encoder": encoder, "image_size": 16}
    _, notes = make_courier_file(folders / "east", tmp_path / "a.fedcir", classes=("cat", "dog", "owl"), **common)
    assert "images of 'fox' are left out: --classes does not name them" in notes
    assert "there is no image of 'owl'" in notes


NOISE = [
    "data.val_fraction=0.2",
    "privacy.unit=example",
    "privacy.clip=1",
    "privacy.noise=0.01",
    "algorithm.project=16",
]


def test_noise_is_added_at_the_site_and_the_merge_knows_of_it(
    folders: Path, encoder: str, write: Write, tmp_path: Path
) -> None:
    files = [write(site, tmp_path, set=NOISE) for site in ("east", "north")]
    again = write("east", Path(tempfile.mkdtemp(dir=tmp_path)), set=NOISE, key=tmp_path / "east.key")
    assert again.content != files[0].content  # its noise does not come from the seed
    about = dict(describe_courier_file(files[0]))
    assert about["noise"].startswith("Gaussian, 0.01 times as large")
    assert about["classes"] == "3: cat, dog, fox"  # the counts of classes have noise
    assert list(files[0].header.parts) == ["train"]
    merged(files, encoder, tmp_path / "run")
    summary = load_run(tmp_path / "run").summary
    assert summary is not None
    assert summary["privacy"]["randomness"] == "system"
    assert summary["privacy"]["unit"] == "example"
    exact = write("south", tmp_path, set=["data.val_fraction=0.2", "algorithm.project=16"])
    with pytest.raises(InputError, match=r"differ in noise \(0.01 and 0.0\): give all sites the same privacy.noise"):
        merged([*files, exact], encoder, tmp_path / "other")


def test_a_projection_is_chosen_at_the_sites(
    folders: Path, encoder: str, write: Write, train: Train, tmp_path: Path
) -> None:
    files = [write(site, tmp_path, set=["data.val_fraction=0.2", "algorithm.project=4"]) for site in SITES]
    run = train(run_config(folders, encoder, project=4), tmp_path / "run")
    assert merged(files, encoder, tmp_path / "merged") == (run / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="was decided at the sites"):
        merged(files, encoder, tmp_path / "other", set=["algorithm.project=5"])
