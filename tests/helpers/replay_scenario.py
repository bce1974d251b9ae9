"""One scenario on a real SGLang server, and the trainer's verdict on everything it recorded.

Three weight versions, one server: complete rollouts under A, prefix-cache hits, second turns under
the weights of the first and under others, siblings of one prompt, long prompts in chunks; long
requests that are aborted under A, resumed under B, aborted again and resumed under C.  B and C are
A with a little noise, as after an optimizer step: enough to move some routes, so that rows of a
wrong version can be told from the right ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from moerl.audit.score_job import ScoreJob
from moerl.config.schema import EngineConfig, ReplayConfig
from moerl.core.errors import RecordError
from moerl.core.serialization import encode_value
from moerl.core.types import ModelShape, PolicyVersion, Rollout, SamplingParams, Segment
from moerl.engine.host.host import EngineContext, EngineHost
from moerl.episodes.finished_episode import join
from moerl.episodes.turn import SampledTurn, TurnInFlight
from moerl.records.blob_store import BlobStore
from moerl.records.header_check import check
from moerl.runtime.run_dir import RunDir
from tests.helpers import engine_tiny_model as tiny
from tests.helpers.fp8_folder import quantise
from tests.helpers.patience import patience
from tests.helpers.rank_server import run_ranks

TOKEN = "replay-run-token"
A, B, C = (PolicyVersion(0, step) for step in range(3))
UNROUNDED = PolicyVersion(1, 0)  # A as it was before its projections became fp8 blocks
TRUNCATED = SamplingParams(24, temperature=0.8, top_p=0.9, top_k=40, ignore_eos=True)
FULL = SamplingParams(24, temperature=1.3, ignore_eos=True)
LONG = replace(TRUNCATED, max_new_tokens=900)
LATE = "late"  # file that holds the scheduler up, in the root of a world (late_scheduler)
CHUNK = 64  # tokens of one prefill chunk
STEPS = 8  # decode steps between two reports of the scheduler
NOISE = 0.01  # of a tensor's standard deviation, per version
T = TypeVar("T")


@dataclass
class World:
    """A host with its event loop, three versions of a model, and what was recorded."""

    root: Path
    config: EngineConfig
    sleeps: bool = False  # the engine gives its memory back on request
    fp8: bool = False  # the one version is a checkpoint of fp8 blocks
    shape: ModelShape = tiny.SHAPE
    model: Path | None = None  # the one version: another model than Qwen3-MoE, of this shape
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    before: dict[str, SampledTurn] = field(default_factory=dict)  # the turn that a turn continues
    cached: dict[str, int] = field(default_factory=dict)  # prompt tokens from the prefix cache
    paused: dict[str, list[object]] = field(default_factory=dict)  # replies, by mode of the pause
    settings: dict[str, Any] = field(default_factory=dict)  # of the server, as it reports them
    turns: dict[str, SampledTurn] = field(default_factory=dict)  # of complete rollouts
    folders: dict[PolicyVersion, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        if self.model is not None:
            self.folders = {A: self.model}
        elif self.fp8:
            self.folders = save_blocks(self.root)
        else:
            shape = {"head_dim": 64} if self.config.platform == "cuda" else {}  # least in bf16
            self.folders = save_versions(
                self.root, rounded=self.config.dtype == "bfloat16", **shape
            )
        self.store = BlobStore(self.root / "blobs", "node0")
        run = RunDir(self.root / "run")
        run.create()
        self.log = run.logs / "engine0.log"
        context = EngineContext(
            self.folders[A], self.shape, ReplayConfig(), run, TOKEN, sleeps=self.sleeps
        )
        config = replace(self.config, args={**self.config.args, "decode_log_interval": STEPS})
        self.host = EngineHost(0, config, context, self.store)

    def fresh(self) -> World:
        """The same server for another scenario: its first weights again, and no records."""
        self.host._updates.mode = ""
        self.run(self.load(A))
        for blob in self.store.root.iterdir():
            blob.unlink()
        other = copy(self)
        for name in ("rollouts", "before", "cached", "paused", "settings", "turns"):
            setattr(other, name, {})
        other.folders = dict(self.folders)
        return other

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, patience(timeout_s)))

    async def ask(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        server = self.host._server
        assert server is not None
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            aiohttp.ClientSession(server.url, headers=headers) as session,
            session.request(method, path, json=body if method == "POST" else None) as reply,
        ):
            text = await reply.text()
            assert reply.status == 200, text
            return json.loads(text) if text.startswith("{") else {}

    async def load(self, version: PolicyVersion) -> None:
        """Serve another version.  The update session has tests of its own: this goes by disk.

        A request whose reply has come may stay in the scheduler's batch for one more turn of its
        loop, and SGLang refuses new weights until then: wait for an idle scheduler first.
        """
        await self.ask("POST", f"/flush_cache?timeout={patience(60.0)}")
        await self.ask(
            "POST",
            "/update_weights_from_disk",
            model_path=str(self.folders[version]),
            weight_version=str(version),
            flush_cache=True,
        )
        self.host._updates.version = version
        self.host._updates.served.append(version)

    # --- scenario --------------------------------------------------------------------------------
    async def play(self) -> None:
        self.settings = await self.ask("GET", "/server_info")
        await self.complete([start("warm", tokens(40, seed=40), TRUNCATED)])
        prompts = {n: tokens(n, seed=n) for n in (1, 5, 33, 200)}
        for tag, sampling in (("trunc", TRUNCATED), ("full", FULL)):
            for attempt in ("plain", "hit"):
                await self.complete(
                    [start(f"{attempt}.{tag}.{n}", p, sampling) for n, p in prompts.items()]
                )
        group = tokens(90, seed=90)
        await self.complete([start(f"group.{i}", group, TRUNCATED) for i in range(4)])
        await self.complete([self.turn("turn", f"plain.trunc.{n}") for n in (5, 200)])
        seams = [start(f"seam.{i}", tokens(20 + 30 * i, seed=i), LONG) for i in range(4)]
        await self.interrupt(seams)
        await self.load(B)
        await self.interrupt(seams)
        await self.load(C)
        for seam in seams:  # a little more, then the natural end
            seam.sampling = replace(seam.sampling, max_new_tokens=seam.num_sampled + 24)
        await self.complete(seams)
        await self.complete([self.turn("late", f"plain.trunc.{n}") for n in (5, 200)])
        for mode in ("retract", "in_place"):
            await self.load(A)
            self.paused[mode] = await self.swap_weights(mode)

    async def crowd(self) -> None:
        """Prompts of many lengths at once, twice, with answers that fill a small cache.

        SGLang admits too many only where answers may end early: it then reserves for a share.
        """
        sampling = replace(TRUNCATED, max_new_tokens=120, ignore_eos=False)
        for attempt in ("first", "again"):
            await self.complete(
                [start(f"{attempt}.{n}", tokens(n, seed=n), sampling) for n in range(5, 125, 10)]
            )

    async def long_prompts(self) -> None:
        await self.complete([start(f"long.{n}", tokens(150, seed=n), TRUNCATED) for n in range(24)])

    def turn(self, kind: str, first: str) -> TurnInFlight:
        """The next turn after rollout `first`: its tokens and twelve new ones."""
        before = self.rollouts[first]
        prompt = (*before.token_ids.tolist(), *tokens(12, seed=before.num_tokens))
        name = f"{kind}.{before.prompt_len}"
        self.before[name] = self.turns[first]
        return start(name, prompt, before.sampling, before.num_tokens - 1)

    async def swap_weights(self, mode: str) -> list[object]:
        """What the host makes of requests whose weights are exchanged under them."""
        asks = [start(f"{mode}.{i}", tokens(30, seed=i), LONG).request() for i in range(2)]
        seen = self.prefills()
        running = asyncio.create_task(self.host.generate(asks))
        await self.decode_a_while(running, seen)
        await self.ask("POST", "/pause_generation", mode=mode)
        await self.ask(
            "POST",
            "/update_weights_from_disk",
            model_path=str(self.folders[B]),
            weight_version=str(B),
            flush_cache=mode == "retract",
        )
        await self.ask("POST", "/continue_generation")
        return list(await running)

    async def complete(self, turns: Sequence[TurnInFlight]) -> None:
        await self.call(turns)
        for turn in turns:
            assert turn.finished
            name, sampled = turn.name, turn.sampled(turn.sampling)
            chain = [self.before[name], sampled] if name in self.before else [sampled]
            rollout = join(name, chain)
            check(rollout, self.shape)
            self.rollouts[name], self.turns[name] = rollout, sampled

    async def call(self, turns: Sequence[TurnInFlight]) -> None:
        replies = await self.host.generate([turn.request() for turn in turns])
        for turn, reply in zip(turns, replies, strict=True):
            assert isinstance(reply, Segment), reply
            self.cached[f"{turn.name}@{reply.version}"] = reply.cached_tokens
            turn.add(reply)

    async def interrupt(self, turns: Sequence[TurnInFlight]) -> None:
        """Abort all of them in mid-generation, after some forty tokens of each."""
        seen = self.prefills()
        running = asyncio.create_task(self.call(turns))
        await self.decode_a_while(running, seen, steps=40)
        client = self.host._client
        assert client is not None
        while not running.done():
            await client.abort_all()
            await asyncio.wait([running], timeout=0.05)
        await running
        for turn in turns:
            assert turn.segments[-1].finish == "abort"
            assert len(turn.segments[-1].output_ids) > 1

    async def decode_a_while(
        self, running: asyncio.Future[Any], seen: int, *, steps: int = 24
    ) -> None:
        """After the prefill that follows `seen` prefills, wait for some `steps` decode steps.

        Steps are counted by reports of the scheduler: the seconds that they take differ by a factor
        of ten on a busy machine.
        """
        while self.prefills() <= seen and not running.done():
            await asyncio.sleep(0.02)
        goal = self.decodes() + steps // STEPS
        while self.decodes() < goal and not running.done():
            await asyncio.sleep(0.02)

    def decodes(self) -> int:
        """Reports of the scheduler, one every `STEPS` decode steps."""
        return self.log.read_text().count("Decode batch")

    def prefills(self) -> int:
        return self.log.read_text().count("Prefill batch")


def save_versions(root: Path, *, rounded: bool = False, **shape: int) -> dict[PolicyVersion, Path]:
    """A random model, and two that differ from it by a little noise.

    rounded: weights that bf16 holds exactly, so that an engine in bf16 serves these very numbers.
    shape: changed fields of config.json.
    """
    folders = {A: tiny.save(root / "A", 0, **shape)}
    weights = load_file(folders[A] / "model.safetensors")
    if rounded:
        weights = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
        save_file(weights, folders[A] / "model.safetensors", metadata={"format": "pt"})
    generator = torch.Generator().manual_seed(1)
    for version in (B, C):
        folder = root / f"V{version.step}"
        folder.mkdir()
        for path in folders[A].iterdir():
            if path.suffix != ".safetensors":
                (folder / path.name).write_bytes(path.read_bytes())
        for name, tensor in weights.items():
            if tensor.dim() == 2:
                noise = torch.randn(tensor.shape, generator=generator)
                weights[name] = tensor + noise * tensor.std() * NOISE
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        folders[version] = folder
    return folders


def save_blocks(root: Path) -> dict[PolicyVersion, Path]:
    """A random model in fp8 blocks; the trainer multiplies them out when it reads the folder.

    Twice as wide as the others, with weights as much smaller: the size of logits, on which the
    rounding of log-probabilities depends, stays.
    """
    plain = tiny.save(root / "unrounded", 0, 256, initializer_range=0.106, **tiny.BLOCKS)
    return {A: quantise(plain, root / "A"), UNROUNDED: plain}


def tokens(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.RandomState(seed).randint(4, tiny.VOCAB, size=length).tolist())


def start(
    name: str,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    rows_known: int = 0,
) -> TurnInFlight:
    ids = np.asarray(prompt, np.int32)
    return TurnInFlight(name, ids, sampling, audit=True, rows_known=rows_known)


def row_of(turn: TurnInFlight) -> Rollout:
    return join(turn.name, [turn.sampled(turn.sampling)])


@dataclass
class Scoring:
    """Jobs for one scoring process: everything is scored with one start of the trainer."""

    world: World
    folder: Path
    jobs: dict[str, ScoreJob] = field(default_factory=dict)

    def add(
        self,
        name: str,
        rollouts: Sequence[Rollout],
        weights: PolicyVersion,
        variants: Sequence[str] = ("both",),
    ) -> None:
        path = self.folder / f"{name}.msgpack"
        path.write_bytes(encode_value(list(rollouts)))
        job = ScoreJob(
            model=str(self.world.folders[weights]),
            rollouts=str(path),
            blob_dir=str(self.world.store.root),
            blob_node="node0",
            out=str(self.folder / f"{name}.npz"),
            variants=list(variants),
            dtypes=["fp32"],
            platform="cpu",
        )
        job.save(self.folder / f"{name}.json")
        self.jobs[name] = job

    def run(self) -> None:
        paths = [str(self.folder / f"{name}.json") for name in self.jobs]
        run_ranks(1, ["-m", "moerl.audit.score_ranks", "--job", *paths], timeout_s=240.0)

    def gaps(self, name: str, variant: str = "both") -> dict[str, np.ndarray]:
        """Trainer minus engine log-probability of each sampled token, by rollout id."""
        found = np.load(self.jobs[name].out)
        ends = np.cumsum(found["num_sampled"])[:-1]
        parts = np.split(found[f"fp32/{variant}"] - found["engine"], ends)
        return dict(zip(found["rollout_ids"].tolist(), parts, strict=True))


def refused(reply: object) -> str:
    """The reason of a refused record."""
    assert isinstance(reply, RecordError), reply
    return reply.reason
