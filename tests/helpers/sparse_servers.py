"""Records of a tiny DeepSeek-V3.2: over an abort and an update, and of a prefix computed twice.

    python -m tests.helpers.sparse_servers FOLDER

Two servers, forks of one process that has SGLang loaded.  FOLDER/own serves as in a run; the server
of FOLDER/shared lacks the hook by which a request keeps its own cache slots.  Each folder has the
models A and B, blobs, and what `Records` reads; failed.txt says why a server did not end well.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from moerl.config.schema import EngineConfig, ReplayConfig, TinyModel
from moerl.core.serialization import encode_value
from moerl.core.types import ModelShape, PolicyVersion, SamplingParams
from moerl.engine.host.host import EngineContext, EngineHost
from moerl.engine.plugin import hooks, kv_slots_per_request
from moerl.layout import hf_shapes, model_spec
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from tests.helpers import engine_tiny_model, family_servers, replay_scenario
from tests.helpers.replay_scenario import LONG, STEPS, TOKEN, A, B, World, start, tokens
from tests.helpers.tiny_families import family_config

SAMPLING = SamplingParams(8, top_p=0.9, top_k=60, ignore_eos=True)
WAVES = 4  # groups of requests that compute one prefix at the same time
TINY = TinyModel(
    hidden_size=64,
    num_experts=16,
    experts_per_token=4,
    num_layers=4,
    initializer_range=0.1,
)
CONFIG = family_config("deepseek_v32", TINY, engine_tiny_model.VOCAB)
ENGINE = EngineConfig(
    count=1,
    max_running_requests=8,
    max_total_tokens=8192,
    args={
        "chunked_prefill_size": 256,
        "disable_radix_cache": False,
        "decode_log_interval": STEPS,
    },
)
_SERVER_S = 200.0


def main() -> int:
    family_servers.import_sglang()
    for name in ("own", "shared"):
        work = partial(_serve, name == "own")
        family_servers.wait(family_servers.forked(Path(sys.argv[1]) / name, work), _SERVER_S)
    return 0


def _serve(own: bool, folder: Path) -> None:
    if not own:
        hooks.HOOKS = tuple(
            hook for hook in hooks.HOOKS if hook.ours is not kv_slots_per_request.publish
        )
    world = SparseWorld(folder, ENGINE)
    try:
        world.run(world.host.start(A), _SERVER_S)
        if own:
            world.run(world.play(), _SERVER_S)
        world.run(world.prefixes(), _SERVER_S)
    finally:
        world.run(world.host.stop(), _SERVER_S)
    (folder / "cached.json").write_text(json.dumps(world.cached))
    records = encode_value(list(world.rollouts.values()))
    (folder / "rollouts.msgpack").write_bytes(records)  # last: it says that all went well


class SparseWorld(World):
    """A host that serves DeepSeek-V3.2."""

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.folders = _save_models(self.root)
        self.store = BlobStore(self.root / "blobs", "node0")
        run = RunDir(self.root / "run")
        run.create()
        self.log = run.logs / "engine0.log"
        self.shape = _shape()
        context = EngineContext(self.folders[A], self.shape, ReplayConfig(), run, TOKEN)
        self.host = EngineHost(0, self.config, context, self.store)

    async def play(self) -> None:
        await self.complete(
            [start(f"plain.{n}", tokens(n, seed=n), SAMPLING) for n in (3, 30, 300)]
        )
        await self.complete([self.turn("turn", "plain.30")])
        seams = [start(f"seam.{i}", tokens(20 + 30 * i, seed=i), LONG) for i in range(2)]
        await self.interrupt(seams)
        await self.load(B)
        for seam in seams:
            seam.sampling = replace(seam.sampling, max_new_tokens=seam.num_sampled + 16)
        await self.complete(seams)
        await self.load(A)

    async def prefixes(self) -> None:
        """Requests that meet in one prefill with one prefix, and part after it or are equal."""
        for wave in range(WAVES):
            prefix = tokens(30 + 5 * wave, seed=70 + wave)
            endings = [tokens(3 + 2 * i, seed=i) for i in range(4)] + [tokens(9, seed=9)] * 2
            await self.complete(
                [
                    start(f"wave.{wave}.{i}", prefix + ending, SAMPLING)
                    for i, ending in enumerate(endings)
                ]
            )


def _shape() -> ModelShape:
    spec = model_spec(CONFIG)
    return ModelShape(
        vocab_size=spec.vocab_size,
        num_layers=spec.layers,
        moe_layers=spec.moe_layers,
        num_experts=spec.experts,
        top_k=spec.experts_per_token,
        index_layers=spec.index_layers,
        index_topk=spec.index_topk,
    )


def _save_models(root: Path) -> dict[PolicyVersion, Path]:
    """A random model, and one that differs from it by a little noise."""
    generator, folders = torch.Generator().manual_seed(0), {}
    scale = TINY.initializer_range
    weights = {
        name: scale * torch.randn(shape, generator=generator) + name.endswith("norm.weight")
        for name, shape in hf_shapes(model_spec(CONFIG)).items()
    }
    for version in (A, B):
        folders[version] = root / str(version)
        folders[version].mkdir(parents=True)
        (folders[version] / "config.json").write_text(json.dumps(CONFIG))
        for name, tensor in weights.items():
            if version == B and tensor.dim() == 2:
                noise = torch.randn(tensor.shape, generator=generator)
                weights[name] = tensor + replay_scenario.NOISE * scale * noise
        save_file(weights, folders[version] / "model.safetensors", metadata={"format": "pt"})
    return folders


if __name__ == "__main__":
    sys.exit(main())
