"""Records of tiny models of several families, from forks of one process that has SGLang loaded.

The process is that of tests/helpers/warm_engines.py.  Each family is a fork of this process: the
host, the server and its check of weights are those of `moerl mismatch`, but the server is a fork,
too, in place of a new Python.  transformers then scores the records.  Written per family:

    FOLDER/FAMILY/model/              the model
    FOLDER/FAMILY/job.json            for moerl.audit.score_ranks, which scores into scores.npz
    FOLDER/FAMILY/scores-hf.npz       of transformers: VARIANT [S] (constants below); agree [R, L],
                                      share of rows in which its own routers choose the record;
                                      masks [S], whether it keeps the same tokens
    FOLDER/FAMILY/failed.txt          why a family was not served
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moerl.audit import mismatch_command
from moerl.audit.mismatch_command import make_job
from moerl.audit.score_job import ScoreJob
from moerl.config import load_config, resolve
from moerl.core.serialization import encode_value
from moerl.core.types import ModelShape, Rollout
from moerl.engine import torchvision_fix
from moerl.engine.host import sglang_server
from moerl.engine.host.sglang_server import EngineServer
from moerl.engine.plugin import server_process
from moerl.launch.run_context import RunContext
from moerl.records.blob_store import BlobStore
from moerl.records.indexer import decode
from tests.helpers import late_scheduler
from tests.helpers.patience import Patience
from tests.helpers.tiny_families import RECIPE, make_family_model

SETTINGS = (
    "rollout.group_size=2",
    "task.digits=10",
    "engine.max_total_tokens=2048",
    "engine.max_running_requests=8",
)
TIE = 1e-5  # nats between two tokens that rounding may swap; 7e-7 has been seen
ROUTER_TIE = 1e-6  # of the scores of two experts, likewise
EDGE = 1e-5  # of a sum of probabilities in float32: ten times what two implementations differ by
TOKENS = 80
TRAINER_VARIANTS = ("none", "routing", "both", "both_rotated")
HF_VARIANTS = ("both", "routing", "both_rotated")  # routes of the record, and its masks
SPARSE_VARIANTS = ("both_indexer_live", "both_indexer_moved")  # of both, where attention is sparse
_FAMILY_S = 120.0


def import_sglang() -> None:
    """What a server and transformers import; nothing here starts a thread."""
    torchvision_fix.arm()
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401

    torch.set_num_threads(1)


def forked(folder: Path, work: Callable[[Path], None]) -> int:
    """A process whose servers are forks, too.  An error is written to FOLDER/failed.txt."""
    folder.mkdir(parents=True)
    pid = os.fork()
    if not pid:
        os.setsid()
        EngineServer._spawn = _spawn  # type: ignore[method-assign]
        try:
            work(folder)
        except BaseException:
            (folder / "failed.txt").write_text(traceback.format_exc())
        finally:
            os._exit(0)
    return pid


def wait(pid: int, timeout_s: float = _FAMILY_S) -> None:
    limit = Patience(timeout_s)
    while not limit.over() and not os.waitpid(pid, os.WNOHANG)[0]:
        time.sleep(0.02)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


# --- the engine -----------------------------------------------------------------------------------
class Launch(Protocol):
    """What a server is started with; an EngineServer, too."""

    log: Path
    args: dict[str, Any]
    token: str


class ForkedServer:
    """A fork that serves, in the part of `subprocess.Popen` that EngineServer uses."""

    def __init__(self, server: Launch, environment: dict[str, str]) -> None:
        self._code: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            try:
                self._serve(server, environment, parent)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)

    def _serve(self, server: Launch, environment: dict[str, str], parent: int) -> None:
        log = os.open(server.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # that of the environment
        if late_scheduler.VARIABLE in environment:
            late_scheduler.hold_up()
        server_process.die_with(parent)
        server_process.serve(server.args, server_process.Secret(server.token))

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> int:
        limit = Patience(timeout_s)
        while (code := self.poll()) is None:
            if limit.over():
                raise subprocess.TimeoutExpired("a forked server", timeout_s)
            time.sleep(0.01)
        return code


def _spawn(server: EngineServer) -> None:
    """In place of EngineServer._spawn."""
    assert server._scratch is not None
    server.log.parent.mkdir(parents=True, exist_ok=True)
    environment = server._environment() | sglang_server._private(server._scratch.path)
    server._process = ForkedServer(server, environment)  # type: ignore[assignment]


def run_family(family: str, folder: Path) -> None:
    make_family_model(folder / "model", family)
    path = f"model.path={folder / 'model'}"
    config = resolve(load_config(RECIPE, [*SETTINGS, path]))
    context = mismatch_command._context(config, folder)
    rollouts = asyncio.run(mismatch_command._generate(context, TOKENS))
    job = _job(context, rollouts, folder)
    scores = score(context.model_path, context.model_shape(), rollouts, context.blobs())
    np.savez(folder / "scores-hf.npz", **scores)
    job.save(folder / "job.json")  # last: it says that the family is complete


def _job(context: RunContext, rollouts: list[Rollout], folder: Path) -> ScoreJob:
    records = folder / "rollouts.msgpack"
    records.write_bytes(encode_value(rollouts))
    job = make_job(
        context,
        records,
        folder / "scores.npz",
        variants=(*TRAINER_VARIANTS, *_sparse_variants(context.model_shape())),
        dtypes=["fp32"],
        model=context.model_path,
        version="",
    )
    return replace(job, ep=1)


def _sparse_variants(shape: ModelShape) -> tuple[str, ...]:
    return SPARSE_VARIANTS if shape.index_topk else ()


# --- transformers ---------------------------------------------------------------------------------
class ForcedRoutes(TorchFunctionMode):
    """Every choice of `top_k` out of all experts is that of the record, layer after layer.

    So are the positions that sparse attention chooses, where they are given.
    """

    def __init__(self, shape: ModelShape, routes: Tensor, positions: Tensor | None) -> None:
        """routes: [L, rows, K]; positions: [layers that choose, rows, index_topk]."""
        super().__init__()
        self._shape, self._routes = shape, routes
        self._positions = iter(()) if positions is None else iter(positions)
        self._forces_positions = positions is not None
        self.agree: list[Tensor] = []  # by layer: rows in which the record has the best experts

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        scores, size, chosen = args[0], self._shape, found.indices
        if self._forces_positions and chosen.shape == (1, scores.shape[-1], size.index_topk):
            ids = next(self._positions)[None]
            return torch.return_types.topk((scores.gather(-1, ids), ids))
        if scores.dim() != 2 or (scores.shape[1], chosen.shape[1]) != (
            size.num_experts,
            size.top_k,
        ):
            return found  # a choice of groups: of scores [rows, groups, experts] or [rows, groups]
        ids = self._routes[len(self.agree)]
        recorded = scores.gather(-1, ids)
        self.agree.append(recorded.amin(-1) >= found.values.amin(-1) - ROUTER_TIE)
        return torch.return_types.topk((recorded, ids))


@torch.no_grad()
def score(
    folder: Path, shape: ModelShape, rollouts: list[Rollout], store: BlobStore
) -> dict[str, np.ndarray]:
    """What scores-hf.npz holds."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    model.eval()
    names = (
        *HF_VARIANTS,
        *_sparse_variants(shape),
        "agree",
        "agree_rotated",
        "masks",
        "masks_moved",
    )
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for rollout in rollouts:
        routes = torch.from_numpy(
            np.concatenate([store.load(part.ids) for part in rollout.routing], axis=1).astype(int)
        )
        positions = _positions(shape, rollout, store)
        logits, agree = _forward(model, shape, rollout, routes, positions)
        found["agree"].append(agree.float().mean(1, keepdim=True).T.numpy())
        found["masks"].append(_masks_agree(logits, rollout, store))
        found["masks_moved"].append(_masks_agree(logits.roll(1, 0), rollout, store))
        found["both"].append(_logprobs(logits, rollout, store))
        found["routing"].append(_logprobs(logits, rollout, None))
        others = (routes + 1) % shape.num_experts
        turned, agree = _forward(model, shape, rollout, others, positions)
        found["agree_rotated"].append(agree.float().mean(1, keepdim=True).T.numpy())
        found["both_rotated"].append(_logprobs(turned, rollout, store))
        if positions is not None:
            for name, given in zip(SPARSE_VARIANTS, (None, positions.roll(1, 1)), strict=True):
                logits, _ = _forward(model, shape, rollout, routes, given)
                found[name].append(_logprobs(logits, rollout, store))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _positions(shape: ModelShape, rollout: Rollout, store: BlobStore) -> Tensor | None:
    """[layers that choose, T - 1, index_topk]; 0 once more where a token has fewer positions."""
    if not shape.index_topk:
        return None
    (part,) = rollout.indexer
    rows = [decode(layer, 0, part.row_end, part.top_k) for layer in store.load(part.packed)]
    return torch.from_numpy(np.stack(rows)).long().clamp_min(0)


def _forward(
    model: Any, shape: ModelShape, rollout: Rollout, routes: Tensor, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Logits [T - 1, V] under forced routes and positions, and whether the live routers choose
    them [L, T - 1].
    """
    ids = torch.from_numpy(rollout.token_ids.astype(int))[None, :-1]
    with ForcedRoutes(shape, routes, positions) as forced:
        logits = model(ids, use_cache=False).logits[0].float()
    assert len(forced.agree) == len(shape.moe_layers), len(forced.agree)
    return logits, torch.stack(forced.agree)


def _masks_agree(logits: Tensor, rollout: Rollout, store: BlobStore) -> np.ndarray:
    """[S] bool: top-k and top-p of these logits keep the recorded set.

    The sums of two float32 implementations differ by some 1e-6, and at about one row in 10,000 a
    sum is that near to top_p: there either set is right (EDGE).  So is either token where the last
    kept and the first dropped one are equal but for rounding (TIE): seen at the 64th place of
    Qwen2-MoE, 0.0053688064 and 0.0053688027.
    """
    sampling, (part,) = rollout.sampling, rollout.sampling_mask
    offsets, ids = store.load(part.offsets), store.load(part.ids)
    found = []
    for row in range(rollout.num_sampled):
        values = logits[rollout.prompt_len - 1 + row] / sampling.temperature
        ranked = values.log_softmax(-1).sort(descending=True).values
        before = ranked.exp().cumsum(0) - ranked.exp()
        if sampling.top_k > 0:
            before[sampling.top_k :] = 2.0
        least, most = ((before <= sampling.top_p + edge).sum() for edge in (-EDGE, EDGE))
        kept = torch.zeros(len(values), dtype=torch.bool)
        kept[ids[offsets[row] : offsets[row + 1]]] = True
        logprobs = values.log_softmax(-1)
        are_largest = logprobs[kept].min() >= logprobs[~kept].max() - TIE
        found.append(bool(are_largest and least <= kept.sum() <= most))
    return np.asarray(found)


def _logprobs(logits: Tensor, rollout: Rollout, masks: BlobStore | None) -> np.ndarray:
    """Of the sampled tokens, over the recorded sets or over the whole vocabulary."""
    (part,) = rollout.sampling_mask
    found = []
    for row, token in enumerate(rollout.token_ids[rollout.prompt_len :].tolist()):
        values = logits[rollout.prompt_len - 1 + row]
        total = values
        if masks is not None:
            offsets, ids = masks.load(part.offsets), masks.load(part.ids)
            total = values[torch.from_numpy(ids[offsets[row] : offsets[row + 1]].astype(int))]
        found.append(float(values[token] - total.logsumexp(0)))
    return np.asarray(found)
