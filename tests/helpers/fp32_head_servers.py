"""Records of bf16 engines with and without an fp32 head, from forks of one process with SGLang.

    python -m tests.helpers.fp32_head_servers FOLDER CASE...

Written per case:

    FOLDER/CASE/model/                   the model
    FOLDER/CASE/head.npz                 what the engine's head read and said: hidden [N, H], token
                                         [N], logprob [N] at temperature 1 over the vocabulary
    FOLDER/CASE/job-fp32.json, job-bf16.json   for moerl.audit.score_ranks: a bf16 trainer with and
                                         without the fp32 head scores the records
    FOLDER/CASE/failed.txt               why a case was not served
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from safetensors.torch import load_file, save_file

from moerl.audit import mismatch_command
from moerl.config import load_config, resolve
from moerl.core.serialization import encode_value
from moerl.core.types import PolicyVersion
from moerl.engine.host.host import EngineHost
from moerl.launch.run_context import RunContext
from tests.helpers.family_servers import SETTINGS, forked, import_sglang, wait
from tests.helpers.tiny_families import RECIPE, make_family_model

# fp32 head of the engine, its tensor-parallel ranks, family, tied embeddings
CASES: dict[str, tuple[bool, int, str, bool]] = {
    "fp32": (True, 1, "qwen3_moe", False),
    "bf16": (False, 1, "qwen3_moe", False),
    "fp32-tp2": (True, 2, "qwen3_moe", False),
    "fp32-tied": (True, 1, "ernie4_5_moe", True),
}
HEADS = {"fp32": True, "bf16": False}  # of the trainer
TOKENS = 200


def main() -> int:
    folder, *cases = sys.argv[1:]
    import_sglang()
    for case in cases:
        wait(forked(Path(folder) / case, partial(_run, case)), 400.0)
    return 0


def _run(case: str, folder: Path) -> None:
    fp32, tp, family, tied = CASES[case]
    settings = [
        *SETTINGS,
        f"model.fp32_lm_head={str(fp32).lower()}",
        f"model.path={folder / 'model'}",
        f"engine.tp={tp}",
        "engine.dtype=bfloat16",
        "engine.args.enable_return_hidden_states=true",
        "trainer.dtype=bf16",
    ]
    config = resolve(load_config(RECIPE, settings))
    make_family_model(folder / "model", family, seed=config.run.seed)
    if tied:
        _tie(folder / "model")
    context = mismatch_command._context(config, folder)
    asyncio.run(_play(context, folder))


def _tie(model: Path) -> None:
    """The head becomes the embedding."""
    config, weights = model / "config.json", model / "model.safetensors"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"tie_word_embeddings": True}))
    named = load_file(weights)
    del named["lm_head.weight"]
    save_file(named, weights, metadata={"format": "pt"})


async def _play(context: RunContext, folder: Path) -> None:
    host = context.engine_host(0, context.config.engine.tp)
    await host.start(PolicyVersion(0, 0))
    try:
        rollouts = await mismatch_command._sample(context, host, TOKENS)
        np.savez(folder / "head.npz", **await _head(host, context.token))
    finally:
        await host.stop()
    (folder / "rollouts.msgpack").write_bytes(encode_value(rollouts))
    for name, fp32 in HEADS.items():
        job = mismatch_command.make_job(
            context,
            folder / "rollouts.msgpack",
            folder / f"scores-{name}.npz",
            variants=["both"],
            dtypes=["bf16"],
            model=context.model_path,
            version="",
        )
        replace(job, ep=1, fp32_head=fp32).save(folder / f"job-{name}.json")


async def _head(host: EngineHost, token: str) -> dict[str, np.ndarray]:
    """What head.npz holds."""
    assert host._server is not None
    asked = {
        "input_ids": [[4, 5, 6, 7 + row] for row in range(8)],
        "sampling_params": {"max_new_tokens": 40, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "return_hidden_states": True,
    }
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(host._server.url, headers=headers) as session,
        session.post("/generate", json=asked) as reply,
    ):
        assert reply.status == 200, await reply.text()
        return _tokens([one["meta_info"] for one in await reply.json()])


def _tokens(answers: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The first state of an answer is [prompt tokens, H], the others are [H] each."""
    found: dict[str, list[Any]] = {"hidden": [], "token": [], "logprob": []}
    for answer in answers:
        prompt, *others = answer["hidden_states"]
        states = [prompt[-1], *others]
        for state, (logprob, token, _) in zip(states, answer["output_token_logprobs"], strict=True):
            found["hidden"].append(state)
            found["token"].append(token)
            found["logprob"].append(logprob)
    return {name: np.asarray(values) for name, values in found.items()}


if __name__ == "__main__":
    sys.exit(main())
