"""Settings: the sections and their fields, TOML files and options, and how a request becomes a config."""

# fmt: off
from fedcir.config.resolve import OPTIONS, Assignments, Choices, ConfigRequest, NumberRange, SearchRange, parse_range

from fedcir.config.schema import (  # isort: skip
    BUILTIN_MODELS, DEFAULT_ALGORITHM, DEFAULT_COMPARISON, HUGGING_FACE, MAX_IMAGE_SIZE, PATH_SETTINGS,
    PRETRAINED_SIZES, SECTIONS, AlgorithmConfig, AttackConfig, Config, DataConfig, LocalConfig, ModelConfig,
    PartitionConfig, Pooling, PrivacyConfig, RunConfig, ServerConfig, TaskConfig,
)
from fedcir.config.toml import (  # isort: skip
    config_from_tables, config_to_tables, dump_toml, find_differences, make_paths_absolute, merge_tables,
    nest_settings, parse_assignment, read_toml,
)
from fedcir.validation import Between  # for algorithms of users

__all__ = [
    "BUILTIN_MODELS", "DEFAULT_ALGORITHM", "DEFAULT_COMPARISON", "HUGGING_FACE", "MAX_IMAGE_SIZE", "OPTIONS",
    "PATH_SETTINGS", "PRETRAINED_SIZES", "SECTIONS", "AlgorithmConfig", "Assignments", "AttackConfig", "Between",
    "Choices", "Config", "ConfigRequest", "DataConfig", "LocalConfig", "ModelConfig", "NumberRange",
    "PartitionConfig", "Pooling", "PrivacyConfig", "RunConfig", "SearchRange", "ServerConfig", "TaskConfig",
    "config_from_tables", "config_to_tables", "dump_toml", "find_differences", "make_paths_absolute",
    "merge_tables", "nest_settings", "parse_assignment", "parse_range", "read_toml",
]
