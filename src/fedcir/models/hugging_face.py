"""Encoders of Hugging Face's transformers: folders that `save_pretrained` wrote, and features of what networks return.

A folder is read without a network, its weights are safetensors, and no code in it runs.
"""

import hashlib
import importlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedcir.config import HUGGING_FACE, ModelConfig, Pooling
from fedcir.errors import InputError
from fedcir.files import hash_file, read_text
from fedcir.machine import check_memory
from fedcir.plugins import find_plugin, is_file_plugin
from fedcir.text import describe_error

FILES = ("config.json", "preprocessor_config.json", "*.safetensors", "*.safetensors.index.json")
"""Files of a folder that are read."""
MAX_JSON_BYTES = 10_000_000
FIRST_TOKENS = ("cls_token", "class_embedding", "distillation_token", "register_tokens")
"""Names of parameters that are tokens before those of the patches."""
NOT_ARCHITECTURE = (
    *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "id2label", "label2id"),
    *("auto_map", "quantization_config", "use_pretrained_backbone", "attn_implementation", "_attn_implementation"),
)
"""Settings in config.json that tell where a network is from or how it is run; some make transformers load code."""
EXPECTED = "one class or function that returns an nn.Module, or the path of a folder that save_pretrained wrote"


def find_folder(model: ModelConfig) -> Path | None:
    """Return the folder of the configured encoder: that of hf:DIR, or one that an installed package names."""
    if model.name == HUGGING_FACE:
        return None if model.weights is None else Path(model.weights)
    if not model.foreign or ":" in model.name or is_file_plugin(model.name):
        return None
    plugin = find_plugin("model", model.name, {}, lambda value: callable(value) or isinstance(value, Path), EXPECTED)
    return plugin if isinstance(plugin, Path) else None


def hash_folder(folder: Path) -> str:
    """Hash of the files of a folder that are read, by name."""
    paths = sorted(path for pattern in FILES for path in folder.glob(pattern))
    return _hash_files(tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths))


@lru_cache(maxsize=16)
def _hash_files(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Hash files, once for each time of their last change."""
    lines = [f"{path.name} {hash_file(path)}\n" for path, *_ in files]
    return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()


def read_architecture(folder: Path) -> dict[str, Any]:
    """Read the settings of the network of images, which build it without its weights."""
    if not (folder / "config.json").is_file():
        raise InputError(f"model.name: {folder} holds no config.json: give a folder that save_pretrained wrote")
    with _use_transformers(folder) as transformers:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = getattr(config, "vision_config", config)  # of two networks, such as CLIP's, that of images
        values: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    return {name: value for name, value in sorted(values.items()) if name not in NOT_ARCHITECTURE}


def read_normalisation(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation of pixel values from 0 to 1; None where no preprocessor_config.json says."""
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(read_text(path, MAX_JSON_BYTES))
        if not values.get("do_normalize", True):
            return (0.0,), (1.0,)
        means, stds = (tuple(float(value) for value in values[f"image_{name}"]) for name in ("mean", "std"))
        factor = round(255 * float(values.get("rescale_factor", 1 / 255)), 6)  # of pixel values from 0 to 1
        return tuple(mean / factor for mean in means), tuple(std / factor for std in stds)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise InputError(f"{path} names no image_mean and image_std: {describe_error(error)}") from error


def read_settings(model: ModelConfig, folder: Path | None) -> dict[str, Any]:
    """Settings of the network: those of a folder, or those that a saved model has as its arguments."""
    if folder is None and not model.arguments:
        raise InputError("model.name=hf needs a folder that save_pretrained wrote: name it, as in hf:DIR")
    return dict(model.arguments) if folder is None else read_architecture(folder)


def find_image_size(model: ModelConfig) -> int:
    """Width and height of the images that the configured network was trained with."""
    folder = find_folder(model)
    is_folder = folder is not None or model.name == HUGGING_FACE
    size = _get_image_size(read_settings(model, folder)) if is_folder else None
    if size is None:
        source = folder or model.name
        raise InputError(f"model.native_size: {source} does not say its image size: set data.image_size instead")
    return size


def _get_image_size(settings: Mapping[str, Any]) -> int | None:
    size = settings.get("image_size")
    size = size[0] if isinstance(size, list) and len({*size}) == 1 else size
    return size if isinstance(size, int) else None


def build_network(settings: Mapping[str, Any], folder: Path | None, model: ModelConfig, example: Tensor) -> nn.Module:
    """Build a network that takes this example, with the weights of a folder, or without for a saved model."""
    network = _build_from_settings(settings, folder, model.pooling)
    source, channels = folder or "the saved model", settings.get("num_channels", 3)
    if example.ndim != 4 or example.shape[1] != channels:
        shape = list(example.shape[1:])
        raise InputError(f"model.name: {source} takes images of {channels} channels, got {shape}: set data.channels")
    try:
        with torch.no_grad():
            pool_output(network, network.eval()(example), model.pooling)
    except InputError:
        raise
    except Exception as error:
        size, given = _get_image_size(settings), example.shape[-1]
        if size in (None, given):
            raise InputError(f"model.name: {source} fails on {given} pixels: {describe_error(error)}") from error
        fix = f"set data.image_size={size}" + (", or model.native_size=true" if model.freeze else "")
        raise InputError(f"model.name: {source} takes images of {size} pixels, got {given}: {fix}") from error
    return network.train()


def _build_from_settings(settings: Mapping[str, Any], folder: Path | None, pooling: Pooling | None) -> nn.Module:
    source = folder or "the saved model"
    with _use_transformers(source) as transformers:
        config = transformers.AutoConfig.for_model(**{"model_type": "", **settings})
        network_class = transformers.MODEL_MAPPING[type(config)]
        if network_class.main_input_name != "pixel_values":
            raise InputError(f"model.name: {source} takes {network_class.main_input_name}, not images")
        options = {"trust_remote_code": False, "attn_implementation": "eager", "dtype": torch.float32}
        with torch.device("meta"):
            drawn = transformers.AutoModel.from_config(config, **options)
        check_memory(4 * sum(tensor.numel() for tensor in drawn.state_dict().values()), f"the encoder of {source}")
        missing: set[str] = set()
        if folder is None:
            network: nn.Module = transformers.AutoModel.from_config(config, **options)
        elif not any(folder.glob("*.safetensors")):
            raise InputError(f"model.name: {folder} holds no weights as safetensors: write it with save_pretrained")
        else:
            network, report = transformers.AutoModel.from_pretrained(
                folder, config=config, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
            )
            missing = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    if pooling != "pooler" and has_linear_pooler(network):
        network.pooler = None  # type: ignore[assignment]
        missing = {name for name in missing if not name.startswith("pooler.")}
    if missing:
        fix = ": set model.pooling to cls or mean" if min(missing).startswith("pooler.") else ""
        raise InputError(
            f"model.name: {folder} has no weights that fit {min(missing)} of {type(network).__name__}{fix}"
        )
    return network


@contextmanager
def _use_transformers(source: object) -> Iterator[Any]:
    """Import transformers without its messages; its errors become one line that names the source."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise InputError(f"model.name: {source} needs transformers: pip install 'transformers>=5'") from None
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield transformers
    except InputError:
        raise
    except Exception as error:  # a folder's settings may name anything
        raise InputError(f"model.name: transformers cannot build {source}: {describe_error(error, 300)}") from error
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def has_linear_pooler(network: nn.Module) -> bool:
    """Whether the pooler has linear layers of its own, which many published weights lack."""
    pooler = getattr(network, "pooler", None)
    return isinstance(pooler, nn.Module) and any(isinstance(layer, nn.Linear) for layer in pooler.modules())


def pool_output(network: nn.Module, output: Any, pooling: Pooling | None) -> Any:
    """Features (B, F) of a network's output: a tuple, a ModelOutput, tokens (B, T, F) or maps (B, F, ...).

    By default they are those of the network's pooler if that has no linear layer, else the class token, if there is
    one, else the mean of the tokens. The mean leaves out class tokens.
    """
    if isinstance(output, Mapping):  # transformers' ModelOutput
        pooled = output.get("pooler_output")
        if pooling == "pooler" and pooled is None:
            raise InputError(f"{type(network).__name__} has no pooler: set model.pooling to cls or mean")
        if pooling == "pooler" or (pooling is None and pooled is not None and not has_linear_pooler(network)):
            output = pooled
        else:
            output = output.get("last_hidden_state", next(iter(output.values())))
    elif isinstance(output, tuple | list):  # some also return the outputs of their blocks
        output = output[0]
    if not isinstance(output, Tensor) or output.ndim < 3:
        return output
    if output.ndim > 3:
        return output.flatten(2).mean(2)
    parameters = network.named_parameters()
    tokens = [value.numel() for name, value in parameters if name.rpartition(".")[2] in FIRST_TOKENS]
    if pooling == "cls" or (pooling is None and tokens):
        return output[:, 0]
    return output[:, sum(tokens) // output.shape[2] :].mean(1)


def add_pooling(network: nn.Module) -> nn.Module:
    """Make a module that returns a ModelOutput or tokens return features; tensors keep their names."""

    def pool(module: nn.Module, inputs: Any, output: Any) -> Any:
        is_tokens = isinstance(output, Tensor) and output.ndim == 3
        return pool_output(module, output, None) if is_tokens or isinstance(output, Mapping) else output

    network.register_forward_hook(pool)
    return network
