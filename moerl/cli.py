"""The command line: `moerl train`, `sft`, `mismatch`, `plan`, `doctor` and the others below.

Heavy packages are imported only when a command that needs them runs.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from moerl.config.files import read_model_config
from moerl.errors import ConfigError, MoerlError
from moerl.launch.engines_cli import engines
from moerl.rundir import RunDir, find_run, read_manifest

if TYPE_CHECKING:
    from moerl.layout import ParallelLayout

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous RL post-training of Mixture-of-Experts models, with Keep Routing and "
    "Keep Sampling Mask on by default.",
)

app.add_typer(engines, name="engines")

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings that replace those of the recipe, such as run.steps=20; all of them, with "
        "units and defaults, are in moerl/config/schema.py.",
    ),
]
_RECIPE = typer.Argument(metavar="RECIPE", help="A YAML file, or a name under configs/recipes.")
Recipe = Annotated[str, _RECIPE]
RunName = Annotated[
    str, typer.Option(metavar="NAME", help="Name of the run: its folder below run.root.")
]


@app.command()
def train(
    recipe: Annotated[str | None, _RECIPE] = None,
    overrides: Overrides = None,
    run: RunName = "",
    resume: Annotated[
        str, typer.Option(metavar="RUN", help="Continue runs/RUN (or a path) from its checkpoint.")
    ] = "",
    reset_optimizer: Annotated[
        bool,
        typer.Option("--reset-optimizer", help="With --resume: begin with fresh optimizer state."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Start nothing: check the settings, then print all of them, every process and "
            "command, ports, and memory in GB.",
        ),
    ] = False,
) -> None:
    """Train a recipe to its last step, or continue a run.

    Leaves metrics, logs, checkpoints, report.html and the trained model in runs/NAME; without
    --run, NAME is the recipe's with the time.

    Examples:

      moerl train quickstart
      moerl train quickstart run.steps=300 sampling.top_p=0.9 --run mine
      moerl train qwen3-30b-a3b model.path=/data/Qwen3-30B-A3B --dry-run

      moerl train --resume mine                  (after Ctrl-C or a crash)
      moerl train --resume mine run.steps=400    (further than planned)
      moerl train --resume mine trainer.parallel.dp=4 trainer.parallel.ep=4
    """
    if resume:
        if run:
            raise ConfigError(
                "--run", run, "--resume goes on in the run's own folder; leave it out"
            )
        changed = [item for item in (recipe, *(overrides or [])) if item]
        _resume(find_run(resume, "--resume"), changed, reset_optimizer, dry_run)
    if reset_optimizer:
        raise ConfigError("--reset-optimizer", True, "a new run has no optimizer state yet")
    if not recipe:
        raise ConfigError("RECIPE", recipe, "give a RECIPE, or --resume RUN")
    settings = [*(overrides or []), *_named_run(run)]
    config = _checked(recipe, settings, starts=not dry_run)
    name = config.run.name
    if not run and name == Path(recipe).stem:
        name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        settings += _named_run(name)
    if dry_run:
        from moerl.launch.planning.dry_run import describe

        described = replace(config, run=replace(config.run, name=name))
        typer.echo(describe(described, [recipe, *(overrides or []), "--run", name]))
        return
    if (Path(config.run.root) / name / "state.json").exists():
        raise ConfigError(
            "run.name", name, f"{config.run.root}/{name} exists; choose another or use --resume"
        )
    request = {"resume": "", "recipe": recipe, "overrides": settings}
    raise typer.Exit(_guarded(request))


@app.command()
def sft(recipe: Recipe, overrides: Overrides = None, run: RunName = "") -> None:
    """Train on the answers of a recipe's task: a warm start, left in runs/NAME/hf.

    Each of run.steps steps learns the answers to the next rollout.groups_per_step prompts of the
    task, a JSONL file of {"prompt" or "messages", "answer"} for example.  No engine is started;
    engine, other rollout and algorithm settings are not used.

    Examples:

      moerl sft quickstart task.name=jsonl task.path=demos.jsonl task.reward=exact_match --run warm
      moerl train quickstart model.path=runs/warm/hf
    """
    settings = [*(overrides or []), *_named_run(run)]
    config = _checked(recipe, settings)
    if not run:
        settings += _named_run(f"{config.run.name}-sft-{time.strftime('%Y%m%d-%H%M%S')}")
    request = {"recipe": recipe, "overrides": settings}
    raise typer.Exit(_guarded(request, module="moerl.launch.sft"))


@app.command()
def mismatch(
    recipe: Recipe,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="Hugging Face folder to probe, e.g. runs/X/hf; default: model.path."
        ),
    ] = "",
    tokens: Annotated[
        int, typer.Option(min=1, help="Sampled tokens to score, at least; not with --records.")
    ] = 20000,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
    keep: Annotated[
        str, typer.Option(metavar="DIR", help="Keep records and scores in this folder.")
    ] = "",
    records: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Score this .jsonl or .npz instead (docs/dumps.md); no engine."
        ),
    ] = "",
    page: Annotated[
        str, typer.Option(metavar="FILE", help="Where the page goes.")
    ] = "mismatch.html",
) -> None:
    """Measure how far trainer and engine disagree, with and without the two replays.

    Generates fresh rollouts with the real engine, or reads those of another system, and scores
    them with the real trainer, in fp32 and in bf16, replaying nothing, routes, masks and both.
    Differences are of log-probabilities, in nats.  Writes a page that says where they come from:
    cause, layer, position, age of the weights, worst tokens.

    Examples:

      moerl mismatch quickstart sampling.top_p=0.9 --checkpoint runs/mine/hf
      moerl mismatch quickstart model.path=MODEL --records dump.jsonl --page gap.html
    """
    _checked(recipe, list(overrides or []), checkpoint)
    if records and not (Path(records).is_file() and records.endswith((".jsonl", ".npz"))):
        raise ConfigError("--records", records, "an existing .jsonl or .npz file is needed")
    if not Path(page).resolve().parent.is_dir():
        raise ConfigError("--page", page, "its folder does not exist")
    request = {
        "recipe": recipe,
        "overrides": list(overrides or []),
        "checkpoint": checkpoint,
        "tokens": tokens,
        "json": as_json,
        "keep": keep,
        "records": str(Path(records).resolve()) if records else "",
        "page": str(Path(page).resolve()),
    }
    raise typer.Exit(_guarded(request, module="moerl.launch.mismatch"))


@app.command("check-layout")
def check_layout(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model folder, or a config.json.")
    ],
    parallel: Annotated[
        str,
        typer.Option(
            metavar="tp=..,pp=..",
            help="Trainer: tp, pp, vpp, cp, ep, etp (1 where not named), dp (the least that holds "
            "ep * etp), first_stage_layers, last_stage_layers, vocab_divisible_by.",
        ),
    ] = "",
    engine: Annotated[
        str,
        typer.Option(
            metavar="tp=..,ep=..",
            help="Engines: tp, ep, dp (of attention), count, dtype, and any server argument or "
            "switch that decides how SGLang keeps weights, such as moe_runner_backend.",
        ),
    ] = "",
    flavor: Annotated[
        Literal["local", "te"], typer.Option(help="Layers of megatron-core or Transformer Engine.")
    ] = "local",
) -> None:
    """Prove that a model fits a trainer layout and an engine layout, on shapes alone.

    Every parameter of every rank is tiled exactly and every engine byte is covered once, or the
    tensor that is not is named.  An engine that keeps its weights in a form that is not known is
    refused.  No weight is read, for up to thousands of ranks.  Prints MiB and boxes per rank.

    Examples:

      moerl check-layout configs/models/qwen3-235b-a22b --parallel tp=4,pp=2,ep=8 --engine tp=32
      moerl check-layout runs/mine/hf --parallel ep=2 --engine tp=2,moe_runner_backend=triton
    """
    from moerl.engine.layout import stated_layout
    from moerl.layout import model_spec
    from moerl.layout.check import check_layout as check
    from moerl.layout.check import describe
    from moerl.layout.plan import EngineLayout

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
        flavor,
        engine_dtype=identity.dtype,
        quantization=identity.quantization,
    )
    typer.echo(describe(report))
    typer.echo(f"engine weight layout {identity.fingerprint()}: {identity}")


def _parallel_layout(text: str) -> ParallelLayout:
    """--parallel as a layout; dp that is not named is the least that holds ep * etp."""
    from moerl.layout import ParallelLayout

    names = [field.name for field in fields(ParallelLayout)]
    axes = {
        name: _count(f"--parallel {name}", value)
        for name, value in _named("--parallel", text, names).items()
    }
    if "dp" not in axes:
        within = axes.get("tp", 1) * axes.get("cp", 1)
        axes["dp"] = math.lcm(within, axes.get("ep", 1) * axes.get("etp", 1)) // max(1, within)
    return ParallelLayout(**axes | {"dp": max(1, axes["dp"])})


def _named(option: str, text: str, names: Sequence[str] = ()) -> dict[str, str]:
    """`a=1,b=x` as a dict.  names: those allowed, where it is known here."""
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


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    nic_gb_s: Annotated[float, typer.Option(help="GB/s of each rank's network card.")] = 50.0,
    ranks_per_node: Annotated[int, typer.Option(help="Engine ranks that share a node.")] = 8,
    efficiency: Annotated[
        float | None,
        typer.Option(help="Share of line rate, 0 to 1; default: what others published."),
    ] = None,
    direct: Annotated[
        int, typer.Option(help="Engines the trainer serves itself; 0 = the fastest number.")
    ] = 0,
    costs: Annotated[
        str,
        typer.Option(
            metavar="train_s=..,token_s=..",
            help="Measured or guessed seconds of the run's parts; their names are in "
            "docs/operations.md.",
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Forecast one publish of a recipe: bytes, traffic against a broadcast, seconds, buffers.

    With --costs it also simulates the run and advises how many engines, what buffer depth and
    which in-flight mode.  Reads the model's config.json and nothing else, for up to thousands of
    ranks.

    Examples:

      moerl plan kimi-k2
      moerl plan qwen3-235b-a22b engine.count=16 --nic-gb-s 25 --efficiency 0.3
      moerl plan qwen3-30b-a3b --costs train_s=60,token_s=0.02,output_tokens=4000
    """
    from moerl.config import load_config, resolve
    from moerl.launch.planning import pace_plan, sync_plan
    from moerl.layout.forecast import Links, forecast

    if efficiency is not None and not 0 < efficiency <= 1:
        raise ConfigError("--efficiency", efficiency, "must be above 0 and at most 1")
    config = resolve(load_config(recipe, list(overrides or [])))
    links = Links(nic_gb_s, ranks_per_node)
    reports, texts, slowest_s = [], [], 0.0
    for layouts in sync_plan.planned_layouts(config):
        found = forecast(*layouts, links, direct=direct)
        slowest_s = max(slowest_s, found.planned_s)
        reports.append(sync_plan.as_json(found, links, efficiency))
        texts.append(sync_plan.describe(found, links, layouts, efficiency))
    text, report = "\n\n".join(texts), reports[0]
    if len(reports) > 1:
        report = {"sizes": reports}
    if costs:
        named = _named("--costs", costs, list(pace_plan.NAMES))
        advice = pace_plan.pace(config, named, slowest_s / (efficiency or 1.0))
        report["pace"] = pace_plan.as_json(advice)
        text += "\n" + pace_plan.describe(advice, config)
    typer.echo(json.dumps(report) if as_json else text)


@app.command()
def trace(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or its folder.")],
) -> None:
    """Write RUN/trace.json, every process of a run on one time axis; the run may be going on.

    Open it at ui.perfetto.dev or in chrome://tracing; both read it on this machine.  What the
    spans are is in docs/metrics.md.

    Example:

      moerl trace mine
    """
    from moerl.observe.perfetto import write_trace

    typer.echo(write_trace(RunDir(find_run(run, "RUN"))))


@app.command()
def manifest(recipe: Recipe, overrides: Overrides = None, run: RunName = "") -> None:
    """Print Kubernetes objects of a run (KubeRay and an indexed Job); applies nothing.

    Example:

      moerl manifest qwen3-30b-a3b cluster=kuberay run.root=/runs --run mine | kubectl apply -f -
    """
    from moerl.launch.cluster.manifest import manifest as objects

    config = _checked(recipe, [*(overrides or []), *_named_run(run)], starts=False)
    typer.echo(objects(config, [recipe, *(overrides or []), "--run", config.run.name]))


@app.command()
def doctor(
    cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="A name under configs/clusters, or a recipe.")
    ] = "laptop",
    overrides: Overrides = None,
) -> None:
    """Look at every node before a run does: versions, network, disks, ports, clocks, model, links.

    Other nodes are reached with cluster.remote, such as "ssh {host}".  Exit status 1 when
    something is wrong; every such row says what to do.

    Examples:

      moerl doctor
      moerl doctor qwen3-30b-a3b model.path=/data/Qwen3-30B-A3B run.root=/shared/runs
    """
    from moerl.config import load_config, resolve
    from moerl.config.checks import check
    from moerl.config.load import CONFIG_ROOT
    from moerl.launch.cluster.doctor import describe, examine

    settings = list(overrides or [])
    if (CONFIG_ROOT / "clusters" / f"{cluster}.yaml").is_file():
        config = resolve(load_config("quickstart", [f"cluster={cluster}", *settings]))
    else:
        config = resolve(load_config(cluster, settings))
    check(config, starts=False)
    found = examine(config)
    typer.echo(describe(found))
    raise typer.Exit(int(any(finding.remedy for finding in found)))


def _checked(
    recipe: str, overrides: list[str], checkpoint: str = "", *, starts: bool = True
) -> Any:
    """Everything that can be said about the settings without starting anything.

    starts: the model's weights must be there; otherwise its config.json is enough.
    """
    from moerl.config import load_config, resolve
    from moerl.config.checks import check, check_model

    config = resolve(load_config(recipe, overrides))
    if checkpoint:
        config = replace(config, model=replace(config.model, path=checkpoint))
    check(config, starts=starts)
    if not (config.model.path or config.model.tiny.enabled):
        raise ConfigError("model.path", "", "name a model's folder, or use model.tiny.enabled=true")
    if starts and (config.model.path or not config.model.tiny.enabled):
        check_model(config)
    return config


def _named_run(name: str) -> list[str]:
    """The override of run.name, as text whatever it looks like; none without a name."""
    return [f"run.name={json.dumps(name)}"] if name else []


def _resume(folder: Path, overrides: list[str], reset_optimizer: bool, dry_run: bool) -> NoReturn:
    from moerl.config import resolve
    from moerl.config.checks import check, check_model
    from moerl.config.load import load_saved
    from moerl.config.resume import check_resume

    config = resolve(load_saved(folder / "config.yaml", overrides))
    check(config)
    check_model(config)
    if newest := RunDir(folder).latest_checkpoint():
        check_resume(config, read_manifest(newest[1]), reset_optimizer=reset_optimizer)
    if dry_run:
        from moerl.launch.planning.dry_run import describe

        typer.echo(describe(config, ["--resume", str(folder), *overrides]))
        raise typer.Exit
    request = {"resume": str(folder), "overrides": overrides, "reset_optimizer": reset_optimizer}
    raise typer.Exit(_guarded(request))


def _guarded(request: dict[str, Any], module: str = "moerl.launch.root") -> int:
    """Run the request in a guarded root process; its scratch folder is removed afterwards."""
    from moerl.launch.nodes.processes import run_guarded

    scratch = Path(tempfile.mkdtemp(prefix="moerl-"))
    try:
        body = json.dumps(request | {"scratch": str(scratch)})
        return run_guarded([sys.executable, "-m", module, body], stop_timeout_s=8.0)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> None:
    """Entry point: a user's mistake is one sentence on standard error and exit status 2."""
    try:
        app(standalone_mode=True)
    except MoerlError as error:
        print(f"moerl: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
