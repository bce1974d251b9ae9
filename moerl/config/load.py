"""YAML files and key=value overrides -> one resolved `Config`.

Order, later wins: the dataclass defaults, the files named by `include` (in order), the recipe, the
overrides.  An override of a whole part, such as `cluster=slurm`, names another file of that folder:
it replaces the recipe's own (`clusters/laptop`), or comes right after the recipe.  Groups of nodes
that the recipe names and this cluster does not have are dropped.
OmegaConf interpolates; `moerl.config.validate` checks the result against the schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moerl.config.resume import moved, refuse_used_up
from moerl.config.schema import Config
from moerl.config.secret_values import hide, hide_override, secrets_of
from moerl.config.task_mixture import MISSING, laid_over, with_changes, with_finite_top_k
from moerl.config.transport_rules import default_transport, with_transport
from moerl.config.validate import check_keys, read_section
from moerl.core.atomic import atomic_write
from moerl.core.errors import ConfigError, nearest
from moerl.runtime.resources import resource_folder

CONFIG_ROOT = resource_folder("configs")
SECRETS = "secrets.yaml"  # next to config.yaml
# Next to config.yaml: settings that `resolve` filled in, as they were before; null = not set
DERIVED = "derived.yaml"
PARTS = {"model": "models", "cluster": "clusters", "algorithm": "algorithms"}  # key: folder

# Unlike YAML 1.1, which PyYAML follows: 1e-3 is a number, 2026-01-31 a text
_OTHERWISE = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")


def load_config(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """Compose a recipe (a path, or a name under configs/recipes) with key=value overrides.

    Raises ConfigError naming the field, the value and the allowed values.
    """
    path = find_recipe(recipe)
    parts = _parts(overrides)
    layers = _with_includes(path, (), dict(parts))
    if "cluster" in parts:
        layers = _for_cluster(layers, parts["cluster"])
    rest = [item for item in overrides if item.partition("=")[0] not in parts]
    config = _merge([*layers, *_overrides(rest)])
    if not config.run.name:
        return replace(config, run=replace(config.run, name=path.stem))
    return config


def load_saved(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read runs/NAME/config.yaml, written by `save_config`, with key=value overrides.

    A run may have been copied or moved: its name, its root and the recorded paths inside it are
    those of the folder that holds the file.
    """
    return _merge([*_saved(path), *_overrides(overrides)])


def load_resumed(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The same for a resume: derived settings are as they were asked for, so `resolve` derives
    them again from the sources that this resume may have changed.

    Raises ConfigError for an override of a setting that the first start used up.
    """
    saved, derived = _saved(path), path.with_name(DERIVED)
    if derived.exists():
        _put_back(saved[0], _read_yaml(derived))
    config = _merge([*saved, *_overrides(overrides)])
    if overrides:
        refuse_used_up(config, _merge(saved))
    return config


def _saved(path: Path) -> list[dict[str, Any]]:
    """Settings and secrets of a run, at its present place."""
    saved, secret = _read_yaml(path), path.with_name(SECRETS)
    run = saved.get("run") or {}
    recorded = Path(str(run.get("root") or "runs"), str(run.get("name") or ""))
    here = path.parent if path.parent.name not in ("", "..") else path.parent.resolve()
    if not (recorded.is_dir() and recorded.samefile(here)):
        saved = moved(saved, recorded, here)
        saved["run"] = run | {"name": here.name, "root": str(here.parent)}
    return [saved, _read_yaml(secret)] if secret.exists() else [saved]


def derived_settings(config: Config) -> dict[str, Any]:
    """The settings that `resolve` changes, with their values before it; None: not set."""
    return _differing(asdict(config), asdict(resolve(config)))


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            if below := _differing(old, value):
                found[name] = below
        elif old != value:
            found[name] = old
    return found


def _put_back(settings: dict[str, Any], before: Mapping[str, Any]) -> None:
    for name, value in before.items():
        if isinstance(value, Mapping) and isinstance(settings.get(name), dict):
            _put_back(settings[name], value)
        elif value is None:
            settings.pop(name, None)
        else:
            settings[name] = value


def save_config(
    config: Config, path: Path, derived: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write the resolved configuration, its secrets into a file of their own next to it.

    derived: `derived_settings` of the configuration before it was resolved, for a resume.
    """
    before = path.with_name(DERIVED)
    if derived:
        atomic_write(before, yaml.safe_dump(dict(derived)), sync=True, mode=0o600)
    else:
        before.unlink(missing_ok=True)
    secret, found = path.with_name(SECRETS), secrets_of(asdict(config))
    if found:
        atomic_write(secret, OmegaConf.to_yaml(OmegaConf.create(found)), sync=True, mode=0o600)
    else:
        secret.unlink(missing_ok=True)
    atomic_write(path, printed(config, path.parent), sync=True, mode=0o600)


def printed(config: Config, folder: Path | None = None) -> str:
    """The resolved configuration as YAML that may be shown to others.

    folder: of its run; paths in it then begin with run.root/run.name.
    """
    shown = hide(asdict(config))
    if folder is not None:
        shown = moved(shown, folder.absolute(), Path(config.run.root) / config.run.name)
    return OmegaConf.to_yaml(OmegaConf.create(shown))


def resolve(config: Config) -> Config:
    """Fill in derived settings: top_k of the mask, decay steps, lag, head, transport."""
    optimizer = config.trainer.optimizer
    sampling = with_finite_top_k(config.sampling, kept=config.replay.sampling_mask)
    config = replace(config, sampling=sampling)
    if optimizer.decay_steps == 0:
        optimizer = replace(optimizer, decay_steps=config.run.steps)
        config = replace(config, trainer=replace(config.trainer, optimizer=optimizer))
    if (lag := config.rollout.fixed_lag) >= 0:
        exact = replace(config.rollout, max_lag=lag, buffer_depth=lag)
        exact = replace(exact, selection="strict", in_flight_mode="drain")
        config = replace(config, rollout=exact)
    if config.model.fp32_lm_head:
        args = {"enable_fp32_lm_head": True} | config.engine.args
        config = replace(config, engine=replace(config.engine, args=args))
    if config.sync.transport == "auto":
        config = with_transport(config, default_transport(config))
    return config


def find_recipe(recipe: str) -> Path:
    """The path if it exists, else configs/recipes/NAME.yaml."""
    for path in (Path(recipe), CONFIG_ROOT / "recipes" / f"{recipe}.yaml"):
        if path.is_file():
            return path
    known = sorted(p.stem for p in (CONFIG_ROOT / "recipes").glob("*.yaml"))
    near = (
        nearest(recipe, known).removeprefix("; ")
        or f"give a YAML file or one of {', '.join(known)}"
    )
    raise ConfigError("RECIPE", recipe, near)


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
    path: Path, above: tuple[Path, ...], replacements: dict[str, Path]
) -> list[dict[str, Any]]:
    """The file's own includes first, depth first, then the file itself, then remaining parts.

    replacements: files that replace includes from their folder; each is used once.
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
        for key in [key for key in replacements if found.parent == CONFIG_ROOT / PARTS[key]]:
            found = replacements.pop(key)
        layers += _with_includes(found, (*above, path), replacements)
    left = [_read_yaml(found) for found in replacements.values()] if not above else []
    return [*layers, data, *left]


def _for_cluster(layers: list[dict[str, Any]], cluster: Path) -> list[dict[str, Any]]:
    """The layers without groups of nodes that the cluster does not have: another cluster's."""
    groups = (_read_yaml(cluster).get("cluster") or {}).get("nodes")
    return [_with_groups(layer, groups) for layer in layers] if groups else layers


def _with_groups(layer: dict[str, Any], groups: Mapping[str, Any]) -> dict[str, Any]:
    """The layer with those groups of nodes only that the cluster has."""
    cluster = layer.get("cluster")
    nodes = cluster.get("nodes") if isinstance(cluster, dict) else None
    if not isinstance(nodes, dict):
        return layer
    known = {name: group for name, group in nodes.items() if name in groups}
    return layer | {"cluster": {**layer["cluster"], "nodes": known}}


def _find_include(name: str, recipe: Path) -> Path:
    for path in (recipe.parent / f"{name}.yaml", CONFIG_ROOT / f"{name}.yaml", Path(name)):
        if path.is_file():
            return path
    raise ConfigError("include", name, f"no such file next to {recipe} or under configs/")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
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
    """Reads numbers as YAML 1.2 does and refuses a key that occurs twice in a mapping."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {
        first: [rule for rule in rules if rule[0] not in _OTHERWISE]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if (name := str(key.value)) in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1} sets {name} a second time")
            seen.add(name)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(\.[0-9_]+|[0-9][0-9_]*\.[0-9_]*)([eE][-+]?[0-9]+)?$"
        r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"
        r"|[-+]?\.?(inf|Inf|INF)$|\.?(nan|NaN|NAN)$"
    ),
    list("-+0123456789.nNiI"),
)


def _overrides(items: Sequence[str]) -> list[dict[str, Any]]:
    """key=value words as layers: the changes of single tasks come after `tasks` itself."""
    changes = [item for item in items if item.startswith("tasks.")]
    first = [item for item in items if item not in changes]
    return [_override(words) for words in (first, changes) if words]


def _override(items: Sequence[str]) -> dict[str, Any]:
    layer = OmegaConf.create()
    for item in items:
        key, equals, text = item.partition("=")
        if not key or not equals:
            raise ConfigError("override", item, "use key=value, for example run.steps=20")
        try:
            OmegaConf.update(layer, key, yaml.load(text, _Loader))
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            shown = hide_override(item)
            why = (
                _one_line(error) if shown == item else "not readable as YAML"
            )  # it quotes the text
            raise ConfigError("override", shown, why) from error
    return _plain(layer, resolve=False)


def _merge(layers: Sequence[dict[str, Any]]) -> Config:
    merged: dict[str, Any] = asdict(Config())
    for layer in layers:
        if isinstance(tasks := layer.get("tasks"), Mapping):
            layer = layer | {"tasks": with_changes(merged["tasks"], tasks)}
        check_keys(Config, layer)
        merged = laid_over(merged, layer)
    if any(mark in repr(merged) for mark in ("${", MISSING)):
        merged = _plain(OmegaConf.create(merged), resolve=True)
    return read_section(Config, merged)


def _plain(config: DictConfig, *, resolve: bool) -> dict[str, Any]:
    try:
        plain = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve)
    except OmegaConfBaseException as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(error.full_key or "configuration", "", why) from error
    assert isinstance(plain, dict), type(plain)
    return {str(key): value for key, value in plain.items()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
