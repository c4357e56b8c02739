"""TOML files and command-line words to one typed, complete config; needs no torch."""

from moe_core.config._load import load_config as load_config
from moe_core.config._load import validate as validate
from moe_core.plugins import Config as Config
from moe_core.plugins import ConfigError as ConfigError
from moe_core.plugins import RunConfig as RunConfig
