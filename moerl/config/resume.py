"""Checks that a checkpoint and the configuration that resumes it agree, without torch.

The facts are in the checkpoint's manifest, so a resume that cannot work is refused before any
process is started.  Tensors are saved in global coordinates and fit every layout; optimizers of
megatron-core 0.19.2 do not: with expert parallelism they are a chain of two, without it one.

Recorded paths that lie inside a run, and so follow its folder when that is copied or moved.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from operator import attrgetter
from os.path import normpath
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from moerl.config.lora_settings import LoraConfig
from moerl.config.rules import Rows, refuse
from moerl.config.schema import Config
from moerl.config.secret_values import hide
from moerl.config.task_mixture import TaskEntry, entries_of
from moerl.config.task_tables import SOURCES
from moerl.core.errors import ConfigError
from moerl.core.json_files import read_json
from moerl.runtime.run_dir import RunDir, read_manifest

_ENDS, _DATA_ENDS = 2**20, 2**16  # bytes of a file's begin and end that name it
# Of a task: how it is run.  All other settings say which prompts, episodes and rewards it has.
_OPERATION = (
    *("scorer_workers", "score_timeout_s", "on_score_error", "isolation"),
    *("pass_environment", "read_paths", "environment_workers", "environment_s", "tool_s"),
    *("wall_s", "max_bad_lines", "overlong", "evaluation_path", "evaluation_split", "path"),
    *("agent.workers", "agent.port"),
)
_OPERATION_PARTS = ("limits.", "sampling.")
_FOLDER = "a run is its folder: move or copy that instead"
# What a resume does with a change of a setting, of a section or one field: "" = it uses the new
# value, within the rules of `check_resume`; SAME = `check_identity` compares it; else why the
# change is refused
SAME = "same"
AT_RESUME = {
    "include": "its files were merged at the first start; give their settings",
    "run.name": _FOLDER,
    "run.root": _FOLDER,
    "run.seed": SAME,
    "run.steps": "",
    "run.console": "",
    "model.path": SAME,
    "model.tiny": "its model was made with it; begin another run",
    "model.fp32_lm_head": "",
    **dict.fromkeys(("task", "tasks", "algorithm", "lora.start"), SAME),
    "checkpoint.start": "its first weights were made of it; begin another run",
    "sft": "only moerl sft reads it",
    **dict.fromkeys(("lora", "checkpoint", "sampling", "rollout", "replay", "engine"), ""),
    **dict.fromkeys(("trainer", "ref_models", "sync", "turn", "evaluation", "stream"), ""),
    **dict.fromkeys(("supervision", "observe", "cluster"), ""),
}


def refuse_used_up(config: Config, before: Config) -> None:
    """Raises ConfigError for a changed setting that nothing would read any more.

    before: the settings of the run as they were saved.
    """
    for field, why in AT_RESUME.items():
        ours, saved = (attrgetter(field)(one) for one in (config, before))
        if why in ("", SAME) or ours == saved:
            continue
        for name, value in _settings(ours) if is_dataclass(ours) else ():
            if value != (old := attrgetter(name)(saved)):
                raise ConfigError(f"{field}.{name}", value, f"{_BEGUN} with {old!r}, and {why}")
        raise ConfigError(field, ours, f"{_BEGUN} with {saved!r}, and {why}")


def resume_facts(config: Config) -> dict[str, Any]:
    """The values that `check_resume` compares, as plain JSON."""
    trainer = config.trainer
    return {
        "parallel": asdict(trainer.parallel),
        "distributed_optimizer": trainer.optimizer.distributed,
        "dtype": trainer.dtype,
        "critic": config.algorithm.advantage == "gae",
        "lora": _adapters(config.lora),
        "base": fingerprint(Path(config.model.path)) if config.lora.rank else "",
    }


def identity(config: Config) -> dict[str, Any]:
    """Seed, tasks and algorithm, with fingerprints of data and models, as plain JSON.

    A resume that changes one of them trains something else (`check_identity`).
    """
    facts: dict[str, Any] = {"run.seed": config.run.seed}
    facts |= {name: _weights(Path(path)) for name, path in _models(config).items() if path}
    for task in entries_of(config):
        settings = {
            name: value
            for name, value in _settings(task)
            if name not in _OPERATION and not name.startswith(_OPERATION_PARTS)
        }
        facts |= {f"{_above(task)}.{name}": value for name, value in hide(settings).items()}
        facts[f"{_above(task)}.path"] = _data_fingerprint(task)
    facts |= {f"algorithm.{name}": value for name, value in asdict(config.algorithm).items()}
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return moved(plain, Path(config.run.root) / config.run.name, "(run)")


def _models(config: Config) -> dict[str, str]:
    """Folders of weights that a run begins with."""
    return {"model.path": config.model.path, "lora.start": config.lora.start}


def check_continues(
    config: Config, run: RunDir, newest: Path | None, *, reset_optimizer: bool, allow_changed: bool
) -> None:
    """Raises ConfigError where this configuration cannot continue the run.

    newest: its checkpoint; None: it begins again, with the tiny model that its seed made.
    """
    if newest is not None:
        check_resume(config, read_manifest(newest), reset_optimizer=reset_optimizer)
    if allow_changed or not run.identity.exists():
        return
    saved = read_json(run.identity)
    if newest is None:
        seed = {name: saved[name] for name in ("run.seed",) if config.model.tiny.enabled}
        saved = identity(config) | seed
    check_identity(config, saved)


def check_identity(config: Config, saved: Mapping[str, Any]) -> None:
    """Raises ConfigError where task, seed or algorithm differ from `identity` of an earlier start.

    Settings that the earlier start did not know are not compared, nor data that is not here.
    """
    ours = identity(config)
    paths = {f"{_above(task)}.path": task.path for task in entries_of(config)} | _models(config)
    tasks, before = (
        {name.split(".")[1] for name in facts if name.startswith("tasks.")}
        for facts in (ours, saved)
    )
    if tasks != before:
        raise ConfigError("tasks", sorted(tasks), f"{_BEGUN} with {sorted(before)}; {_ASK}")
    for name, value in saved.items():
        if name not in ours or ours[name] == value:
            continue
        if name not in paths:
            raise ConfigError(name, ours[name], f"{_BEGUN} with {value!r}; {_ASK}")
        if value and ours[name]:
            raise ConfigError(name, paths[name], f"{_BEGUN} with other files or contents; {_ASK}")


def _settings(section: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values; a later version of this program may know more of them."""
    for name, value in asdict(section).items():
        below = getattr(section, name)
        if is_dataclass(below):
            yield from _settings(below, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _above(task: TaskEntry) -> str:
    return f"tasks.{task.label}" if task.label else "task"


_BEGUN = "this run was begun"
_ASK = "give --allow-changed to continue with another task, seed or algorithm"


def _weights(folder: Path) -> str:
    """Fingerprint of a folder's weights; empty where they are not on this machine."""
    return fingerprint(folder) if any(folder.glob("*.safetensors")) else ""


def _data_fingerprint(task: TaskEntry) -> str:
    """Of the files of a task; empty where it has none, or where they are not on this machine."""
    source = SOURCES.get(task.name)
    if not task.path or source is None or not source.files:
        return ""
    path = Path(task.path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    else:
        files = [path] if path.is_file() else sorted(path.parent.glob(path.name))
    return _digest(files, _DATA_ENDS, with_names=False) if files else ""


def fingerprint(folder: Path) -> str:
    """Of a model's files: names, sizes, their first and last MiB."""
    return _digest(sorted(folder.glob("*.safetensors")), _ENDS, with_names=True)


def _digest(files: Iterable[Path], ends: int, *, with_names: bool) -> str:
    """Of sizes, and of the first and last bytes of each file."""
    found = xxhash.xxh3_64()
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name if with_names else ''} {size} ".encode())
        with path.open("rb") as file:
            found.update(file.read(ends))
            file.seek(max(0, size - ends))
            found.update(file.read(ends))
    return str(found.hexdigest())


def _adapters(lora: LoraConfig) -> dict[str, Any] | None:
    """Settings of the factors, without start, transfer, delivery or the place of W0."""
    left_out = ("send", "start", "delivery", "slots", "base")
    return (
        {name: value for name, value in asdict(lora).items() if name not in left_out}
        if lora.rank
        else None
    )


def check_adapters(config: Config, saved: Mapping[str, Any]) -> None:
    """Raises ConfigError where a checkpoint has other adapters than this configuration."""
    if (lora := resume_facts(config)["lora"]) != saved.get("lora"):
        kept = saved.get("lora")
        raise ConfigError(
            "lora", lora, f"the checkpoint holds {f'adapters of {kept}' if kept else 'all weights'}"
        )


def check_resume(config: Config, saved: Mapping[str, Any], *, reset_optimizer: bool) -> None:
    """Raises ConfigError for a checkpoint that this configuration cannot continue.

    saved: the checkpoint's manifest.  reset_optimizer: only weights and schedule position are used.
    """
    refuse(config, _weights_of(config, saved))
    if not reset_optimizer:
        refuse(config, _optimizer_of(config, saved))


def _weights_of(config: Config, saved: Mapping[str, Any]) -> Rows:
    if config.run.steps < (done := saved.get("step", 0)):
        yield "run.steps", f"{done} steps are done; use at least that"
    if config.trainer.dtype != saved["dtype"]:
        yield "trainer.dtype", f"the checkpoint holds {saved['dtype']} weights; use it"
    if config.algorithm.advantage == "gae" and not saved["critic"]:
        yield "algorithm.advantage", "the checkpoint holds no critic"
    check_adapters(config, saved)
    if saved.get("base") and (base := resume_facts(config)["base"]) != saved["base"]:
        yield (
            "model.path",
            f"its files have the fingerprint {base}, the checkpoint's adapters belong to weights "
            f"with {saved['base']}; name their folder",
        )


def _optimizer_of(config: Config, saved: Mapping[str, Any]) -> Rows:
    if (config.trainer.parallel.ep > 1) != ((ep := saved["parallel"]["ep"]) > 1):
        yield (
            "trainer.parallel.ep",
            f"the checkpoint was written with ep {ep}, and megatron-core keeps the optimizer "
            "of ep 1 in another form than that of ep > 1; stay on that side, or give "
            "--reset-optimizer to start with fresh optimizer state",
        )
    if config.trainer.optimizer.distributed != (kept := saved["distributed_optimizer"]):
        yield (
            "trainer.optimizer.distributed",
            f"the checkpoint was written with {kept}, and the two keep "
            "their state in different forms; use that, or give --reset-optimizer",
        )


T = TypeVar("T")


def moved(value: T, old: Path, new: Path | str) -> T:
    """The value (a text, or a list or mapping at any depth), its paths in `old` now in `new`.

    Paths are compared as texts, because the old folder may be gone, or be another run.
    """
    found: object = value
    if isinstance(value, Mapping):
        found = {name: moved(item, old, new) for name, item in value.items()}
    elif isinstance(value, list):
        found = [moved(item, old, new) for item in value]
    elif isinstance(value, str) and f"{normpath(value)}/".startswith(f"{old}/"):
        found = f"{new}{normpath(value)[len(str(old)) :]}"
    return found  # type: ignore[return-value]  # of the same form
