"""YAML files and key=value overrides -> one resolved `Config`.

Order, later wins: the dataclass defaults, the files named by `include` (in order), the recipe, the
overrides.  An override of a whole part, such as `cluster=slurm`, stands for another file of that
folder: it takes the place of the recipe's own (`clusters/laptop`), or comes right after the recipe.
OmegaConf does the merging and the type checks; its errors become one sentence each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moerl.config.schema import Config
from moerl.errors import ConfigError
from moerl.resources import resource_folder

CONFIG_ROOT = resource_folder("configs")
PARTS = {"model": "models", "cluster": "clusters", "algorithm": "algorithms"}  # key: folder


def load_config(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """Compose a recipe (a path, or a name under configs/recipes) with key=value overrides.

    Raises ConfigError naming the field, the value and what is allowed.
    """
    path = find_recipe(recipe)
    parts = _parts(overrides)
    layers = _with_includes(path, (), dict(parts))
    rest = [item for item in overrides if item.partition("=")[0] not in parts]
    config = _merge([*layers, _dotlist(rest)])
    if not config.run.name:
        return replace(config, run=replace(config.run, name=path.stem))
    return config


def load_saved(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read runs/NAME/config.yaml, written by `save_config`, with key=value overrides."""
    return _merge([_read_yaml(path), _dotlist(overrides)])


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration, atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    temporary.rename(path)


def resolve(config: Config) -> Config:
    """Fill what follows from other settings: mask's top_k bound, schedule's length, fixed lag."""
    sampling, optimizer = config.sampling, config.trainer.optimizer
    truncates = sampling.top_p < 1.0 or sampling.min_p > 0.0
    if config.replay.sampling_mask and truncates and sampling.top_k == -1:
        config = replace(config, sampling=replace(sampling, top_k=sampling.mask_top_k))
    if optimizer.decay_steps == 0:
        optimizer = replace(optimizer, decay_steps=config.run.steps)
        config = replace(config, trainer=replace(config.trainer, optimizer=optimizer))
    if (lag := config.rollout.fixed_lag) >= 0:
        exact = replace(config.rollout, max_lag=lag, buffer_depth=lag)
        exact = replace(exact, selection="strict", in_flight_mode="drain")
        config = replace(config, rollout=exact)
    return config


def find_recipe(recipe: str) -> Path:
    """A path as it is, else configs/recipes/NAME.yaml."""
    for path in (Path(recipe), CONFIG_ROOT / "recipes" / f"{recipe}.yaml"):
        if path.is_file():
            return path
    known = sorted(p.stem for p in (CONFIG_ROOT / "recipes").glob("*.yaml"))
    raise ConfigError("RECIPE", recipe, f"give a YAML file or one of {', '.join(known)}")


def _parts(overrides: Sequence[str]) -> dict[str, Path]:
    """{"cluster": its file} for overrides that replace a whole part of the recipe."""
    found = {}
    for item in overrides:
        key, _, name = item.partition("=")
        if key not in PARTS:
            continue
        path = CONFIG_ROOT / PARTS[key] / f"{name}.yaml"
        if "/" in name or not path.is_file():
            known = sorted(p.stem for p in (CONFIG_ROOT / PARTS[key]).glob("*.yaml"))
            raise ConfigError(key, name, f"use one of {', '.join(known)}")
        found[key] = path
    return found


def _with_includes(
    path: Path, above: tuple[Path, ...], parts: dict[str, Path]
) -> list[dict[str, Any]]:
    """The file's own includes first, depth first, then the file itself, then parts left over.

    parts: files that stand for includes from their folder; each is used once.
    """
    if path in above:
        raise ConfigError("include", str(path), "a file cannot include itself")
    data = _read_yaml(path)
    layers: list[dict[str, Any]] = []
    own = data.get("include") or []
    if not isinstance(own, list):
        raise ConfigError("include", own, f"a list of files is needed in {path}")
    for name in map(str, own):
        found = _find_include(name, path)
        for key in [key for key in parts if found.parent == CONFIG_ROOT / PARTS[key]]:
            found = parts.pop(key)
        layers += _with_includes(found, (*above, path), parts)
    left = [_read_yaml(found) for found in parts.values()] if not above else []
    return [*layers, data, *left]


def _find_include(name: str, recipe: Path) -> Path:
    for path in (recipe.parent / f"{name}.yaml", CONFIG_ROOT / f"{name}.yaml", Path(name)):
        if path.is_file():
            return path
    raise ConfigError("include", name, f"no such file beside {recipe} or under configs/")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = _one_line(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            why = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise ConfigError("RECIPE", str(path), f"not readable as YAML: {why}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError("RECIPE", str(path), "a YAML mapping of settings is needed")
    return data


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # untyped
    """With YAML's own rule, which PyYAML drops: a key stands once in its mapping."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if (name := str(key.value)) in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1} sets {name} a second time")
            seen.add(name)
        return node


def _dotlist(overrides: Sequence[str]) -> DictConfig:
    for item in overrides:
        if "=" not in item or item.startswith("="):
            raise ConfigError("override", item, "use key=value, for example run.steps=20")
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError("override", " ".join(overrides), _one_line(error)) from error


def _merge(layers: Sequence[Any]) -> Config:
    merged = OmegaConf.structured(Config)
    for layer in layers:
        _check_sections(layer, Config())
        try:
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            key = getattr(error, "full_key", None) or "configuration"
            value = _look_up(layer, key)
            raise ConfigError(key, value, _allowed(key, error)) from error
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError("configuration", "", _one_line(error)) from error
    assert isinstance(config, Config), type(config)
    return config


def _check_sections(layer: Any, schema: Any, above: str = "") -> None:
    """A section of settings holds settings; OmegaConf's own sentence does not say which one."""
    for item in fields(schema):
        section, field = getattr(schema, item.name), f"{above}{item.name}"
        if not is_dataclass(section) or item.name not in layer:
            continue
        value = layer[item.name]
        if not isinstance(value, dict | DictConfig):
            names = ", ".join(f.name for f in fields(section))
            raise ConfigError(field, value, f"it is a section of settings: {names}")
        _check_sections(value, section, f"{field}.")


def _look_up(layer: Any, key: str) -> Any:
    node = OmegaConf.to_container(layer) if isinstance(layer, DictConfig) else layer
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return node


def _allowed(key: str, error: Exception) -> str:
    """What the schema allows at `key`: the field's type, or the keys of its section."""
    section: Any = Config()
    *parents, last = key.split(".")
    for part in parents:
        section = getattr(section, part, None)
    if section is None:  # an entry of a table, such as cluster.nodes.trainer
        section = getattr(error, "object_type", None)
    if is_dataclass(section):
        types = {f.name: f.type for f in fields(section)}
        if last not in types:
            return f"unknown key; {'.'.join(parents) or 'the configuration'} has {', '.join(types)}"
        return f"{types[last]} is needed"
    return _one_line(error)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
