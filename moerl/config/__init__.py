"""Settings: schema (dataclasses), load (YAML and overrides), checks (across settings)."""

from moerl.config.load import load_config, resolve, save_config
from moerl.config.schema import Config

__all__ = ["Config", "load_config", "resolve", "save_config"]
