"""Settings: schema (dataclasses), load (YAML and overrides), checks (what fits together)."""

from moerl.config.load import load_config, resolve, save_config
from moerl.config.schema import Config

__all__ = ["Config", "load_config", "resolve", "save_config"]
