"""Save a network of Hugging Face's hub into the package, on a machine with a network: python save_weights.py [NAME]"""

import sys
from pathlib import Path

from transformers import AutoImageProcessor, AutoModel

FOLDER = Path(__file__).parent / "fedcir_dinov2_small" / "weights"

if __name__ == "__main__":
    name = sys.argv[1] if sys.argv[1:] else "facebook/dinov2-small"
    AutoModel.from_pretrained(name).save_pretrained(FOLDER)
    AutoImageProcessor.from_pretrained(name).save_pretrained(FOLDER)
