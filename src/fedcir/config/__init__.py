"""Settings: what there is to set, how it is read and written, and what a user asked for."""

from fedcir.config.asked import Asked
from fedcir.config.cores import cores
from fedcir.config.nearest import nearest
from fedcir.config.options import OPTIONS
from fedcir.config.settings import (
    DEFAULT_ALGORITHM,
    DEFAULT_COMPARISON,
    OWN_MODELS,
    PATHS,
    SECTIONS,
    AlgorithmConfig,
    Config,
    DataConfig,
    LocalConfig,
    ModelConfig,
    PartitionConfig,
    RunConfig,
    ServerConfig,
    require_at_least,
    require_not_negative,
    require_positive,
    require_share,
)
from fedcir.config.tables import (
    build,
    config_from,
    config_tables,
    differing,
    dump_toml,
    merged,
    parse_assignment,
    read_toml,
    typed,
)

__all__ = [
    "DEFAULT_ALGORITHM",
    "DEFAULT_COMPARISON",
    "OPTIONS",
    "OWN_MODELS",
    "PATHS",
    "SECTIONS",
    "AlgorithmConfig",
    "Asked",
    "Config",
    "DataConfig",
    "LocalConfig",
    "ModelConfig",
    "PartitionConfig",
    "RunConfig",
    "ServerConfig",
    "build",
    "config_from",
    "config_tables",
    "cores",
    "differing",
    "dump_toml",
    "merged",
    "nearest",
    "parse_assignment",
    "read_toml",
    "require_at_least",
    "require_not_negative",
    "require_positive",
    "require_share",
    "typed",
]
