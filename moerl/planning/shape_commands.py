"""`moerl check-layout` and `moerl plan`: read shapes, no weights, and start nothing.

They need neither torch, engine nor trainer, so they work with the plain wheel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moerl.core.errors import ConfigError
from moerl.core.json_files import read_model_config
from moerl.launch.arguments import Overrides, Recipe

if TYPE_CHECKING:
    from moerl.config import Config
    from moerl.config.schema import ParallelConfig
    from moerl.planning.publish_forecast import Layouts, Links

_Trainer = Annotated[
    str,
    typer.Option(
        metavar="tp=..,pp=..",
        help="Trainer: tp, pp, vpp, cp, ep, etp (1 where not named), dp (the smallest for "
        "ep * etp), first_stage_layers, last_stage_layers, vocab_divisible_by.",
    ),
]
_Engines = Annotated[
    str,
    typer.Option(
        metavar="tp=..,ep=..",
        help="Engines: tp, ep, dp (of attention), count, dtype, and any server argument or "
        "switch that decides how SGLang keeps weights, such as moe_runner_backend.",
    ),
]


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    nic_gb_s: Annotated[float, typer.Option(help="GB/s of each rank's network card.")] = 50.0,
    ranks_per_node: Annotated[int, typer.Option(help="Engine ranks that share a node.")] = 8,
    efficiency: Annotated[
        float | None,
        typer.Option(help="Share of line rate, 0 to 1; default: the share that others published."),
    ] = None,
    direct: Annotated[
        int, typer.Option(help="Engines the trainer serves itself; 0 = the fastest number.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Forecast a recipe's publish and step.

    A publish: bytes, seconds, buffers, and whether the layout fits. A step: simulated seconds with
    engines and trainer divided, in turns, and both. Reads the model's config.json and nothing else,
    for up to thousands of ranks.

    Examples:

      moerl plan kimi-k2
      moerl plan qwen3-235b-a22b engine.count=16 --nic-gb-s 25 --efficiency 0.3
    """
    from moerl.config import load_config, resolve
    from moerl.config.transport_rules import with_transport
    from moerl.planning import publish_forecast, step_simulation
    from moerl.planning.publish_forecast import Links

    if efficiency is not None and not 0 < efficiency <= 1:
        raise ConfigError("--efficiency", efficiency, "must be above 0 and at most 1")
    share = efficiency or publish_forecast.EFFICIENCY
    config = load_config(recipe, list(overrides or []))
    shapes = publish_forecast.recipe_shapes(config)
    choice = publish_forecast.auto_transport(config, shapes)
    if config.sync.transport == "auto":
        config = with_transport(config, choice)
    config, links = resolve(config), Links(nic_gb_s, ranks_per_node)
    found = [
        _size(config, layouts, links, share, direct)
        for layouts in publish_forecast.planned_layouts(config, shapes)
    ]
    if as_json:
        reports = [report for report, _ in found]
        typer.echo(json.dumps(reports[0] if len(reports) == 1 else {"sizes": reports}))
        return
    texts = [text for _, text in found]
    texts[-1] += f"\n{publish_forecast.transport_line(config, choice)}"
    first = publish_forecast.planned_layouts(config, shapes)[0]
    received = found[-1][0]["received"]["high"]
    typer.echo("\n\n".join([*texts, step_simulation.describe(config, first, received)]).rstrip())


def _size(
    config: Config, layouts: Layouts, links: Links, share: float, direct: int
) -> tuple[dict[str, Any], str]:
    """The publish to engines of one size, as data and as text."""
    from moerl.planning import publish_forecast

    spec, _, engines, policy = layouts
    found, factors = publish_forecast.forecast(*layouts, links, direct=direct), None
    report = asdict(found) | {
        "engines": engines.num,
        "efficiency": share,
        "predicted_s": found.seconds / share,
    }
    if config.lora.sends_factors:
        factors = publish_forecast.factor_forecast(spec, engines, config.lora, policy.dtype)
        report["factors"] = asdict(factors)
    return report, publish_forecast.describe(config, layouts, found, factors, links, share)


def check_layout(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model folder, or a config.json.")
    ],
    parallel: _Trainer = "",
    engine: _Engines = "",
    layer_spec: Annotated[
        Literal["local", "te"], typer.Option(help="Layers of megatron-core or Transformer Engine.")
    ] = "local",
) -> None:
    """Prove from shapes alone that a model fits a trainer layout and an engine layout.

    Checks that every parameter of every rank is tiled exactly and every engine byte is covered
    once, else names the tensor.  Refuses engine settings with an unknown weight layout.  Reads no
    weights but the headers of files; thousands of ranks are fine.  Prints MiB and boxes per rank.

    Examples:

      moerl check-layout configs/models/qwen3-235b-a22b --parallel tp=4,pp=2,ep=8 --engine tp=32
      moerl check-layout runs/mine/hf --parallel ep=2 --engine tp=2,moe_runner_backend=triton
    """
    from moerl.engine.weight_layout import stated_layout
    from moerl.launch.folder_checks import check_folder, has_weights
    from moerl.layout import model_spec
    from moerl.planning.layout_check import check_layout as check
    from moerl.planning.layout_check import describe
    from moerl.weight_sync.held_shards import EngineLayout

    config = read_model_config(model)
    trainer = _parallel_layout(parallel)
    asked = _named("--engine", engine)
    count = _count("--engine count", asked.pop("count", "1"))
    identity = stated_layout(asked, config)
    engines = EngineLayout(identity.tp, identity.ep, identity.dp, count)
    report = check(
        model_spec(config),
        trainer,
        engines,
        layer_spec,
        engine_dtype=identity.dtype,
        quantization=identity.quantization,
    )
    typer.echo(describe(report))
    if has_weights(model):
        check_folder("MODEL", str(model))
        typer.echo("files: every tensor is there, with this shape")
    typer.echo(f"engine weight layout {identity.fingerprint()}: {identity}")


def _parallel_layout(text: str) -> ParallelConfig:
    """--parallel as a layout; the default of dp is the smallest for ep * etp."""
    from moerl.config.mesh import check_mesh
    from moerl.config.schema import ParallelConfig

    names = [field.name for field in fields(ParallelConfig)]
    axes = {
        name: _count(f"--parallel {name}", value)
        for name, value in _named("--parallel", text, names).items()
    }
    if "dp" not in axes:
        within = axes.get("tp", 1) * axes.get("cp", 1)
        axes["dp"] = math.lcm(within, axes.get("ep", 1) * axes.get("etp", 1)) // max(1, within)
    layout = ParallelConfig(**axes | {"dp": max(1, axes["dp"])})
    check_mesh(layout)
    return layout


def _named(option: str, text: str, names: Sequence[str] = ()) -> dict[str, str]:
    """`a=1,b=x` as a dict.  names: the allowed ones; () = any."""
    values: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not (name and equals and value) or name in values:
            raise ConfigError(option, item, "give NAME=VALUE, each name once, with commas between")
        if names and name not in names:
            raise ConfigError(f"{option} {name}", value, f"the names are {', '.join(names)}")
        values[name] = value
    return values


def _count(field: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(field, text, "must be a whole number")
    return int(text)
