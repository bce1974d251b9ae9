"""Root process of a run: `python -m moerl.launch.train REQUEST`, started by `moerl train`.

REQUEST is a JSON object.  `moerl.runtime.process_tree` says why a run has two such processes.
The root checks the settings, runs the supervisor, and reports how the run ended.  One process at a
time writes a run directory.  The report is written after failures too, and no process outlives the
run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import xxhash

from moerl.config import Config, resolve, save_config
from moerl.config.algorithms import ref_field, ref_models_of
from moerl.config.checks import check, check_model
from moerl.config.clusters import is_local, own_address, placement, starts_on_cuda
from moerl.config.engine_context import check_context
from moerl.config.load import derived_settings, load_config, load_resumed
from moerl.config.resume import check_continues, identity
from moerl.config.secret_values import refuse_hidden
from moerl.config.task_mixture import entries_of, naming, reward_models_of
from moerl.core.atomic import atomic_write
from moerl.core.errors import ConfigError, DaemonError, MoerlError, cause_of, printable
from moerl.core.json_files import read_model_config
from moerl.core.rpc import Keys
from moerl.data.shared_prefix import check_shared
from moerl.engine.host.server_args import check_args, check_planned_layout
from moerl.launch.bundle_check import check_bundle
from moerl.launch.folder_checks import check_folders
from moerl.launch.line_checks import line_checks
from moerl.launch.model_folders import (
    check_policy,
    check_ref_models,
    check_reward_model,
    with_start,
    with_tiny_model,
)
from moerl.launch.reward_trial import try_rewards
from moerl.launch.run_context import RunContext
from moerl.launch.task_agents import task_agents
from moerl.launch.trainer_check import check_trainer
from moerl.layout import model_spec
from moerl.observe.console import Console
from moerl.observe.metrics import newest_row, read_rows
from moerl.observe.perfetto import write_trace
from moerl.observe.report import held_out_words, reward_gain, write_report
from moerl.observe.sinks import PrometheusServer, check_sinks
from moerl.runtime.beside import Beside
from moerl.runtime.file_systems import NETWORK_FILE_SYSTEMS, file_system
from moerl.runtime.private_dir import private_dir, user_dir
from moerl.runtime.process_tree import (
    INTERRUPT,
    RESUME_FILE,
    SignalWatch,
    end_descendants,
    leave,
)
from moerl.runtime.reaper import become_subreaper
from moerl.runtime.run_dir import RunDir, next_incarnation, refuse_foreign
from moerl.runtime.run_lock import held
from moerl.sandbox.limits import isolation_of
from moerl.trainer.checkpoints.checkpoint_files import newest_checkpoint

log = logging.getLogger(__name__)

_GRACE_S = 2.0
_BEGIN_ANEW = "no step was trained: mend the cause, then start a new run"
RESUME_OPTIONS = ("reset_optimizer", "allow_changed", "from_start")  # of `prepare`


def main() -> int:
    arguments = json.loads(sys.argv[1])
    become_subreaper()
    try:
        return _run(arguments)
    except MoerlError as error:
        print(f"moerl: {printable(error)}", file=sys.stderr)
        return 1


def _run(arguments: dict[str, Any]) -> int:
    resume, scratch = bool(arguments["resume"]), Path(arguments["scratch"])
    if resume:
        config = load_resumed(Path(arguments["resume"]) / "config.yaml", arguments["overrides"])
    else:
        config = load_config(arguments["recipe"], arguments["overrides"])
    set_ray_environment(config)
    options = {name: resume and arguments[name] for name in RESUME_OPTIONS}
    may_ask = is_local(config.cluster) and not arguments.get("is_again")
    return train(config, resume=resume, scratch=scratch, may_ask=may_ask, **options)


def set_ray_environment(config: Config) -> None:
    """Set the variables that Ray reads on import: a cluster of this run, with authentication."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # the report is written after Ray has ended; the client would end this process earlier
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        "RAY_AUTH_MODE": "token",
        "RAY_worker_niceness": "0",  # default 15, inherited by servers: engines would be slow
    }
    os.environ["RAY_AUTH_TOKEN"] = ray_token(config, os.environ)
    if is_local(config.cluster):
        # its setting for macOS and Windows: all of Ray listens on loopback, not on all interfaces
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def ray_token(config: Config, environment: Mapping[str, str]) -> str:
    """A token of this start, or of the running Ray cluster that the run joins."""
    if not config.cluster.ray:
        return secrets.token_hex(32)
    if not environment.get("RAY_AUTH_TOKEN"):
        raise ConfigError(
            "cluster.ray", config.cluster.ray, "the environment needs RAY_AUTH_TOKEN, its token"
        )
    return environment["RAY_AUTH_TOKEN"]


def train(
    config: Config, *, resume: bool, scratch: Path, may_ask: bool = False, **options: bool
) -> int:
    """Run to the last step; returns the exit status.  Prints the cause of a failure last.

    scratch: folder of this start for sockets of Ray and the gateway; the caller removes it.
    may_ask: request a resume in that folder when a daemon of Ray died.  options: of `prepare`.
    """
    from moerl.launch.supervision.supervisor import Supervisor

    run = RunDir(Path(config.run.root) / config.run.name)
    run.create()
    logging.basicConfig(
        filename=run.logs / "root.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    say = partial(print, "moerl:", file=sys.stderr, flush=True)
    with held(run.root, say) as note, own_output(run) as (out, err):
        context = replace(prepare(config, run, resume=resume, **options), scratch=scratch)
        lines = line_checks(context.config, context.tokenizer(), context.spec().max_positions)
        say = partial(print, "moerl:", file=err, flush=True)
        lines.begin(say)
        for sentence in try_rewards(lines.training):
            say(sentence)
        save_config(context.config, run.config, derived_settings(config))
        facts = json.dumps(identity(context.config), indent=1)
        atomic_write(run.identity, facts, sync=True, mode=0o600)
        console = Console(config.run.console, config.run.steps, out)
        console.restore(read_rows(run.metrics))
        signals = SignalWatch(lambda: _end_at_once(run, err))
        supervisor = Supervisor(
            context, console, scratch, signals, check=lines.raise_failure, note=note
        )
        lines.go_on()
        try:
            with _prometheus(context, console):
                summary = supervisor.run()
        except Exception as error:
            log.exception("the run failed")
            cause, summary = cause_of(error), {}
            asks = may_ask and isinstance(error, DaemonError)
        else:
            cause, asks = "", False
        finally:
            note("ending")
            _close_endpoints(run)
        end_descendants(grace_s=_GRACE_S)
        if asks:
            console.close()
            return _ask_resume(supervisor.run_context, scratch, lambda text: say(cause, text))
        has_steps = bool(read_rows(run.metrics))
        kept = _tidy(supervisor.run_context, is_done=not cause, has_steps=has_steps)
        return _close(context, console, summary, cause, kept, err)


@contextlib.contextmanager
def _prometheus(context: RunContext, console: Console) -> Iterator[None]:
    """Serve the run's metrics to Prometheus, if a port is set.  Raises ConfigError."""
    port, cluster = context.config.observe.prometheus_port, context.config.cluster
    if not port:
        yield
        return
    server = PrometheusServer(context.run, own_address(cluster), port, context.token)
    beside = Beside("Prometheus", console.event)
    try:
        beside.call(lambda: context.run.endpoints.post_metrics(server.url, context.token))
        token = context.run.endpoints.folder / "token"
        console.event(f"Prometheus: {server.url}, Authorization: Bearer with {token}")
        yield
    finally:
        beside.call(server.close)


def _ask_resume(context: RunContext, scratch: Path, say: Callable[[str], None]) -> int:
    """Ask for a resume of this run with its own settings; returns the exit status.

    Steps that no checkpoint holds are trained again.  say: prints the cause and a sentence.
    """
    newest = newest_checkpoint(context.run)
    request = {
        "resume": str(context.run.root),
        "overrides": [],
        "is_again": True,
        "reset_optimizer": context.reset_optimizer and newest == context.checkpoint,
        "allow_changed": False,
        "from_start": newest is None and context.checkpoint is None,
    }
    atomic_write(scratch / RESUME_FILE, json.dumps(request))
    say("- all processes were ended, and the run is resumed, this once")
    return 1


def _end_at_once(run: RunDir, err: IO[str]) -> None:
    """A signal came and the main thread hangs.  Called in another thread."""
    with (run.logs / "root.log").open("a", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    _close_endpoints(run)
    end_descendants(grace_s=_GRACE_S)
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"moerl: {INTERRUPT}; its root process hung, see {run.logs / 'root.log'}", file=err)
        print(f"moerl: continue with: moerl train --resume {run.root}", file=err, flush=True)
    os._exit(130)


def _close_endpoints(run: RunDir) -> None:
    """Other nodes leave the run: at once, or after a lease when the file system fails."""
    for close in (run.endpoints.close, run.endpoints.close_ray, run.endpoints.close_lease):
        try:
            close()
        except OSError as error:
            log.warning("the endpoints folder is not closed: %s", error)


def _tidy(context: RunContext, *, is_done: bool, has_steps: bool) -> str:
    """Remove journal and blobs unless a resume can use them; then return a sentence about them."""
    if is_done or not has_steps:  # with `shared`, segments are in the run directory
        for folder in (context.journal_dir, context.run.journal, context.blob_dir):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        return ""
    num_bytes = sum(path.stat().st_size for path in context.blob_dir.glob("*"))
    return f"{num_bytes / 2**20:.1f} MiB of finished rollouts wait in {context.blob_dir}"


def _close(
    context: RunContext,
    console: Console,
    numbers: dict[str, float],
    cause: str,
    kept: str,
    err: IO[str],
) -> int:
    """Write the report and print the summary.  kept: a sentence about files for a resume."""
    run = context.run
    writes: dict[str, Callable[[], object]] = {
        "report": lambda: write_report(run, context.config, numbers),
        "timeline": lambda: write_trace(run),
    }
    for name, write in writes.items():
        try:
            write()
        except Exception as error:  # the trained steps are not lost by it
            log.exception("the %s", name)
            print(f"moerl: the {name} was not written: {cause_of(error)}", file=err)
    rows = read_rows(run.metrics)
    words: dict[str, object] = {}
    if gain := reward_gain(rows):
        words["reward"] = f"{gain[0]:.3f} (first tenth) -> {gain[1]:.3f} (last tenth)"
    if held_out := held_out_words(rows):
        words["held-out reward"] = " -> ".join(held_out) + ", 95 % intervals"
    words |= {name: f"{value:,.0f}" for name, value in numbers.items()}
    if not cause and run.hf.is_dir():
        words["trained model"] = run.hf
    words |= {"report": run.report, "timeline (ui.perfetto.dev)": run.perfetto}
    console.close(words)
    if cause:
        print(f"moerl: {printable(cause)}", file=err)
        if kept:
            print(f"moerl: {kept}", file=err)
        again = f"moerl train --resume {run.root}"
        if rows and run.latest_checkpoint() is None:  # as _refuse_lost_steps
            again += " --from-start"
        then = f"continue with: {again}" if rows or cause == INTERRUPT else _BEGIN_ANEW
        print(f"moerl: logs are in {run.logs}; {then}", file=err, flush=True)
        return 130 if cause == INTERRUPT else 1
    return 0


@contextlib.contextmanager
def own_output(run: RunDir) -> Iterator[tuple[IO[str], IO[str]]]:
    """(stdout, stderr) of the terminal; output of children and libraries goes to logs/output.log.

    The descriptors themselves are swapped, because Ray's daemons inherit them.
    """
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((run.logs / "output.log").open("ab"))
        ours = []
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            copy = os.dup(stream.fileno())
            ours.append(
                stack.enter_context(os.fdopen(copy, "w", encoding=stream.encoding, buffering=1))
            )
            os.dup2(log.fileno(), stream.fileno())
        try:
            yield ours[0], ours[1]
        finally:
            for stream, own in zip((sys.stdout, sys.stderr), ours, strict=True):
                stream.flush()
                os.dup2(own.fileno(), stream.fileno())


def prepare(
    config: Config,
    run: RunDir,
    *,
    resume: bool,
    reset_optimizer: bool = False,
    allow_changed: bool = False,
    from_start: bool = False,
) -> RunContext:
    """Run every check that needs no process, make the recipe's tiny model, clear old files.

    With resume: reset_optimizer starts from fresh optimizer state; allow_changed continues with
    another task, seed or algorithm; from_start trains steps again that no checkpoint holds.
    Raises ConfigError before any process is started.
    """
    config, hf_config = _checked(config, run, reset_optimizer=reset_optimizer)
    if resume:
        refuse_foreign(run)
    checkpoint = newest_checkpoint(run) if resume else None
    if resume:
        changes = {"reset_optimizer": reset_optimizer, "allow_changed": allow_changed}
        check_continues(config, run, checkpoint, **changes)
    if resume and checkpoint is None:
        _refuse_lost_steps(run, from_start=from_start)
    journal_dir, blob_dir = _folders(config, run)
    incarnation = _first_incarnation(config, run, resume=resume)
    if not resume:  # left by a removed run of the same name
        for folder in (journal_dir, run.journal, blob_dir):
            shutil.rmtree(folder, ignore_errors=True)
    run.endpoints.close()  # of an earlier start that was killed
    run.endpoints.close_ray()
    run.endpoints.make_folder()
    Keys.make().write(run.endpoints.keys)
    context = RunContext(
        config=config,
        run=run,
        model_path=Path(config.model.path),
        hf_config=hf_config,
        token=secrets.token_hex(16),
        incarnation=incarnation,
        node="local",
        blob_dir=blob_dir,
        journal_dir=journal_dir,
        checkpoint=checkpoint,
        reset_optimizer=reset_optimizer and checkpoint is not None,
    )
    _check_parts(context)
    return context


def _refuse_lost_steps(run: RunDir, *, from_start: bool) -> None:
    """Raises ConfigError where steps were trained and no checkpoint holds them, unless the user
    asks to train them again: the hello of the trainer at step 0 then cuts their rows.
    """
    if (row := newest_row(run.metrics)) is not None and not from_start:
        raise ConfigError(
            "--resume",
            str(run.root),
            f"{row['step'] + 1} steps were trained and no checkpoint was written; give "
            "--from-start to train them again from step 0",
        )


def _checked(
    config: Config, run: RunDir, *, reset_optimizer: bool
) -> tuple[Config, dict[str, Any]]:
    """Settings as they will be used, and the model's config.json."""
    config = resolve(config)
    check(config)
    check_sinks(config.observe)
    refuse_hidden(config)
    check_args(config.engine.args, replay=config.replay.routing == "R3")
    if reset_optimizer and not is_local(config.cluster):
        raise ConfigError(
            "--reset-optimizer",
            True,
            "not supported on a cluster yet; needs cluster.launcher=local",
        )
    config = with_start(with_tiny_model(config, run), run)
    hf_config = check_model(config)
    check_bundle(config, hf_config)
    check_folders(config)
    check_trainer(config, hf_config)
    for tp in {config.engine.tp, *config.engine.tp_each}:
        check_planned_layout(
            replace(config.engine, tp=tp),
            hf_config,
            cuda=starts_on_cuda(config, placement(config)),
            routing=config.replay.routing == "R3",
        )
    return config, hf_config


def _check_parts(context: RunContext) -> None:
    """Raise for a part that cannot be made, before anything starts."""
    spec = context.spec()  # raises for an unknown family
    check_policy(context.config, spec, context.hf_config)
    check_context(context.config, spec.max_positions)
    for role, path in ref_models_of(context.config).items():
        check_ref_models(ref_field(role), path, spec)
    for path in reward_models_of(context.config):
        check_reward_model(path, spec, context.tokenizer())
    if context.config.trainer.share_prompts:
        others = (*ref_models_of(context.config).values(), *reward_models_of(context.config))
        for one in (spec, *(model_spec(read_model_config(Path(path))) for path in others)):
            check_shared(one)
    for task in entries_of(context.config):
        with naming(task):
            isolation_of(task)  # raises where this machine cannot enforce it
    task_agents(context)  # raises for a chat template or a program that cannot be used


def _folders(config: Config, run: RunDir) -> tuple[Path, Path]:
    """Folders of the journal and of the records, made.  Raises ConfigError when others own them."""
    outside = config.rollout.journal_dir
    journal_dir = outside_folder(outside, run) if outside else run.journal
    _refuse_network(journal_dir)
    blob_dir = outside_folder(config.cluster.blob_dir, run)
    private_dir(journal_dir, "rollout.journal_dir")
    return journal_dir, private_dir(blob_dir, "cluster.blob_dir")


def outside_folder(base: str, run: RunDir) -> Path:
    """This run's folder outside its directory: unique per run, equal at every start."""
    name = xxhash.xxh3_64_hexdigest(str(run.root.resolve()).encode())
    return user_dir(Path(base)) / name


def _refuse_network(folder: Path) -> None:
    """SQLite's locks and shared memory do not work on network file systems."""
    kind = file_system(folder)
    if kind in NETWORK_FILE_SYSTEMS:
        raise ConfigError(
            "rollout.journal_dir",
            str(folder),
            f"{kind} is a network file system; name a local folder",
        )


def _first_incarnation(config: Config, run: RunDir, *, resume: bool) -> int:
    """Version 0.0 is the model folder, which engines serve first: adapters begin as 1.0."""
    incarnation = next_incarnation(run, resume=resume)
    has_adapter = bool(config.lora.start) or config.lora.serves_adapters
    begins_later = has_adapter and incarnation == 0
    return next_incarnation(run, resume=True) if begins_later else incarnation


if __name__ == "__main__":
    leave(main)
