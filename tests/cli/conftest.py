"""A working folder for the tests of the command line."""

from pathlib import Path

import numpy as np
import pytest
from user_files import MINE, arrays


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds everything a user may point at by mistake."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.toml").write_text("[local\nlr = 1")
    (tmp_path / "latin.toml").write_bytes(b"[data]\nname = '\xe9'")
    (tmp_path / "section.toml").write_text("[locale]\nlr = 0.1")
    (tmp_path / "field.toml").write_text("[local]\nlearning = 0.1")
    (tmp_path / "typed.toml").write_text("[local]\nlr = 'fast'")
    (tmp_path / "flat.toml").write_text("partition = 3")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("precious")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "syntax.py").write_text("def (:\n")
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "two.py").write_text("import fedcir\nclass A(fedcir.FedAvg): ...\nclass B(fedcir.FedAvg): ...\n")
    arrays(tmp_path / "gap", ink=[0, 1, 3, 3], pen=[0, 1, 3, 3])
    arrays(tmp_path / "lonely", ink=[0, 1, 2, 0], pen=[1, 1, 1, 1])
    arrays(tmp_path / "single", ink=[0, 0, 0, 0])
    arrays(tmp_path / "none")
    (tmp_path / "spoilt").mkdir()
    (tmp_path / "spoilt" / "ink.npz").write_text("not a zip")
    tiny_images = np.zeros((6, 4, 4, 3), np.uint8)
    (tmp_path / "minute").mkdir()
    labels = np.arange(6) % 3
    np.savez(
        tmp_path / "minute" / "ink.npz", x_train=tiny_images, y_train=labels, x_test=tiny_images + 1, y_test=labels
    )
    return tmp_path
