"""Checksums of an engine's live weights, as SGLang computes them."""

from __future__ import annotations

from moerl.engine.host.host import EngineHost


async def checksums(host: EngineHost) -> list[dict[str, str]]:
    """By rank, of each tensor."""
    client = host._alive()
    reply = await client._ask("POST", "/weights_checker", {"action": "checksum"})
    return [rank["checksums"] for rank in reply["ranks"]]
