"""What cannot fit into memory is refused before it is tried."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from fedcir import machine
from fedcir.config import ModelConfig
from fedcir.errors import InputError
from fedcir.models.builder import make_image_builder


def test_free_memory_is_what_the_system_and_the_container_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2000))
    assert machine.free_memory() == 2000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("500\n")
    assert machine.free_memory() == 2000
    (tmp_path / "memory.max").write_text("1500\n")
    assert machine.free_memory() == 1000


def test_a_network_that_does_not_fit_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 1_000_000)
    with pytest.raises(InputError, match=r"model\.width: cnn of [\d,]+ weights needs .* GB of memory, but 0\.0 GB are"):
        make_image_builder(ModelConfig(width=4096), 10, 3, 0)
    make_image_builder(ModelConfig(width=2), 10, 3, 0)
