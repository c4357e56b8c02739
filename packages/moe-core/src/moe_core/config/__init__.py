"""TOML files and command-line words to one typed, complete config; needs no torch."""

from moe_core.config._config import Config as Config
from moe_core.config._config import ConfigError as ConfigError
from moe_core.config._config import RunConfig as RunConfig
from moe_core.config._load import load_config as load_config
from moe_core.config._load import validate as validate
