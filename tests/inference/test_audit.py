"""What an audit finds in a run, and what it leaves in a folder."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedcir
from fedcir.analysis.leakage import Audit
from fedcir.config import AlgorithmConfig, Config
from fedcir.errors import InputError
from fedcir.reporting.leakage_report import audit, describe_audit


@pytest.fixture(scope="module")
def result(run: Path) -> Audit:
    return audit(run, steps=2, images=3)


def test_it_looks_at_the_images_that_each_domain_was_trained_on_and_at_its_test_images(
    run: Path, result: Audit
) -> None:
    manifest = fedcir.load_run(run).manifest
    held = {client["domain"]: len(client["train"]) for client in manifest["clients"]}
    tested = {domain: len(names) for domain, names in manifest["test"].items()}
    assert {item.domain: item.trained for item in result.membership} == held
    assert {item.domain: item.others for item in result.membership} == tested
    assert all(0 <= item.auc.low <= item.auc.value <= item.auc.high <= 1 for item in result.membership)


def test_the_bytes_that_left_the_clients_are_those_of_the_records(run: Path, result: Audit) -> None:
    assert sum(item.bytes for item in result.sent) == sum(record.bytes_up for record in fedcir.load_run(run).records)
    assert [(item.client, item.uploads) for item in result.sent] == [("0 (day)", 5), ("1 (night)", 5)]


def test_images_are_reconstructed_from_the_first_and_the_last_update(result: Audit) -> None:
    assert [item.when for item in result.inverted] == ["round 1", "the last round"]
    for item in result.inverted:
        assert item.originals.shape == item.reconstructed.shape == (3, 3, 8, 8)
        assert 0 <= item.originals.min() < item.originals.max() <= 1
        assert np.isfinite(item.psnr).all()
    assert np.array_equal(result.inverted[0].originals, result.inverted[1].originals)


def test_domains_of_several_clients_are_looked_at_as_a_whole_and_only_the_cohort_sends(
    settings: Callable[..., Config], train: Callable[..., Path], tmp_path: Path
) -> None:
    dealt = ("partition.scheme=dirichlet", "partition.clients=4", "server.active=2", "server.rounds=2")
    run = train(settings("fedproto", *dealt), tmp_path / "run")
    message = audit(run, samples=20)
    assert [item.trained for item in message.membership] == [20, 20]
    assert sum(item.uploads for item in message.sent) == 4
    assert {tuple(item.groups) for item in message.sent} == {("prototypes",)}
    assert message.inverted == ()
    assert message.notes == ("clients upload no model, so no gradient can be inverted",)


def test_batchnorm_of_each_clients_own_stays_out_of_the_gradient(apart: Path) -> None:
    message = audit(apart, steps=1)
    assert len(message.inverted) == 2
    assert len(message.membership) == 2


def test_the_command_prints_tables_and_writes_a_page_a_picture_and_numbers(
    fedcir: Callable[..., Any], plain: Path, tmp_path: Path
) -> None:
    output = fedcir("audit", plain, "--steps", 1, "--out", tmp_path / "audit", "--quiet", "--json")
    assert output.code == 0, output.err
    message = json.loads(output.out)
    assert message == json.loads((tmp_path / "audit" / "audit.json").read_text(encoding="utf-8"))
    assert set(message["membership"]) == {"day", "night"}
    with Image.open(tmp_path / "audit" / "audit.png") as picture:
        assert min(picture.size) > 100
    page = (tmp_path / "audit" / "audit.html").read_text(encoding="utf-8")
    assert "What this does not prove" in page
    assert str(tmp_path) not in page
    output = fedcir("audit", plain, "--steps", 0, "--out", tmp_path / "again")
    assert "what left each client" in output.out
    assert "Only differential privacy bounds" in output.out
    assert not (tmp_path / "again" / "audit.png").exists()


def test_code_that_a_run_names_does_not_run_unless_it_is_trusted(run: Path) -> None:
    read = fedcir.load_run(run)
    named = replace(read, config=replace(read.config, algorithm=AlgorithmConfig("mine.py")))
    with pytest.raises(InputError, match=r"mine\.py, which was not run: if you trust it, set trust_code"):
        audit(named, steps=0)


def test_what_cannot_be_audited_is_said_in_one_line(unfinished: Path, run: Path) -> None:
    with pytest.raises(InputError, match="holds no finished run"):
        audit(unfinished)
    with pytest.raises(InputError, match="samples must be at least 10, got 3"):
        audit(run, samples=3)


SUMS = ("model.freeze=true", "algorithm.standardise=federation")
SKEWED = ("partition.scheme=dirichlet", "partition.clients=6", "partition.beta=0.3")


def test_sums_of_few_images_tell_who_was_trained_on(
    settings: Callable[..., Config], train: Callable[..., Path], tmp_path: Path
) -> None:
    run = train(settings("fedcirone", *SUMS, *SKEWED), tmp_path / "run")
    clients = fedcir.load_run(run).manifest["clients"]
    found = audit(run, steps=0)
    fewest = min(found.sums, key=lambda attack: attack.images)
    assert sorted(attack.images for attack in found.sums) == [
        extreme(len(client["train"]) for client in clients if client["train"]) for extreme in (min, max)
    ]
    assert fewest.images < fewest.features
    assert fewest.membership.auc.value == pytest.approx(1), (
        "images outside the span of so few are told apart for certain"
    )
    assert fewest.rarest_images == 1
    assert fewest.cosine == pytest.approx(1, abs=1e-6), "the sum of one image is its features"
    page = audit(run, steps=0, out=tmp_path / "audit").page
    assert page is not None
    assert f"training images of client {fewest.client} ({fewest.images}) in its sums" in page.read_text()
    assert found.to_json()["sums"][fewest.client]["rarest_images"] == 1


def test_masks_leave_the_total_and_noise_leaves_little(
    settings: Callable[..., Config], train: Callable[..., Path], tmp_path: Path
) -> None:
    masked = audit(train(settings("fedcirone", *SUMS, *SKEWED, "server.masked=true"), tmp_path / "masked"), steps=0)
    assert all(attack.summed > attack.images for attack in masked.sums)
    noise = ("algorithm.project=16", "privacy.unit=example", "privacy.clip=1", "privacy.noise=20")
    noised = audit(train(settings("fedcirone", *SUMS, *SKEWED, *noise), tmp_path / "noised"), steps=0)
    assert all(attack.is_noised and attack.membership.auc.low < 0.6 for attack in noised.sums)
    assert not any("min_per_class" in sentence for sentence in describe_audit(noised))
