"""Four real digit domains, where they lie beside the project."""

from pathlib import Path

import pytest

from fedcir.config import AlgorithmConfig, Config, DataConfig, ServerConfig
from fedcir.data.opening import open_dataset
from fedcir.runtime.simulation import open_run

DIGITS = Path(__file__).parents[3] / "shared" / "data" / "digits"

pytestmark = pytest.mark.skipif(not DIGITS.is_dir(), reason="no ../shared/data/digits beside the project")


def test_the_real_digits_open_with_their_counts() -> None:
    domains = open_dataset(DataConfig("arrays", str(DIGITS)), seed=0)
    assert domains.names == ("mnist", "mnist_m", "svhn", "usps")
    assert all((len(domain.train), len(domain.test)) == (5000, 1000) for domain in domains)
    assert len(domains.classes) == 10


def test_fedcir_learns_real_digits() -> None:
    data = DataConfig("arrays", str(DIGITS), train_per_domain=200)
    config = Config(data=data, server=ServerConfig(rounds=5, eval_every=5), algorithm=AlgorithmConfig("fedcir"))
    with open_run(config) as (_, rounds):
        *_, last = rounds
    assert last.accuracy is not None
    assert last.accuracy["mnist"] > 0.5
    assert last.losses.keys() == {"ce", "reg", "align", "total"}
