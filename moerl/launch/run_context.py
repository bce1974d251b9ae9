"""`RunContext`: plain data that every process of a run gets; and the torchrun command lines.

Its methods build the concrete objects inside the actor or process that needs them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from moerl.config import Config
from moerl.config.clusters import (
    VISIBLE,
    TrainerSlot,
    bind_node_address,
    engine_of,
    is_local,
    mapped_gpus,
    own_address,
    placement,
    takes_turns,
    visible_devices,
)
from moerl.config.engine_context import longest_sequence
from moerl.config.schema import ParallelConfig
from moerl.config.secret_values import hide
from moerl.config.task_mixture import TaskEntry, entries_of
from moerl.config.transport_rules import ALLOCATOR, first_group, transport_environment
from moerl.core.types import ModelShape
from moerl.distributed.torchrun import TRAINER_JOB
from moerl.layout import ModelSpec, model_spec
from moerl.records import BlobStore
from moerl.records.range_server import RangeServer
from moerl.records.remote_blobs import ClusterBlobs, cluster_reader
from moerl.runtime.cuda_folder import compiler_environment
from moerl.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from moerl.controller.journal.journal import Journal
    from moerl.controller.journal.stream_writer import StreamWriter
    from moerl.data.tasks import PromptMixture
    from moerl.engine.host.host import EngineContext, EngineFollower, EngineHost
    from moerl.engine.node_span import Follower


# Variables that ranks inherit: names, and beginnings of names, ...
_NAMES = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV"}
_NAMES |= {"CC", "CXX", "CPATH", "LIBRARY_PATH", "CONDA_PREFIX", "XDG_CACHE_HOME", "HF_HOME"}
_BEGINNINGS: tuple[str, ...] = ("LC_", "LD_", "PYTHON", "MALLOC_", "OMP_", "MKL_", "KMP_", "MOERL_")
_BEGINNINGS += ("CUDA_", "NVIDIA_", "NVTE_", "TORCH", "PYTORCH_", "TRITON_", "SLURM_")
_BEGINNINGS += ("NCCL_", "NVSHMEM_", "GLOO_", "UCX_", "FI_", "MC_")
# ... but no variable that looks like a secret.
_SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|JWT")
_HELD_OUT_SEED = 1_000_003  # added to run.seed for evaluation prompts
REF_MODELS = "ref_models"


@dataclass(slots=True)
class RunContext:
    """One start of one run.  `token` is the run's random secret; it is never on a command line."""

    config: Config
    run: RunDir
    model_path: Path
    hf_config: dict[str, Any]
    token: str = field(repr=False)
    incarnation: int  # trainer incarnation
    node: str  # name of this node's blob store, the same at every start of the run
    blob_dir: Path
    checkpoint: Path | None = None  # to resume from
    journal_dir: Path | None = None  # None = in the run directory
    reset_optimizer: bool = False  # do not load the checkpoint's optimizer state
    scratch: Path | None = None  # folder of this start for sockets, on the root's node
    _tokenizer: Any = field(default=None, repr=False)

    def blobs(self) -> BlobStore:
        """The controller's blob store; on several nodes it reads from the engine nodes."""
        if is_local(self.config.cluster):
            return BlobStore(self.blob_dir, self.node)
        return cluster_reader(self.config, self.run, self.token)

    def serve_blobs(self, index: int) -> BlobStore:
        """The store in which an engine seals its records; on several nodes with a range server."""
        if is_local(self.config.cluster):
            return self.blobs()
        folder = self.blob_dir / f"engine-{index}"
        port = self.config.cluster.ports.blobs + index
        server = RangeServer(folder, own_address(self.config.cluster), port, self.token)
        return ClusterBlobs(folder, server.node, self.token)

    def controller_endpoint(self) -> str:
        """The controller's address for the trainer; "" = any port of cluster.address."""
        cluster = self.config.cluster
        if is_local(cluster):
            return ""
        return f"tcp://{own_address(cluster)}:{cluster.ports.controller}"

    @property
    def journal_folder(self) -> Path:
        return self.journal_dir or self.run.journal

    def journal(self) -> Journal:
        from moerl.controller.journal.journal import Journal
        from moerl.controller.journal.shared_groups import SharedGroups

        config, rollout = self.config, self.config.rollout
        is_shared = rollout.durability == "shared"
        segments = SharedGroups(self.run.segments) if is_shared else None
        made_with = (config.model, config.task, config.sampling, config.replay, config.run.seed)
        settings = repr((made_with, rollout.group_size, rollout.oversample))
        settings += repr(config.tasks) if config.tasks else ""
        settings = settings.replace(f"{self.run.root}/", "(run)/")  # a run may be moved
        folder = self.journal_folder
        fingerprint = xxhash.xxh3_64_hexdigest(settings.encode())
        return Journal(folder, self.blobs(), segments, fingerprint)

    def stream(self) -> StreamWriter | None:
        """The writer of the run's stream; None without one.  Raises OSError, StreamError."""
        from moerl.controller.journal.stream_writer import StreamWriter
        from moerl.records.stream_files import StreamDir

        if not (keep_steps := self.config.stream.keep_steps):
            return None
        return StreamWriter(
            StreamDir(self.run.stream),
            self.blobs(),
            self.model_shape(),
            hide(asdict(self.config)),
            keep_steps=keep_steps,
            sync=self.config.rollout.durability == "shared",
        )

    def spec(self) -> ModelSpec:
        return model_spec(self.hf_config)

    def model_shape(self) -> ModelShape:
        spec = self.spec()
        return ModelShape(
            vocab_size=spec.vocab_size,
            num_layers=spec.layers,
            moe_layers=spec.moe_layers,
            num_experts=spec.experts,
            top_k=spec.experts_per_token,
            eos_token_ids=self.eos_token_ids(),
            index_layers=spec.index_layers,
            index_topk=spec.index_topk,
            context_tokens=longest_sequence(self.config.engine, spec.max_positions),
        )

    def engine_host(
        self,
        index: int,
        tp: int,
        followers: Sequence[Follower] = (),
        devices: Mapping[str, str] | None = None,
    ) -> EngineHost:
        """The host of an engine.  followers: on its other nodes.  devices: see `EngineContext`."""
        from moerl.engine.host.host import EngineHost

        engine, blobs = engine_of(bind_node_address(self.config), tp), self.serve_blobs(index)
        return EngineHost(index, engine, self._engine_context(devices), blobs, followers)

    def engine_follower(self, index: int, tp: int) -> EngineFollower:
        from moerl.engine.host.host import EngineFollower

        engine = engine_of(bind_node_address(self.config), tp)
        return EngineFollower(index, engine, self._engine_context())

    def _engine_context(self, devices: Mapping[str, str] | None = None) -> EngineContext:
        from moerl.engine.host.host import EngineContext

        algorithm = self.config.algorithm
        return EngineContext(
            model_path=self.model_path,
            shape=self.model_shape(),
            replay=self.config.replay,
            run=self.run,
            token=self.token,
            in_flight_mode=self.config.rollout.in_flight_mode,
            lora=self.config.lora,
            support=algorithm.centering_top_k if algorithm.centering else 0,
            entropies=any(
                term.unit == "step" and term.steps_by == "entropy"
                for entry in entries_of(self.config)
                for term in entry.terms
            ),
            fp32_head=self.config.model.fp32_lm_head,
            devices=dict(devices or {}),
            sleeps=takes_turns(self.config.cluster),
        )

    def prompts(self) -> PromptMixture:
        from moerl.data.tasks import PromptMixture

        entries, longest = entries_of(self.config), self.model_shape().context_tokens
        return PromptMixture(entries, self.tokenizer(), self.config.run.seed, longest)

    def held_out(self) -> PromptMixture:
        """Evaluation prompts, as many of each task: from its file, or drawn with another seed."""
        from moerl.data.tasks import PromptMixture

        seed, longest = self.config.run.seed + _HELD_OUT_SEED, self.model_shape().context_tokens
        return PromptMixture(held_out_entries(self.config), self.tokenizer(), seed, longest)

    def tokenizer(self) -> Any:
        """The model folder's tokenizer (transformers), loaded once per process."""
        if self._tokenizer is None:
            from moerl.data.tasks import load_tokenizer

            self._tokenizer = load_tokenizer(self.model_path)
        return self._tokenizer

    def without_tokenizer(self) -> RunContext:
        """For processes that need none: a copy of it imports torch and transformers, seconds."""
        return replace(self, _tokenizer=None)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer().decode(token_ids, skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Tokens of text between turns; special tokens are parsed, none is added."""
        return list(self.tokenizer().encode(text, add_special_tokens=False))

    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence; every request carries them."""
        for source in (self.model_path / "generation_config.json", None):
            data = (
                json.loads(source.read_text(encoding="utf-8"))
                if source and source.exists()
                else self.hf_config
            )
            eos = data.get("eos_token_id")
            if eos is not None:
                return tuple(eos) if isinstance(eos, list) else (int(eos),)
        return ()


def held_out_entries(config: Config) -> list[TaskEntry]:
    """The tasks with their held-out prompts."""
    return list(map(_held_out, entries_of(config)))


def _held_out(task: TaskEntry) -> TaskEntry:
    args = dict(task.dataset_args)
    if "seed" in args:  # it replaces run.seed
        args["seed"] += _HELD_OUT_SEED
    path = task.evaluation_path or task.path
    made = replace(task, weight=1.0, path=path, dataset_args=args, shuffle=False)
    return replace(made, split=task.evaluation_split)


def trainer_command(context: RunContext, endpoint: str) -> list[str]:
    """The torchrun command of the trainer; the token is passed in the environment.

    On a cluster the trainer nodes run torchrun (`moerl.launch.cluster.node_commands`), and the
    command returned here watches them.
    """
    if not is_local(context.config.cluster):
        watch = [sys.executable, "-m", "moerl.launch.nodes.trainer_watch"]
        return [*watch, "--run-dir", str(context.run.root), "--controller", endpoint]
    command = _rank(context, context.config.trainer.parallel, endpoint, context.incarnation)
    if context.checkpoint is not None:
        command += ["--checkpoint", str(context.checkpoint)]
    if context.reset_optimizer:
        command += ["--reset-optimizer"]
    return command


def ref_model_command(context: RunContext, endpoint: str, start: int) -> list[str]:
    """The torchrun command of the reference ranks.  start: number of earlier starts."""
    return [*_rank(context, context.config.ref_models.parallel, endpoint, start), "--ref-models"]


def _rank(context: RunContext, sizes: ParallelConfig, endpoint: str, incarnation: int) -> list[str]:
    command = _torchrun(context, sizes.world_size)
    command += ["-m", "moerl.trainer.main", "--run-dir", str(context.run.root)]
    command += ["--controller", endpoint, "--incarnation", str(incarnation)]
    return [*command, "--blob-dir", str(context.blob_dir), "--blob-node", context.node]


def scoring_command(context: RunContext, job: Path) -> list[str]:
    """The torchrun command of `moerl mismatch`: data and expert parallel as in training."""
    command = _torchrun(context, context.config.trainer.parallel.dp)
    return [*command, "-m", "moerl.audit.score_ranks", "--job", str(job)]


def supervised_command(context: RunContext) -> list[str]:
    """The torchrun command of supervised training (`moerl.trainer.sft`)."""
    command = _torchrun(context, context.config.trainer.parallel.world_size)
    return [*command, "-m", "moerl.trainer.sft", "--run-dir", str(context.run.root)]


def _torchrun(context: RunContext, ranks: int) -> list[str]:
    command = [sys.executable, "-m", "moerl.distributed.torchrun", "--nproc-per-node", str(ranks)]
    return [*command, "--local-addr", context.config.cluster.address]


def _allowed(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if (name in _NAMES or name.startswith(_BEGINNINGS)) and not _SECRET.search(name)
    }


def trainer_environment(context: RunContext) -> dict[str, str]:
    """Environment of a trainer rank."""
    return _environment(context, placement(context.config).trainers[0], str(context.incarnation))


def ref_model_environment(context: RunContext) -> dict[str, str]:
    """Environment of a reference rank."""
    return _environment(context, placement(context.config).ref_models[0], REF_MODELS)


def _environment(context: RunContext, slot: TrainerSlot, mark: str) -> dict[str, str]:
    return rank_environment(context.config, slot) | {
        "MOERL_TOKEN": context.token,
        TRAINER_JOB: mark,
    }


def engine_environment(config: Config) -> dict[str, str]:
    """Variables that an engine's host sets for itself and its server; it inherits others."""
    return transport_environment(config, first_group(config, "engine"))


def rank_environment(config: Config, slot: TrainerSlot) -> dict[str, str]:
    """Environment of a rank on any node; nothing here changes results.

    Ranks inherit only variables that they read: no token of Ray, W&B, Hugging Face or a cloud.
    """
    env = _allowed(os.environ) | transport_environment(config, slot.node.group)
    if takes_turns(config.cluster) and slot.devices and not env.keys() & set(ALLOCATOR):
        env[ALLOCATOR[0]] = "expandable_segments:True"  # a parked rank gives back all free pages
    mapped = mapped_gpus(config, placement(config), slot)  # behind its own: local rank 0 has GPU 0
    gpus = visible_devices((*slot.devices, *mapped))
    if config.trainer.platform == "cpu":
        gpus = {VISIBLE: ""}
    return (
        env
        | compiler_environment(env)
        | gpus
        | {
            "OMP_NUM_THREADS": str(config.trainer.cpu_threads),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
    )
