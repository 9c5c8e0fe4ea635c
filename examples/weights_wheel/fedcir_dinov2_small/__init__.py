"""An encoder that fedcir finds by its name: the folder `weights` beside this file, written by save_pretrained."""

from pathlib import Path

FOLDER = Path(__file__).parent / "weights"
