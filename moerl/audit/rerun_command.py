"""`moerl rerun`: train a run again from its stream, without engine and without Ray.

This process answers the trainer in the controller's place: it gives out the recorded plans, with
their groups and records, and compares the digest of the weights after each step with the recorded
digest.  A changed setting trains another loss, or another layout, on the same rollouts.

rerun.html: the curves of a rerun beside those of the run that it repeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moerl.audit.verify_run import step_differences
from moerl.config import Config, save_config
from moerl.config.algorithms import followers_of
from moerl.config.load import load_saved
from moerl.config.resume import refuse_used_up
from moerl.core.errors import ConfigError, ProtocolError, TrainerError
from moerl.core.messages import (
    BadStep,
    Failed,
    Hello,
    Message,
    Notice,
    Ok,
    Plan,
    StepDone,
    Stop,
    TakePlan,
)
from moerl.core.rpc import Keys, RpcServer
from moerl.core.types import BatchPlan, PolicyVersion, RefScores
from moerl.data.batching import plan_batch
from moerl.data.teacher_versions import version_at
from moerl.distributed.torchrun import TorchrunJob
from moerl.launch.run_context import RunContext, trainer_command, trainer_environment
from moerl.launch.train import prepare
from moerl.observe.charts import Chart
from moerl.observe.metrics import MetricsWriter
from moerl.observe.page import Page, PageSection, figure, write_html
from moerl.records.blob_store import BlobStore
from moerl.records.header_check import moved_to_node
from moerl.records.stream_files import (
    StartLine,
    StepFile,
    StepLine,
    StreamDir,
    read_lines,
    surviving,
    whole_plan,
)
from moerl.runtime.process_tree import run_command
from moerl.runtime.run_dir import RunDir, refuse_foreign

# Settings that place the same sum on other ranks or microbatches: weights agree, not bitwise.
_LAYOUT = (
    *("trainer.parallel.", "trainer.max_tokens_per_microbatch"),
    *("trainer.packing", "trainer.share_prompts"),
)
# ... to this relative difference of a gradient norm over so many steps: sums of another order
# differ in their last bits, and training on them makes the difference grow without end.
LAYOUT_BOUND, LAYOUT_STEPS = 1e-2, 20
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class RerunRequest:
    """Arguments of the command."""

    source: Path  # run directory
    name: str  # of the new run, next to the source
    first: int  # step
    last: int  # exclusive; -1 = all
    settings: tuple[str, ...]  # key=value

    @property
    def is_exact(self) -> bool:
        """Whether weights must be equal bit for bit."""
        return not self.settings

    @property
    def keeps_loss(self) -> bool:
        """Whether only the layout differs."""
        return all(item.startswith(_LAYOUT) for item in self.settings)


@dataclass(slots=True)
class RecordedSteps:
    """Steps of the surviving history that are trained again, and where the trainer starts."""

    stream: StreamDir
    steps: list[StepLine]
    starts: dict[int, StartLine]  # by incarnation
    last: int  # exclusive
    checkpoint: Path | None  # None = the first weights
    first: int  # step of the checkpoint

    def weights_before(self, step: int) -> str:
        """Digest of the weights that a step starts from."""
        return self.steps[step - 1].weights if step else min(self.starts.items())[1].weights


def recorded_steps(request: RerunRequest) -> RecordedSteps:
    """Raises StreamError for a damaged stream, ConfigError for steps that it does not have."""
    stream = StreamDir(RunDir(request.source).stream)
    lines = [line for line, _ in read_lines(stream.log)]
    steps, _ = surviving(lines)
    starts = {line.version.incarnation: line for line in lines if isinstance(line, StartLine)}
    last = len(steps) if request.last < 0 else request.last
    if not 0 <= request.first < last <= len(steps):
        allowed = f"the stream has steps 0 to {len(steps) - 1}; --to is exclusive"
        raise ConfigError("--from, --to", (request.first, last), allowed)
    saved = [
        (step, path)
        for step, path in RunDir(request.source).finished_checkpoints()
        if 0 < step <= request.first
    ]
    first, checkpoint = max(saved, default=(0, None))
    if first < (kept := steps[-1].kept_from):
        raise ConfigError(
            "--from",
            request.first,
            f"records of steps before {kept} were deleted (stream.keep_steps), and no checkpoint "
            f"lies between {kept} and --from",
        )
    return RecordedSteps(stream, steps, starts, last, checkpoint, first)


@dataclass(slots=True)
class RecordedRun:
    """Answers a trainer from the stream, and compares its steps."""

    request: RerunRequest
    recorded: RecordedSteps
    config: Config
    store: BlobStore
    writer: MetricsWriter
    difference: str = ""  # the first one
    failure: str = ""  # of a rank
    equal: int = 0  # steps with the weights of the run
    largest: float = 0.0  # relative difference of a step's gradient norm
    rows: list[dict[str, float]] = field(default_factory=list)  # per step, `was/` and `now/`
    _hello: Hello | None = None
    _uris: set[str] = field(default_factory=set)  # of the step in training

    async def handle(self, message: Message) -> Message:
        """Answer one message of the trainer."""
        match message:
            case Hello():
                self._hello = message
                self._compare(self.recorded.first, message.weights)
                return Ok()
            case TakePlan():
                return await asyncio.to_thread(self._plan, message)
            case StepDone():
                self._step(message)
                return Ok()
            case Failed():
                self.failure = f"rank {message.rank}: {message.cause}"
                return Ok()
            case Notice() | BadStep():
                _say(message.text)
                return Ok()
            case _:
                raise ProtocolError(f"{type(message).__name__} is not a message of a rerun")

    def _plan(self, take: TakePlan) -> Message:
        if self.difference or take.step >= self.recorded.last:
            return Stop("the rerun is over")
        line = self.recorded.steps[take.step]
        start = self.recorded.starts[line.version.incarnation]
        if found := next(step_differences(self.recorded.stream, start, line), ""):
            self.difference = found
            return Stop("a difference was found")
        plan, blobs = whole_plan(StepFile(self.recorded.stream, line))
        groups = tuple(moved_to_node(group, self.store.node) for group in plan.groups)
        for uri, data in blobs.items():
            moved = moved_to_node(uri, self.store.node)
            self.store.put_back(moved, data)
            self._uris.add(moved)
        version = PolicyVersion(take.incarnation, take.step)
        teachers = self._teachers(plan)
        plan = replace(plan, groups=groups, version=version, teachers=teachers)
        return Plan(self._placed(plan, start))

    def _teachers(self, plan: BatchPlan) -> dict[str, PolicyVersion]:
        """As recorded with scores; a trainer that scores itself has versions of its own name."""
        assert self._hello is not None, "the trainer says hello first"
        if plan.ref_models:
            return plan.teachers
        return {n: version_at(self._hello.begins, v.step) for n, v in plan.teachers.items()}

    def _placed(self, plan: BatchPlan, start: StartLine) -> BatchPlan:
        """The recorded plan, or its rows placed for another layout."""
        hello, trainer = self._hello, self.config.trainer
        assert hello is not None, "the trainer says hello first"
        before = start.settings["trainer"]
        names = ("max_tokens_per_microbatch", "packing", "share_prompts")
        is_same = all(before[name] == getattr(trainer, name) for name in names)
        if is_same and hello.dp_size == start.dp_size:
            return plan
        scores = {score.rollout_id: score for score in plan.ref_models}
        placed = plan_batch(
            plan.step,
            plan.version,
            plan.groups,
            dp_size=hello.dp_size,
            max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
            packed=trainer.packing,
            share=trainer.share_prompts,
            pair=hello.pair_cost,
        )
        return replace(placed, ref_models=_in_rows(scores, placed), teachers=plan.teachers)

    def _step(self, done: StepDone) -> None:
        self.store.delete_all(self._uris)
        self._uris.clear()
        line = self.recorded.steps[done.step]
        self.writer.write(len(self.rows), done.version, done.metrics)
        was, now = line.metrics, done.metrics
        self.rows.append(
            {"step": float(done.step)}
            | {f"was/{name}": value for name, value in was.items()}
            | {f"now/{name}": value for name, value in now.items()}
        )
        norms = was.get("loss/grad_norm", math.nan), now.get("loss/grad_norm", math.nan)
        relative = abs(norms[1] - norms[0]) / max(abs(norms[0]), 1e-30)
        if math.isfinite(relative) and len(self.rows) <= LAYOUT_STEPS:
            self.largest = max(self.largest, relative)
        self._compare(done.step + 1, done.weights)
        state = "weights equal" if done.weights == line.weights else "other weights"
        _say(
            f"step {done.step + 1}/{self.recorded.last}  {state}  "
            f"grad norm {norms[1]:.4g} (was {norms[0]:.4g})"
        )

    def _compare(self, step: int, weights: str) -> None:
        """Compare the weights after `step` steps."""
        told = self.recorded.weights_before(step)
        self.equal += weights == told and step > self.recorded.first
        if weights != told and self.request.is_exact and not self.difference:
            trained = f"step {step - 1}: " if step else "first weights: "
            self.difference = (
                f"{trained}weights: digest {weights or 'missing'}, recorded {told}; plan, groups "
                "and records are as in the log, so the trainer's program, libraries, threads or "
                "machine differ"
            )
        if self.request.keeps_loss and self.largest > LAYOUT_BOUND and not self.difference:
            self.difference = (
                f"step {step - 1}: the gradient norm differs by {self.largest:.2g}, relative; "
                f"layouts agree to {LAYOUT_BOUND:g}"
            )


def _in_rows(scores: Mapping[str, RefScores], plan: BatchPlan) -> tuple[RefScores, ...]:
    return tuple(scores[rollout.rollout_id] for rollout in plan.rollouts()) if scores else ()


def rerun(request: RerunRequest) -> int:
    """Train the steps again; returns the exit status, 1 for a difference.  Raises MoerlError."""
    refuse_foreign(RunDir(request.source), "RUN")
    recorded = recorded_steps(request)
    config = _config(request)
    _check_teachers(request, recorded, config)
    run = RunDir(Path(config.run.root) / config.run.name)
    run.create()
    if recorded.first != request.first:
        _say(f"begins at step {recorded.first}, the newest checkpoint up to --from {request.first}")
    # Tokens of every trainer of the history are older than the weights of this trainer.
    newest = max(recorded.starts)
    context = replace(prepare(config, run, resume=False), incarnation=newest)
    context = replace(context, checkpoint=recorded.checkpoint)
    save_config(context.config, run.config)
    writer = MetricsWriter(run.metrics)
    played = RecordedRun(request, recorded, context.config, context.blobs(), writer)
    try:
        asyncio.run(_play(context, played))
    finally:
        writer.close()
    return _told(request, recorded, played, run)


def _config(request: RerunRequest) -> Config:
    """Settings of the source with the changes; nothing is published, evaluated or kept."""
    source = RunDir(request.source)
    config = load_saved(source.config, request.settings)
    refuse_used_up(config, load_saved(source.config))
    if config.cluster.launcher != "local":
        raise ConfigError(
            "cluster.launcher",
            config.cluster.launcher,
            "a rerun starts its trainer on this machine: --set cluster=laptop, with a trainer "
            "layout that fits it",
        )
    return replace(
        config,
        run=replace(config.run, root=str(request.source.resolve().parent), name=request.name),
        checkpoint=replace(config.checkpoint, every=0, start="", hf="end", keep_versions=False),
        evaluation=replace(config.evaluation, every=0),
    )


def _check_teachers(request: RerunRequest, recorded: RecordedSteps, config: Config) -> None:
    """A rerun makes the versions that its trainer scores with; from a checkpoint it lacks some."""
    own = config.ref_models.placement == "trainer"
    if recorded.first and own and (names := followers_of(config.algorithm)):
        raise ConfigError(
            "--from",
            request.first,
            f"teacher {next(iter(names))} follows the policy on the trainer's ranks, and its "
            f"versions before step {recorded.first} are not in the stream: rerun from step 0",
        )


async def _play(context: RunContext, played: RecordedRun) -> None:
    """Serve the trainer until it ends.  Raises TrainerError when it fails."""
    keys = Keys.read(context.run.endpoints.keys)
    server = RpcServer(f"tcp://{context.config.cluster.address}:*", keys, played.handle)
    serving = asyncio.create_task(server.serve())
    command = [*trainer_command(context, server.endpoint), "--rerun"]
    log = context.run.logs / "trainer.log"
    job = TorchrunJob(command, trainer_environment(context), log)
    try:
        while (code := job.poll()) is None:
            await asyncio.sleep(_POLL_S)
        if code and not played.difference:
            raise TrainerError(f"the trainer failed: {played.failure or job.ending(code)}")
    finally:
        job.end()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        server.close()


def _told(request: RerunRequest, recorded: RecordedSteps, played: RecordedRun, run: RunDir) -> int:
    steps = recorded.last - recorded.first
    page = write_rerun_page(run.root / "rerun.html", run.root.name, request.settings, played.rows)
    _say(f"{played.equal} of {steps} steps ended with the recorded weights")
    if request.settings:
        _say(
            f"largest relative difference of the gradient norm in {LAYOUT_STEPS} steps "
            f"{played.largest:.3g}" + (f" (bound {LAYOUT_BOUND:g})" if request.keeps_loss else "")
        )
        _say("rewards are those of the recorded rollouts: no policy was sampled")
    _say(f"curves beside each other  {page}")
    _say(f"trained model  {run.hf}")
    if played.difference:
        _say(f"first difference: {played.difference}")
    return int(bool(played.difference))


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    request: dict[str, Any] = json.loads(sys.argv[1])
    status: list[int] = []

    def work() -> None:
        settings: Sequence[str] = request["settings"]
        status.append(
            rerun(
                RerunRequest(
                    Path(request["source"]),
                    request["name"],
                    request["first"],
                    request["last"],
                    tuple(settings),
                )
            )
        )

    code = run_command(work)
    return code or status[0]


if __name__ == "__main__":
    sys.exit(main())


_CHARTS = (  # title, unit, metric
    ("Policy loss", "nats", "loss/pg"),
    ("Gradient norm", "norm", "loss/grad_norm"),
    ("Entropy", "nats", "loss/entropy"),
    ("k3 of trainer and engine", "nats", "mismatch/k3"),
    ("Mean ratio of trainer and engine", "ratio", "mismatch/ratio_mean"),
    ("Effective sample size", "share", "mismatch/ess_token_frac"),
)
_INTRO = (
    "Both curves were trained on the same recorded rollouts. Rewards do not change: no policy was "
    "sampled again."
)


def write_rerun_page(
    path: Path, name: str, settings: Sequence[str], rows: Sequence[Mapping[str, float]]
) -> Path:
    """Write the page and return its path.  rows: by step, metrics named `was/` and `now/`."""
    charts = [
        Chart(title, unit, {f"was/{metric}": "recorded", f"now/{metric}": "rerun"})
        for title, unit, metric in _CHARTS
        if any(f"was/{metric}" in row or f"now/{metric}" in row for row in rows)
    ]
    changed = f"Changed settings: {', '.join(settings)}." if settings else "No setting was changed."
    page = Page(
        kind="moerl rerun",
        name=name,
        paragraphs=[_INTRO, changed],
        sections=[PageSection("Curves", figures=[figure(chart, rows) for chart in charts])],
    )
    return write_html(path, page)
