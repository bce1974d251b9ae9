"""The command line: `moerl train`, `sft`, `mismatch`, `plan`, `doctor` and others.

Heavy packages are imported only by the commands that need them.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from moerl.audit import eval_command
from moerl.core.errors import ConfigError, MoerlError, printable
from moerl.launch.arguments import RECIPE, Overrides, Recipe, RunName
from moerl.launch.engine_commands import engines
from moerl.planning import data_command, shape_commands
from moerl.runtime.process_tree import guarded as _guarded
from moerl.runtime.run_dir import RunDir, find_run
from moerl.runtime.run_lock import holder_of

if TYPE_CHECKING:
    from moerl.config import Config

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous RL post-training of Mixture-of-Experts models, with Keep Routing and "
    "Keep Sampling Mask on by default.",
)

app.add_typer(engines, name="engines")


Resume = Annotated[
    str, typer.Option(metavar="RUN", help="Continue runs/RUN (or a path) from its checkpoint.")
]
ResetOptimizer = Annotated[
    bool, typer.Option("--reset-optimizer", help="With --resume: start from fresh optimizer state.")
]
AllowChanged = Annotated[
    bool,
    typer.Option(
        "--allow-changed", help="With --resume: go on with another task, seed or algorithm."
    ),
]
FromStart = Annotated[
    bool,
    typer.Option("--from-start", help="With --resume: train steps again that no checkpoint holds."),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Start nothing: check the settings, then print all of them, every process and "
        "command, ports, and memory in GB.",
    ),
]


@app.command()
def train(
    recipe: Annotated[str | None, RECIPE] = None,
    overrides: Overrides = None,
    run: RunName = "",
    resume: Resume = "",
    reset_optimizer: ResetOptimizer = False,
    allow_changed: AllowChanged = False,
    from_start: FromStart = False,
    dry_run: DryRun = False,
) -> None:
    """Train a recipe to its last step, or continue a run.

    Writes metrics, logs, checkpoints, report.html and the trained model to runs/NAME; without
    --run, NAME is the recipe's with the time.

    Examples:

      moerl train quickstart
      moerl train quickstart run.steps=300 sampling.top_p=0.9 --run mine
      moerl train qwen3-30b-a3b model.path=/data/Qwen3-30B-A3B --dry-run

      moerl train --resume mine                  (after Ctrl-C or a crash)
      moerl train --resume mine run.steps=400    (further than planned)
      moerl train --resume mine trainer.parallel.dp=4 trainer.parallel.ep=4
    """
    asked = {
        "reset_optimizer": reset_optimizer,
        "allow_changed": allow_changed,
        "from_start": from_start,
    }
    if resume:
        if run:
            raise ConfigError("--run", run, "--resume continues in the run's folder; leave it out")
        changed = [item for item in (recipe, *(overrides or [])) if item]
        _resume(find_run(resume, "--resume"), changed, asked, dry_run)
    for name, given in asked.items():
        if given:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(option, True, "it belongs to --resume; a new run begins with nothing")
    if not recipe:
        raise ConfigError("RECIPE", recipe, "give a RECIPE, or --resume RUN")
    _start(recipe, _placed(recipe, overrides), run, dry_run)


@app.command()
def sft(recipe: Recipe, overrides: Overrides = None, run: RunName = "") -> None:
    """Supervised training on the answers of a recipe's task, as a warm start; writes runs/NAME/hf.

    Each of run.steps steps trains the answers to the next rollout.groups_per_step prompts of the
    task, for example a JSONL file of {"prompt" or "messages", "answer"}. No engine is started;
    engine, algorithm and other rollout settings are not used.

    Examples:

      moerl sft quickstart task.name=jsonl task.path=demos.jsonl task.reward=exact_match --run warm
      moerl train quickstart model.path=runs/warm/hf
    """
    settings = [*_placed(recipe, overrides), *_named_run(run)]
    config = _checked(recipe, settings)
    if not run:
        settings += _named_run(f"{config.run.name}-sft-{time.strftime('%Y%m%d-%H%M%S')}")
    _check_disks(config, engines=False)
    _check_fields(config, learned=True)
    arguments = {"recipe": recipe, "overrides": settings}
    raise typer.Exit(_guarded(arguments, module="moerl.launch.sft_command"))


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
        str, typer.Option(metavar="DIR", help="Keep records and scores in this new folder.")
    ] = "",
    records: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Score this .jsonl, .npz or .step (docs/formats.md); no engine.",
        ),
    ] = "",
    page: Annotated[str, typer.Option(metavar="FILE", help="Path of the page.")] = "mismatch.html",
) -> None:
    """Measure the log-probability difference of trainer and engine, with and without replay.

    Generates fresh rollouts with the real engine, or reads rollouts of another system, and scores
    them with the real trainer, in fp32 and in bf16, replaying nothing, routes, masks and both.
    Differences are of log-probabilities, in nats.  Writes a page that breaks them down by cause,
    layer, position, weight version lag, and worst tokens.

    Examples:

      moerl mismatch quickstart sampling.top_p=0.9 --checkpoint runs/mine/hf
      moerl mismatch quickstart model.path=MODEL --records dump.jsonl --page gap.html
    """
    settings = _placed(recipe, overrides)
    _checked(recipe, settings, checkpoint)
    _check_paths(records, keep, page)
    arguments = {
        "recipe": recipe,
        "overrides": settings,
        "checkpoint": checkpoint,
        "tokens": tokens,
        "json": as_json,
        "keep": keep,
        "records": str(Path(records).resolve()) if records else "",
        "page": str(Path(page).resolve()),
    }
    raise typer.Exit(_guarded(arguments, module="moerl.audit.mismatch_command"))


@app.command()
def verify(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or its folder.")],
) -> None:
    """Check the stream of a run: its chain, digests, versions and coverage.

    Needs no torch and no GPU, and works on a copy of the run from another machine; the run may be
    running. The exit status is 1 when anything differs. docs/rerun.md explains the rows.

    Example:

      moerl verify mine
    """
    from moerl.audit.verify_run import verify as verified

    found = verified(find_run(run, "RUN"))
    typer.echo(printable(found.table()))
    raise typer.Exit(int(bool(found.differences)))


@app.command()
def rerun(
    source: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or its folder.")],
    first: Annotated[
        int, typer.Option("--from", min=0, metavar="STEP", help="First step; needs a checkpoint.")
    ] = 0,
    last: Annotated[
        int, typer.Option("--to", metavar="STEP", help="Stop before this step; default: the end.")
    ] = -1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Train with another setting; repeatable."),
    ] = None,
    run: RunName = "",
) -> None:
    """Train a run again from its stream (stream.keep_steps), without engines.

    Every step must end with the recorded weights, bit for bit; the first difference is named, and
    the exit status is then 1. With another layout (--set trainer.parallel...) gradient norms must
    agree; with another loss the rollouts are the same and curves are drawn beside each other.
    --from begins at the newest checkpoint up to that step.

    Examples:

      moerl rerun mine
      moerl rerun mine --from 40 --to 60
      moerl rerun mine --set algorithm.objective=cispo --run mine-cispo
    """
    folder = find_run(source, "RUN")
    name = run or f"{folder.resolve().name}-rerun-{time.strftime('%Y%m%d-%H%M%S')}"
    if (folder.parent / name).exists():
        raise ConfigError("--run", name, f"{folder.parent / name} exists; choose another")
    arguments = {"source": str(folder), "name": name, "first": first, "last": last}
    arguments |= {"settings": list(settings or [])}
    raise typer.Exit(_guarded(arguments, module="moerl.audit.rerun_command"))


app.command()(eval_command.eval)
app.command("check-layout")(shape_commands.check_layout)
app.command()(shape_commands.plan)
app.command()(data_command.data)


@app.command()
def check_dump(
    dump: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .jsonl or .npz (docs/formats.md).")
    ],
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Its model's folder, or a config.json.")
    ],
) -> None:
    """Check recorded rollouts of another system against a model's shapes, and count them.

    A missing, unknown or misfitting field is reported with its line or rollout.  `moerl mismatch
    RECIPE --records FILE` then scores the file; that needs the trainer.

    Example:

      moerl check-dump dump.jsonl configs/models/qwen3-30b-a3b
    """
    from moerl.audit.dumps import summary

    typer.echo(summary(dump, model))


@app.command()
def trace(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or its folder.")],
) -> None:
    """Write RUN/trace.json, all processes of a run on one time axis; the run may be running.

    Open it at ui.perfetto.dev or in chrome://tracing; both read it locally. docs/metrics.md
    explains the spans.

    Example:

      moerl trace mine
    """
    from moerl.observe.perfetto import write_trace

    typer.echo(write_trace(RunDir(find_run(run, "RUN"))))


@app.command()
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or its folder.")],
) -> None:
    """Write RUN/report.html from the current files; the run may be running or may have died.

    A run writes its page at its end; only that page has the speed of the engines alone, which is
    measured then.

    Example:

      moerl report mine
    """
    from moerl.config.load import load_saved
    from moerl.launch.nodes.control_api import is_running
    from moerl.observe.report import write_report

    found = RunDir(find_run(run, "RUN"))
    typer.echo(write_report(found, load_saved(found.config), is_running=is_running(found)))


@app.command()
def doctor(
    cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="A name under configs/clusters, or a recipe.")
    ] = "laptop",
    overrides: Overrides = None,
) -> None:
    """Check every node before a run: versions, network, disks, ports, clocks, model, links.

    Other nodes are reached with cluster.remote, such as "ssh {host}". The exit status is 1 when a
    check fails; every failed row says how to repair it.

    Examples:

      moerl doctor
      moerl doctor qwen3-30b-a3b model.path=/data/Qwen3-30B-A3B run.root=/shared/runs
    """
    from moerl.config import load_config, resolve
    from moerl.config.checks import check
    from moerl.config.load import CONFIG_ROOT
    from moerl.doctor.doctor import describe, examine

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
    """Every check of the settings that starts nothing.

    starts: the model's weights must exist; otherwise its config.json is enough.
    """
    from moerl.config import load_config, resolve
    from moerl.config.checks import check, check_model
    from moerl.launch.folder_checks import check_folders

    config = load_config(recipe, overrides)
    if checkpoint:
        config = replace(config, model=replace(config.model, path=checkpoint))
    if starts:
        _check_gpus(config)
    config = resolve(_with_transport(config))
    check(config, starts=starts)
    if not (config.model.path or config.model.tiny.enabled):
        raise ConfigError("model.path", "", "name a model's folder, or use model.tiny.enabled=true")
    if starts and (config.model.path or not config.model.tiny.enabled):
        check_model(config)
    if starts:
        check_folders(config)
    return config


def _check_gpus(config: Config) -> None:
    from moerl.launch.own_gpu import lacks_gpus

    if why := lacks_gpus(config):
        raise ConfigError("cluster", config.cluster.name, why)


def _check_fields(config: Config, *, learned: bool = False) -> None:
    from moerl.launch.line_checks import check_fields

    check_fields(config, learned=learned)


def _check_disks(config: Config, *, engines: bool = True) -> None:
    from moerl.planning.disks import check_disks

    for sentence in check_disks(config, engines=engines):
        typer.echo(f"moerl: {sentence}", err=True)


def _with_transport(config: Config) -> Config:
    """`sync.transport: auto` by the model's shapes, where one machine with GPUs leaves a choice."""
    from moerl.config.transport_rules import why_not, with_transport

    group = next(iter(config.cluster.nodes.values()), None)
    if config.sync.transport != "auto" or group is None or not group.devices:
        return config
    if config.cluster.launcher != "local" or why_not(config, "cuda_ipc"):
        return config
    from moerl.planning.estimates import model_shapes
    from moerl.planning.publish_forecast import auto_transport

    try:
        return with_transport(config, auto_transport(config, model_shapes(config)))
    except MoerlError:  # no readable model: the checks say it
        return config


def _check_paths(records: str, keep: str, page: str) -> None:
    """Check the paths of `moerl mismatch`: inputs exist, outputs can be written."""
    endings = (".jsonl", ".npz", ".step")
    if records and not (Path(records).is_file() and records.endswith(endings)):
        raise ConfigError("--records", records, "an existing .jsonl, .npz or .step file is needed")
    if keep and Path(keep).exists():
        raise ConfigError("--keep", keep, "it exists; name a new folder")
    if not Path(page).resolve().parent.is_dir():
        raise ConfigError("--page", page, "its folder does not exist")


def _named_run(name: str) -> list[str]:
    """The override of run.name, always as text; none without a name."""
    return [f"run.name={json.dumps(name)}"] if name else []


def _placed(recipe: str, overrides: list[str] | None) -> list[str]:
    """The overrides, and this machine's GPU; says so on standard error."""
    from moerl.launch.own_gpu import use_own_gpu

    settings, sentence = use_own_gpu(recipe, overrides or [])
    if sentence:
        typer.echo(f"moerl: {sentence}", err=True)
    return settings


def _describe(config: Config, words: list[str]) -> NoReturn:
    """Print a dry run.  words: of the command."""
    from moerl.launch.own_gpu import lacks_gpus
    from moerl.launch.trainer_check import check_trainer
    from moerl.planning.dry_run import describe
    from moerl.planning.estimates import model_shapes

    lines = [describe(config, words), *check_trainer(config, model_shapes(config))]
    if why := lacks_gpus(config):
        lines.append(f"a start on this machine is refused: {why}")
    typer.echo("\n".join(lines))
    raise typer.Exit


def _start(recipe: str, overrides: list[str], run: str, dry_run: bool) -> NoReturn:
    settings = [*overrides, *_named_run(run)]
    config = _checked(recipe, settings, starts=not dry_run)
    if config.sync.transport == "cuda_ipc":  # by the plan: the run's own process reads no shapes
        settings += ["sync.transport=cuda_ipc"]
    name = config.run.name
    if not run and name == Path(recipe).stem:
        name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        settings += _named_run(name)
    if dry_run:
        described = replace(config, run=replace(config.run, name=name))
        _describe(described, [recipe, *overrides, "--run", name])
    on_gpus = any(group.devices for group in config.cluster.nodes.values())
    if config.cluster.colocated != "none" and on_gpus:
        from moerl.planning.estimates import check_colocated

        moves = check_colocated(config)
        settings += [f"turn.moves=[{','.join(moves)}]"] if moves else []
    if (Path(config.run.root) / name / "state.json").exists():
        raise ConfigError(
            "run.name", name, f"{config.run.root}/{name} exists; choose another or use --resume"
        )
    _check_disks(replace(config, run=replace(config.run, name=name)))
    _check_fields(config)
    arguments = {"resume": "", "recipe": recipe, "overrides": settings}
    raise typer.Exit(_guarded(arguments))


def _resume(
    folder: Path, overrides: list[str], options: dict[str, bool], dry_run: bool
) -> NoReturn:
    from moerl.config import resolve
    from moerl.config.checks import check, check_model
    from moerl.config.load import load_resumed
    from moerl.config.resume import check_continues
    from moerl.launch.folder_checks import check_folders

    if not dry_run and (other := holder_of(folder)) is not None and not other.is_ending:
        raise MoerlError(f"{folder} is in use: it is {other}")
    run, config = RunDir(folder), resolve(load_resumed(folder / "config.yaml", overrides))
    check(config)
    check_model(config)
    newest, torn = run.latest_whole_checkpoint()
    changes = {name: options[name] for name in ("reset_optimizer", "allow_changed")}
    check_continues(config, run, newest, **changes)
    for path, cause in torn.items():
        begin = f"moerl continues from {newest.name if newest else 'step 0'}"
        typer.echo(f"moerl: {path.name} is damaged ({cause}): {begin}", err=True)
    check_folders(config)
    if dry_run:
        _describe(config, ["--resume", str(folder), *overrides])
    _check_gpus(config)
    _check_disks(config)
    _check_fields(config)
    raise typer.Exit(_guarded({"resume": str(folder), "overrides": overrides} | options))


def main() -> None:
    """Entry point: a user error is one sentence on standard error and exit status 2."""
    try:
        app(standalone_mode=True)
    except MoerlError as error:
        print(f"moerl: {printable(error)}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
