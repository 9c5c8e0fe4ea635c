"""Uploads in fewer bytes: what is sent, what is lost, and what a client makes up for later."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcir.algorithms import make_algorithm
from fedcir.client.uploads import UploadFormat, compress_update, decompress_update
from fedcir.config import Config
from fedcir.data.federation import open_federation
from fedcir.errors import InputError
from fedcir.runtime.rounds import SerialTransport, run_rounds, step_server
from fedcir.runtime.session import Session, make_trainer, open_session
from fedcir.runtime.simulation import open_run
from fedcir.types import Groups

Tiny = Callable[..., Config]
SHORT: tuple[UploadFormat, ...] = ("bfloat16", "int8")


def groups(values: torch.Tensor) -> Groups:
    return {"model": {"w": values, "norm.running_var": torch.tensor([0.3]), "steps": torch.tensor(4)}}


def opened(config: Config) -> tuple[Session, SerialTransport]:
    algorithm, federation = make_algorithm(config.algorithm), open_federation(config)
    session = open_session(config, algorithm, federation)
    return session, SerialTransport(make_trainer(session.config, algorithm, federation.builder), federation.clients)


def test_int8_counts_in_steps_of_the_largest_change_by_127() -> None:
    change = torch.tensor([127.0, -254.0, 0.0, 2.0])
    received = groups(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    sent, errors = compress_update(
        groups(received["model"]["w"] + change), received, {}, "int8", np.random.default_rng(0)
    )
    assert sent["scales"]["model/w"] == 2.0
    assert sent["model"]["w"].dtype == torch.int8
    assert sent["model"]["w"][1:].tolist() == [-127, 0, 1]
    assert sent["model"]["w"][0] in (63, 64)
    assert errors["model/w"].abs().tolist() == [1.0, 0.0, 0.0, 0.0]
    assert sent["model"]["norm.running_var"].dtype == torch.float32
    whole = decompress_update(sent, received)
    assert whole.keys() == {"model"}
    assert whole["model"]["w"][1:].tolist() == [-252.0, 3.0, 6.0]


def test_bfloat16_keeps_what_it_can_hold_and_goes_to_one_of_two_neighbours() -> None:
    change = torch.tensor([1.0, -1.5, 0.0, 1.0 + 2**-10, -1.0 - 2**-10])
    zero = groups(torch.zeros(5))
    sent, _ = compress_update(groups(change), zero, {}, "bfloat16", np.random.default_rng(0))
    back = decompress_update(sent, zero)["model"]["w"]
    assert sent["model"]["w"].element_size() == 2
    assert back[:3].tolist() == [1.0, -1.5, 0.0]
    assert back[3] in (1.0, 1.0 + 2**-7)
    assert back[4] in (-1.0, -1.0 - 2**-7)


@pytest.mark.parametrize("kind", SHORT)
def test_rounding_is_right_on_average(kind: UploadFormat) -> None:
    change = torch.tensor([1.0, 0.7003, -0.1234, 1e-3]).repeat(20_000)
    sent, _ = compress_update(groups(change), groups(torch.zeros_like(change)), {}, kind, np.random.default_rng(0))
    back = decompress_update(sent, groups(torch.zeros_like(change)))["model"]["w"].view(-1, 4)
    assert not torch.equal(back[0], change[:4])
    torch.testing.assert_close(back.mean(0), change[:4], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", SHORT)
def test_what_rounding_loses_is_made_up_for_in_later_rounds(kind: UploadFormat) -> None:
    torch.manual_seed(0)
    change, zero, rng = torch.randn(50), groups(torch.zeros(50)), np.random.default_rng(1)
    total, errors = torch.zeros(50), {}
    for _ in range(30):
        sent, errors = compress_update(groups(change), zero, errors, kind, rng)
        total += decompress_update(sent, zero)["model"]["w"]
    torch.testing.assert_close(total + errors["model/w"], 30 * change, atol=1e-3, rtol=1e-4)
    assert errors["model/w"].abs().max() <= 2 * change.abs().max() / 100


def test_no_change_and_a_scalar_can_be_sent() -> None:
    for value in (torch.zeros(3), torch.tensor(0.0), torch.tensor(2.0), torch.empty(0)):
        for kind in SHORT:
            sent, _ = compress_update(
                groups(value), groups(torch.zeros_like(value)), {}, kind, np.random.default_rng(0)
            )
            back = decompress_update(sent, groups(torch.zeros_like(value)))["model"]["w"]
            torch.testing.assert_close(back, value)


@pytest.mark.parametrize(("kind", "share"), [("bfloat16", 0.5), ("int8", 0.25)])
def test_the_record_counts_the_bytes_that_were_sent(tiny: Tiny, kind: str, share: float) -> None:
    whole, short = (opened(tiny("scaffold", "model.norm=group", *given)) for given in ((), (f"server.upload={kind}",)))
    session, transport = whole
    reply = next(iter(transport.train(session.state, (0, 1, 2))))
    changes = sum(tensor.nbytes for tensor in reply.tensors["change"].values())
    model = sum(tensor.nbytes for tensor in reply.tensors["model"].values())
    scales = 4 * len(reply.tensors["model"]) if kind == "int8" else 0
    record = next(run_rounds(*short))
    assert record.bytes_up == 3 * (changes + share * model + scales)
    assert record.dropped == {}


def test_a_forged_scale_or_a_whole_upload_is_dropped(tiny: Tiny) -> None:
    session, transport = opened(tiny("fedavg", "server.upload=int8"))
    first, second, third = transport.train(session.state, (0, 1, 2))
    scales = {name: torch.tensor(3e38) for name in first.tensors["scales"]}
    forged = replace(first, tensors={**first.tensors, "scales": scales})
    whole = replace(second, tensors=session.evaluation_groups(session.state))
    _, collected = step_server(session, [forged, whole, third], (0, 1, 2))
    assert "is not finite" in collected.dropped["0"]
    assert collected.dropped["1"].startswith("model/")
    assert collected.count == 1


def test_a_resumed_run_gives_the_same_bits_with_any_number_of_workers(tiny: Tiny, tmp_path: Path) -> None:
    models = []
    for workers in (1, 2):
        config = tiny("fedavg", "server.upload=int8", f"run.workers={workers}")
        with open_run(config, tmp_path / str(workers)) as (_, rounds):
            next(rounds)
        with open_run(config, tmp_path / str(workers), resume=True) as (_, rounds):
            list(rounds)
        models.append((tmp_path / str(workers) / "model.safetensors").read_bytes())
    with open_run(tiny("fedavg", "server.upload=int8", "run.workers=1"), tmp_path / "whole") as (_, rounds):
        list(rounds)
    models.append((tmp_path / "whole" / "model.safetensors").read_bytes())
    assert models[0] == models[1] == models[2]


def test_a_method_without_a_model_to_upload_is_refused_and_one_with_all_data_uploads_nothing(tiny: Tiny) -> None:
    with pytest.raises(
        InputError, match=r"fedproto uploads no model, and server\.upload=int8 rounds the changes of one"
    ):
        opened(tiny("fedproto", "server.upload=int8"))
    session, transport = opened(tiny("centralized", "server.upload=int8", "server.rounds=1"))
    assert session.upload == "float32"
    assert transport.trainer.upload == "float32"
