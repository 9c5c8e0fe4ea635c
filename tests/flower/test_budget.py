"""A site that insists on privacy: what it counts, what it answers again, and what it refuses to any server."""

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crossing import Tiny, across, dropped, model, shares
from flwr.app import Message, MessageType
from grid import MemoryGrid, Node, run_of_flower, site  # noqa: F401
from PIL import Image

from fedcir.config import Config, config_from_tables, merge_tables, parse_assignment
from fedcir.errors import RunError
from fedcir.flower.server_app import DeploymentSettings, open_deployment
from fedcir.flower.wire import TaskHeader, pack_task, unpack_arrays, unpack_task
from fedcir.server.accounting import Accountant
from fedcir.types import Groups

LOG = "; the site's log tells more"
NOISE = ("privacy.clip=0.5", "privacy.noise=1.0", "privacy.place=client", "model.norm=group")
ONE, TWO = (Accountant(1.0, 1e-5, adjacency="replace-one").epsilon(uploads) for uploads in (1, 2))
"""Epsilon of so many uploads under these settings."""
Ask = Callable[..., Message]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (root / label).mkdir()
        for image in range(10):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3)).astype(np.uint8)).save(root / label / f"{image}.png")
    return root


def config(*assignments: str) -> Config:
    tables: dict[str, Any] = {
        "data": {"name": "folders", "image_size": 8},
        "model": {"width": 2},
        "local": {"steps": 2, "batch_size": 4},
        "server": {"rounds": 1},
        "algorithm": {"name": "fedavg"},
    }
    for assignment in assignments:
        tables = merge_tables(tables, parse_assignment(assignment))
    return config_from_tables(tables)


def clinic(pictures: Path, folder: Path, policy: str = "") -> Node:
    folder.mkdir(exist_ok=True)
    (folder / "policy.toml").write_text(policy, encoding="utf-8")
    own = {"state": str(folder / "state"), "policy": str(folder / "policy.toml")}
    return site(domain="clinic", data_root=str(pictures), device="cpu", **own)


def run_once(node: Node, settings: Config, out: Path) -> tuple[list[dict[str, str]], Message]:
    """A run at one site: clients that were dropped in each round, and the first request to train."""
    grid = MemoryGrid({1: node})
    with open_deployment(grid, DeploymentSettings(settings, out, False, 1, 0.0, 60.0, False)) as (session, rounds):
        list(rounds)
    request = next(sent for sent in grid.sent if sent.metadata.message_type == MessageType.TRAIN)
    return [record.dropped for record in session.records], request


def altered(
    request: Message,
    order: Callable[[TaskHeader], TaskHeader] = lambda order: order,
    groups: Callable[[Groups], Groups] = lambda groups: groups,
) -> Message:
    """The request of a server that changes something."""
    received, settings = unpack_task(request.content)
    content = pack_task(groups(received), ("model",), order(settings))
    return Message(content, 1, MessageType.TRAIN, group_id=request.metadata.group_id)


def moved(groups: Groups) -> Groups:
    return {"model": {**groups["model"], "head.bias": groups["model"]["head.bias"] + 0.001}}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "state" / "audit.jsonl").read_text(encoding="utf-8").splitlines()]


def arrays(reply: Message | None) -> dict[str, torch.Tensor]:
    assert reply is not None
    return unpack_arrays(reply.content.array_records["arrays"])["model"]


def test_a_request_that_comes_again_gets_the_same_bytes_and_is_not_counted(pictures: Path, tmp_path: Path) -> None:
    node = clinic(pictures, tmp_path / "site", f"[privacy]\nmax_epsilon = {ONE + 0.01}")
    _, request = run_once(node, config(*NOISE), tmp_path / "run")
    first, second = (arrays(node(request)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    reconnected = arrays(node(altered(request, lambda order: replace(order, clients={1: 0, 2: 7}))))
    assert all(torch.equal(first[name], reconnected[name]) for name in first)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "site" / "state").rglob("*") if path.is_dir()}
    assert modes == {0o700}
    trained = [line for line in lines(tmp_path / "site") if line["event"] == "trained"]
    assert [line.get("upload") for line in trained] == [1, None, None, None]
    assert [line.get("repeated") for line in trained] == [None, True, True, True]
    assert trained[0]["epsilon"] == pytest.approx(ONE)


def test_another_request_for_the_same_round_is_counted_until_the_budget_is_used_up(
    pictures: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    node = clinic(pictures, tmp_path / "site", f"[privacy]\nmax_epsilon = {TWO + 0.01}")
    _, request = run_once(node, config(*NOISE), tmp_path / "run")
    second = altered(request, groups=moved)
    assert arrays(node(second))
    third = node(altered(second, groups=moved))
    assert third is not None
    assert third.error.reason == f"its privacy budget is used up{LOG}"
    assert f"above max_epsilon = {TWO + 0.01:g} of its policy, at delta = 1e-05" in log.text
    ledger = tmp_path / "site" / "state" / "privacy.json"
    assert stat.S_IMODE(ledger.stat().st_mode) == 0o600
    (spent,) = json.loads(ledger.read_text(encoding="utf-8"))["sites"]["clinic"]
    assert (spent["steps"], spent["uploads"], spent["adjacency"]) == (2, 2, "replace-one")


def test_the_budget_is_counted_over_all_runs(pictures: Path, tmp_path: Path) -> None:
    node = clinic(pictures, tmp_path / "site", f"[privacy]\nmax_epsilon = {ONE + 0.01}")
    first, _ = run_once(node, config(*NOISE), tmp_path / "first")
    assert first == [{}]
    with pytest.raises(RunError, match="its privacy budget is used up"):
        run_once(node, config(*NOISE), tmp_path / "second")


def test_example_privacy_counts_every_step_at_the_rate_of_the_batch(pictures: Path, tmp_path: Path) -> None:
    settings = config("privacy.clip=0.5", "privacy.noise=1.0", "privacy.unit=example", "model.norm=group")
    node = clinic(pictures, tmp_path / "site", "[privacy]\nmax_epsilon = 100")
    run_once(node, settings, tmp_path / "run")
    (trained,) = [line for line in lines(tmp_path / "site") if line["event"] == "trained"]
    assert trained["epsilon"] == pytest.approx(Accountant(1.0, 1e-5, 4 / 16).epsilon(2))


SUMS = (
    *("algorithm.name=fedcirone", "algorithm.project=4", "model.freeze=true"),
    *("privacy.clip=1", "privacy.noise=1.0", "privacy.unit=example"),
)


def test_noised_sums_are_counted_as_one_release_of_the_site(pictures: Path, tmp_path: Path) -> None:
    epsilon = Accountant(1.0, 1e-5).epsilon(1)
    node = clinic(pictures, tmp_path / "site", f"[privacy]\nmin_noise = 1\nmax_epsilon = {epsilon + 0.01}")
    dropped, request = run_once(node, config(*SUMS), tmp_path / "run")
    assert dropped == [{}]
    assert epsilon == pytest.approx(4.377, abs=1e-3), "that of the analytic Gaussian mechanism"
    (trained,) = [line for line in lines(tmp_path / "site") if line["event"] == "trained"]
    assert trained["epsilon"] == pytest.approx(epsilon)
    assert list(trained["bytes"]) == ["sums"]
    other = node(altered(request, groups=lambda groups: {"model": {**groups["model"], "head.bias": torch.ones(2)}}))
    assert other is not None
    assert other.error.reason == f"its privacy budget is used up{LOG}"


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        ("[privacy]\nmin_noise = 2", SUMS, "does not allow privacy.noise=1"),
        ("[privacy]\nmin_noise = 1", SUMS[:3], "asks for privacy.clip and privacy.noise"),
        ("min_per_class = 9", SUMS, "asks for more images of each class than the site has"),
    ],
)
def test_a_policy_binds_runs_that_ask_for_sums(
    pictures: Path, tmp_path: Path, policy: str, settings: tuple[str, ...], message: str
) -> None:
    node = clinic(pictures, tmp_path / "site", policy)
    with pytest.raises(RunError, match=message):
        run_once(node, config(*settings), tmp_path / "run")


def test_a_site_refuses_sums_that_noise_does_not_cover_though_the_server_did_not_check(
    pictures: Path, tmp_path: Path
) -> None:
    node = clinic(pictures, tmp_path / "site")
    _, request = run_once(node, config(*SUMS), tmp_path / "run")
    unprojected = config(*SUMS, "privacy.clip=30")
    reply = node(altered(request, lambda order: replace(order, config=unprojected)))
    assert reply is not None
    assert reply.error.reason == f"the run's noise does not cover all that it would upload{LOG}"


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "deleted": (Path.unlink, "its count of privacy spent is incomplete"),
    "damaged": (lambda path: path.write_text("{"), "its count of privacy spent cannot be read"),
    "edited": (lambda path: path.write_text(path.read_text().replace("1", "0")), "its count of privacy spent cannot"),
}


@pytest.mark.parametrize(("change", "message"), FAULTS.values(), ids=FAULTS)
def test_a_count_that_was_deleted_or_changed_lets_nothing_leave(
    pictures: Path, tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    node = clinic(pictures, tmp_path / "site", "[privacy]\nmax_epsilon = 1000")
    _, request = run_once(node, config(*NOISE), tmp_path / "run")
    change(tmp_path / "site" / "state" / "privacy.json")
    reply = node(altered(request, groups=moved))
    assert reply is not None
    assert reply.error.reason.startswith(message)


def test_a_model_whose_change_cannot_be_clipped_is_refused(pictures: Path, tmp_path: Path) -> None:
    """A bias of -inf stays as it is and makes the norm NaN, so that nothing would be scaled down."""
    node = clinic(pictures, tmp_path / "site")
    _, request = run_once(node, config(*NOISE), tmp_path / "run")

    def silenced(groups: Groups) -> Groups:
        return {"model": {**groups["model"], "head.bias": torch.tensor([0.0, -torch.inf])}}

    reply = node(altered(request, groups=silenced))
    assert reply is not None
    assert "values that are not finite, so its change cannot be clipped" in reply.error.reason


@pytest.mark.parametrize(
    "settings",
    [
        ("privacy.clip=0.5", "privacy.noise=1.0", "privacy.place=client"),
        ("privacy.clip=0.5", "privacy.noise=1.0", "privacy.unit=example"),
    ],
)
def test_a_site_refuses_noise_that_does_not_cover_batchnorm_though_the_server_did_not_check(
    pictures: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    node = clinic(pictures, tmp_path / "site")
    _, request = run_once(node, config(), tmp_path / "run")
    private = config(*settings)
    reply = node(altered(request, lambda order: replace(order, config=private)))
    assert reply is not None
    assert reply.error.reason == f"the run's noise does not cover all that it would upload{LOG}"


def test_a_round_that_a_killed_server_repeats_costs_the_sites_nothing(tiny: Tiny, tmp_path: Path) -> None:
    settings = tiny("fedavg", "server.rounds=2", "run.workers=1", *NOISE)
    grid = shares(tmp_path)
    across(grid, settings, tmp_path / "whole")
    across(grid, settings, tmp_path / "run", until=1)
    for path in (tmp_path / "run" / "checkpoint").iterdir():  # as a server that was killed before it could save
        path.unlink()
    across(grid, settings, tmp_path / "run", resume=True)
    assert dropped(tmp_path / "run") == [{}, {}]
    assert model(tmp_path / "run") != model(tmp_path / "whole")  # each run has noise of its own
    for number in range(3):
        ledger = json.loads((tmp_path / "state" / str(number) / "privacy.json").read_text(encoding="utf-8"))
        assert [entry["uploads"] for entry in ledger["sites"][str(number)]] == [4]
