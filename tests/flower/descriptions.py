"""NodeRegistry as they introduce themselves, and the settings of a run across them."""

from typing import Any

from fedcir.config import Config, DataConfig, PartitionConfig
from fedcir.flower.site_manifest import SiteDescription


def own(domain: str, *classes: str, **others: Any) -> SiteDescription:
    """A site with data of its own."""
    values: dict[str, Any] = {"train": 8, "test": 2, "content": f"hash of {domain}", "image_size": 32, "channels": 3}
    return SiteDescription(domain, classes or ("cat", "dog"), versions="fedcir 1, torch 2", **{**values, **others})


def share(number: int, domain: str, **others: Any) -> SiteDescription:
    """A site that has a share of a dataset that all have."""
    return own(domain, partition=number, shared=True, **{"content": "hash", **others})


def config(classes: tuple[str, ...] | None = None, **partition: Any) -> Config:
    return Config(data=DataConfig(name="folders", classes=classes), partition=PartitionConfig(**partition))


def numbers(manifest: dict[str, Any]) -> dict[str, int]:
    """The clients of a manifest by domain."""
    return {client["domain"]: client["id"] for client in manifest["clients"]}
