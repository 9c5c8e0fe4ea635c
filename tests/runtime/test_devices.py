"""A client's step on a GPU, as far as a machine without one can tell: torch's meta device, which computes shapes only.

Where tensors of two devices meet in an operation, a GPU would fail. So does this.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedcir.algorithms import make_algorithm
from fedcir.client.local_update import train_client
from fedcir.config import Config
from fedcir.data.federation import open_federation, pool_clients
from fedcir.rng import torch_rng
from fedcir.runtime.rounds import SerialTransport, run_rounds
from fedcir.runtime.session import make_trainer, open_session
from kinds import mark_others_slow

Tiny = Callable[..., Config]
MAY = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
"""What moves tensors from device to device."""


class OneDevice(TorchDispatchMode):  # type: ignore[misc]
    """Refuses operations on tensors of two devices, but for numbers, which a GPU takes from the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.ndim]
        devices = {tensor.device.type for tensor in tensors}
        assert len(devices) < 2 or func in MAY, f"{func} on {devices}"
        if func is torch.ops.aten.bincount.default and args[0].is_meta:  # how many there are depends on values
            return args[0].new_empty(args[2])
        return func(*args, **(kwargs or {}))


def test_tensors_of_two_devices_are_found() -> None:
    with OneDevice(), pytest.raises(AssertionError, match=r"aten\.mm"):
        torch.empty(2, 2, device="meta") @ torch.ones(2, 2)


@pytest.mark.filterwarnings("ignore:.*which is a no-op")  # a meta tensor holds no values to load
@pytest.mark.parametrize("name", mark_others_slow())
def test_a_local_step_keeps_to_its_device(name: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = torch.Tensor.__bool__  # FedProto asks whether there are prototypes, which shapes do not tell
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: tensor.is_meta or truth(tensor))
    config = tiny(name, "server.rounds=1")
    algorithm, federation = make_algorithm(config.algorithm), open_federation(config)
    federation = pool_clients(federation) if algorithm.pools else federation
    session = open_session(config, algorithm, federation)
    client, trainer = federation.clients[0], session.make_trainer()
    for _ in run_rounds(session, SerialTransport(trainer, federation.clients)):
        pass
    _, kept = train_client(trainer, client, session.state.shared, {}, 1)
    gpu = make_trainer(session.config, algorithm, federation.builder)
    gpu.device = torch.device("meta")
    for module in gpu.modules.values():
        module.to(gpu.device)
    with OneDevice():
        ctx = gpu.load(client, session.state.shared, kept, 1, torch_rng(0))
        with torch.no_grad():
            algorithm.local_start(gpu.modules, ctx)
        assert client.train is not None
        x, y = client.train.batch(torch.arange(8).numpy(), gpu.device, gpu.layout)
        losses = algorithm.local_loss(gpu.modules, x, y, ctx)
        assert losses.total.device.type == "meta"
        losses.total.backward()  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            assert algorithm.predict(gpu.modules, x, ctx).device.type == "meta"
