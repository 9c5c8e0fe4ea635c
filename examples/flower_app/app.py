"""FedCiR inside a Flower app of one's own: an encoder and datasets of yours, Flower's own loop and results."""

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

import fedcir
from fedcir.flower import AlgorithmStrategy, local_update

client = ClientApp()
server = ServerApp()


def encoder() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())


def data(site: int, samples: int) -> TensorDataset:
    """Bars that lie or stand, brighter from site to site: load your own here."""
    rng = torch.Generator().manual_seed(samples + site)
    images, labels = torch.rand(samples, 1, 12, 12, generator=rng) / 2, torch.arange(samples) % 2
    images[labels == 0, :, 5:7, :] += 0.3 + site / 4
    images[labels == 1, :, :, 5:7] += 0.3 + site / 4
    return TensorDataset(images, labels)


@client.query()
@client.train()
@client.evaluate()
def answer(msg: Message, context: Context) -> Message:
    site = int(context.node_config["partition-id"])
    return local_update(msg, context, data=(data(site, 64), data(site, 40)), encoder=encoder(), num_classes=2)


@server.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    shape = torch.zeros(2, 1, 12, 12)
    strategy = AlgorithmStrategy(fedcir.FedCiR(), encoder=encoder(), example=shape, num_classes=2, lr=0.05)
    result = strategy.start(grid, num_rounds=int(context.run_config["rounds"]))
    save_file(result.arrays.to_torch_state_dict(), str(context.run_config["out"]))
