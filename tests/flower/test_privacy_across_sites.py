"""Privacy settings and short uploads across sites, with the real local_update behind a grid in memory."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import Message
from grid import run_of_flower  # noqa: F401
from test_strategy import grid, strategy
from test_transport import across, model, rounds, shares

from fedcir.algorithms import make_algorithm
from fedcir.config import Config
from fedcir.data.federation import open_federation
from fedcir.flower.wire import pack_reply, unpack_arrays
from fedcir.runtime.rounds import SerialTransport
from fedcir.runtime.session import make_trainer, open_session
from fedcir.server.accounting import Accountant

Tiny = Callable[..., Config]
ON = {"privacy.clip": 0.5, "privacy.noise": 1.0}


@pytest.mark.parametrize(("place", "noise"), [("server", 1.0), ("client", 0.5)])
def test_every_round_tells_its_epsilon_and_no_two_runs_have_the_same_noise(
    tmp_path: Path, place: str, noise: float
) -> None:
    """Noise of clients counts half: it hides which data a client has, and these may differ by twice the clip."""
    heads = []
    for number in range(2):
        made = strategy("fedcir", set={**ON, "privacy.place": place}).start(grid(tmp_path / str(number)), num_rounds=2)
        metrics = [made.train_metrics_clientapp[round] for round in (1, 2)]
        assert [metric["epsilon"] for metric in metrics] == [Accountant(noise, 1e-5).epsilon(steps) for steps in (1, 2)]
        assert set(metrics[0]) == {"epsilon", "replies", "dropped"}, "no losses, which have no noise"
        assert made.arrays is not None
        heads.append(unpack_arrays(made.arrays)["model"]["head.bias"])
    assert not torch.equal(*heads)


def test_where_the_cohort_is_secret_neither_metrics_nor_log_tell_of_it(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    seen = []
    for number, active in enumerate((1, 2)):
        made = strategy("fedavg", active=active, set=ON).start(grid(tmp_path / str(number)), num_rounds=3)
        seen += [set(item) for item in made.train_metrics_clientapp.values()]
    assert seen == [{"epsilon"}] * 6
    assert "replies" not in log.text
    assert "dropped" not in log.text


def test_after_the_last_round_that_epsilon_allows_the_model_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = Accountant(1.0, 1e-5).epsilon(2)
    nodes = grid(tmp_path)
    with caplog.at_level("WARNING", "flwr"):
        made = strategy("fedavg", set={**ON, "privacy.epsilon": limit}).start(nodes, num_rounds=4)
    assert sorted(made.train_metrics_clientapp) == [1, 2]
    assert len(nodes.asked("train")) == 2 * 3
    assert "round 3 would bring epsilon to 9.01, above privacy.epsilon=7.0" in caplog.text


def test_a_short_upload_is_short_on_the_wire(tiny: Tiny) -> None:
    sizes = []
    for kind in ("float32", "bfloat16", "int8"):
        config = tiny("fedavg", f"server.upload={kind}")
        algorithm, federation = make_algorithm(config.algorithm), open_federation(config)
        session = open_session(config, algorithm, federation)
        trainer = make_trainer(session.config, algorithm, federation.builder)
        (reply,) = SerialTransport(trainer, federation.clients).train(session.state, (0,))
        message = Message(pack_reply(reply, algorithm.trains), 1, "train")
        arrays, others = message.content.array_records["arrays"], message.content.config_records.values()
        sizes.append(sum(len(a.data) for a in arrays.values()) + sum(len(b) for o in others for b in o.values()))  # type: ignore[arg-type]
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[2] < 0.4 * sizes[0]


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_rounded_uploads_across_nodes_give_the_bits_of_the_run_in_process(
    tiny: Tiny, train: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    config = tiny("fedcir", "server.rounds=2", "run.workers=1", f"server.upload={kind}")
    one = train(config, tmp_path / "one")
    across(shares(tmp_path), config, tmp_path / "two")
    assert model(tmp_path / "two") == model(one)
    assert rounds(tmp_path / "two") == rounds(one)


def test_a_deployment_counts_every_round_that_it_begins(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("fedavg", "server.rounds=2", "run.workers=1", "model.norm=group", "privacy.clip=1", "privacy.noise=1")
    nodes = shares(tmp_path)
    across(nodes, config, tmp_path / "run", until=1)
    saved = tmp_path / "run" / "checkpoint"
    assert [path.name for path in saved.iterdir()] == ["round-000001.safetensors"]
    for path in saved.iterdir():  # as a server that was killed before it could save
        path.unlink()
    across(nodes, config, tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "releases").read_text(encoding="utf-8"))["begun"] == 3
    assert [item["epsilon"] for item in rounds(tmp_path / "run")] == [
        Accountant(1.0, 1e-5).epsilon(steps) for steps in (2, 3)
    ]
