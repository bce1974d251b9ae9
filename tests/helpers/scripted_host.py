"""An SGLang server and its client by script, for an engine host, and a server not started yet."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moerl.config.schema import EngineConfig
from moerl.core.types import (
    GenerateRequest,
    ModelShape,
    PolicyVersion,
    SamplingParams,
)
from moerl.engine.host.host import EngineHost
from moerl.engine.host.sglang_client import BadRequest
from moerl.engine.host.sglang_server import EngineServer
from moerl.engine.record_files import FIELD, RecordReader, RecordWriter
from moerl.engine.weight_layout import LiveWeightLayout
from moerl.weight_sync.receiver_names import Committed

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
SHAPE = ModelShape(vocab_size=50, num_layers=2, moe_layers=(0, 1), num_experts=4, top_k=2)


class ScriptedServer:
    """Stands for the process: lives until `cause` is set."""

    url, pid = "http://nowhere", 1
    layout = LiveWeightLayout("0.5.23", "qwen3_moe", 1, 1, 1, "triton", "none", "float32", ())
    cause: str | None = None
    receiver_sockets, receiver_keys = (Path("/absent"),), None

    def __init__(self, *_args: object, **_fields: object) -> None: ...

    async def start(self, client: Any) -> None:
        await asyncio.sleep(0.01)  # a real one takes longer
        self.folder = Path(tempfile.mkdtemp())
        self.records = RecordReader(self.folder)
        client.writer = RecordWriter(self.folder, inline_bytes=0)

    def death(self) -> str | None:
        return self.cause

    def log_tail(self) -> str:
        return "--- end of log ---"

    async def stop(self) -> None:
        shutil.rmtree(self.folder)


class ScriptedClient:
    """Answers one token per request; holds answers back while `slow` until it is told to abort."""

    def __init__(self, *_args: object) -> None:
        self.calls: list[Any] = []
        self.aborted: list[str] = []
        self.version, self.slow, self.hangs = str(V0), False, False
        self.released = asyncio.Event()
        self.commits, self.commit_error = asyncio.Event(), None
        self.commits.set()
        self.committed = list[str]()

    async def close(self) -> None: ...

    async def generate(
        self, body: dict[str, Any], took: Callable[[int, dict[str, Any]], None]
    ) -> None:
        for place, reply in enumerate(await self.all_replies(body)):
            took(place, reply)

    async def work_done(self) -> list[Any]:
        return []

    async def abort(self, name: str) -> None:
        self.aborted.append(name)

    async def all_replies(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        self.calls.append(body)
        if len(body["rid"]) > 1 and any(len(ids) > 9 for ids in body["input_ids"]):
            raise BadRequest("one is too long")
        if any(len(ids) > 9 for ids in body["input_ids"]):
            raise BadRequest("this is too long")
        version = self.version
        if self.slow:
            await self.released.wait()
        start = body["routed_experts_start_len"]
        reason = {"type": "abort" if self.slow else "length"}
        replies = [self._reply(ids, start, version, reason) for ids in body["input_ids"]]
        for name, reply in zip(body["rid"], replies, strict=True):
            if isinstance(reply, dict) and "rows" in reply:
                told = self.writer.write(name, {"routes": reply.pop("rows")})
                reply["meta_info"]["finish_reason"][FIELD] = told
        return replies

    def _reply(self, ids: list[int], start: int, version: str, reason: dict) -> dict[str, Any]:
        rows = np.broadcast_to(np.array([1, 3], "<i4"), (len(ids) - start, 2, 2))
        meta = {
            "finish_reason": dict(reason),
            "weight_versions": [{"version": version, "start": 0, "end": 1}],
            "output_token_logprobs": [[-1.0, 7, None]],
        }
        return {"output_ids": [7], "meta_info": meta, "rows": rows}

    async def pulse(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()

    async def abort_all(self) -> None:
        self.released.set()

    async def commit(self, version: str, mode: str = "") -> Committed:
        await self.commits.wait()
        if self.commit_error is not None:
            raise self.commit_error
        self.version = version
        self.committed.append(version)
        return Committed(0.25)


def ask(name: str, length: int = 4, num_sampled: int = 0) -> GenerateRequest:
    return GenerateRequest(
        name, 0, np.arange(length, dtype=np.int32), num_sampled, SamplingParams(4)
    )


def script(host: EngineHost) -> Any:
    return host._client


QWEN = {"model_type": "qwen3_moe", "dtype": "bfloat16"}


def new_server(folder: Path, config: dict[str, Any] = QWEN) -> EngineServer:
    (folder / "config.json").write_text(json.dumps(config))
    return EngineServer(
        EngineConfig(platform="cpu"),
        folder,
        routing=False,
        version="0.0",
        token="t",
        log=folder / "log",
    )
