"""What cannot fit into memory is refused before it is tried."""

from pathlib import Path

import pytest

from fedcir.config import ModelConfig, memory
from fedcir.models.task import image_task
from fedcir.types import InputError


def test_free_memory_is_what_the_system_and_the_container_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SYSTEM", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    assert memory.free_memory() is None
    memory.check_memory(10**18, "anything")  # nobody knows
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:     2000 kB\n")
    assert memory.free_memory() == 2_048_000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("500\n")
    assert memory.free_memory() == 2_048_000
    (tmp_path / "memory.max").write_text("1500\n")
    assert memory.free_memory() == 1000


def test_a_network_that_does_not_fit_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1_000_000)
    with pytest.raises(InputError, match=r"model\.width: cnn of [\d,]+ weights needs .* GB of memory, but 0\.0 GB are"):
        image_task(ModelConfig(width=4096), 10, 3, 0)
    image_task(ModelConfig(width=2), 10, 3, 0)
