"""Digests of live weights on both sides of each switch, written by the processes of a run.

    FOLDER/trainer-VERSION-RANK.json    what a trainer rank has when it begins to publish
    FOLDER/engine-NUMBER.json           what an engine rank serves after a commit, with its version

A digest is of one Hugging Face tensor, put together from live tensors by the tables of layouts;
neither pieces nor buckets nor digests of a session take part.  Ranks hold whole tensors.
`MOERL_TEST_LIVE` names the folder.  The first VERIFY of version `MOERL_TEST_SPOILS` finds one
element of a live weight changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # every process of a run imports this file at its start
    from torch import Tensor

    from moerl.layout import ModelSpec, Named

FOLDER, SPOILS = "MOERL_TEST_LIVE", "MOERL_TEST_SPOILS"
Digests = dict[str, str]  # by name of a Hugging Face tensor


def digests(spec: ModelSpec, named: Named, live: Mapping[str, Tensor]) -> Digests:
    import torch

    from moerl.layout import at, hf_shapes

    shapes, whole = hf_shapes(spec), {}
    for name, local in named.items():
        for tile in local.tiles:
            if tile.hf not in whole:
                whole[tile.hf] = torch.full(shapes[tile.hf], torch.nan)
            whole[tile.hf][at(tile.hf_box)] = live[name].detach()[at(tile.box)].float()
    return {hf: hashlib.sha256(t.numpy().tobytes()).hexdigest() for hf, t in whole.items()}


def note(name: str, version: object, found: Digests) -> None:
    path = Path(os.environ[FOLDER]) / f"{name}.json"
    path.with_suffix(".part").write_text(json.dumps({"version": str(version), "tensors": found}))
    path.with_suffix(".part").rename(path)


def hook_receiver(module: ModuleType) -> None:
    from moerl.layout import sglang_tiles

    commit, verify = module.Receiver.commit, module.Receiver.verify
    spoilt: list[str] = []

    def committed(self) -> None:  # type: ignore[no-untyped-def]
        commit(self)
        who = self.context
        named = sglang_tiles(who.spec, who.engine.tp, who.rank, who.engine.ep, who.engine.dp)
        found = digests(who.spec, named, self.model.tensors())
        note(f"engine-{time.time_ns()}", self.held, found)

    def verified(self, update):  # type: ignore[no-untyped-def]
        version = str(update.version)
        if version == os.environ.get(SPOILS) and version not in spoilt:
            spoilt.append(version)
            *_, last = self.model.tensors().values()
            last.view(-1)[0] += 1e-3
        return verify(self, update)

    module.Receiver.commit, module.Receiver.verify = committed, verified


def hook_publisher(module: ModuleType) -> None:
    from moerl.layout import megatron_tiles

    publish = module.WeightPublisher.publish

    def published(self, version):  # type: ignore[no-untyped-def]
        who = self._context
        named = megatron_tiles(who.spec, who.layout, who.rank, who.layer_spec)
        note(f"trainer-{version}-{who.rank}", version, digests(who.spec, named, who.live()))
        return publish(self, version)

    module.WeightPublisher.publish = published


def install() -> None:
    from tests.helpers.after_import import after_import

    after_import("moerl.weight_sync.receiver", hook_receiver)
    after_import("moerl.weight_sync.publisher", hook_publisher)


# --- for the test ---------------------------------------------------------------------------------
def trained(folder: Path) -> dict[str, Digests]:
    """By version: digests of all trainer ranks; replicas agree."""
    found: dict[str, Digests] = {}
    for path in folder.glob("trainer-*.json"):
        one = json.loads(path.read_text())
        both = found.setdefault(one["version"], {})
        assert all(both.get(hf, digest) == digest for hf, digest in one["tensors"].items())
        both |= one["tensors"]
    return found


def served(folder: Path) -> list[tuple[str, Digests]]:
    """(version, digests) of each commit, in order."""
    every = [json.loads(path.read_text()) for path in sorted(folder.glob("engine-*.json"))]
    return [(one["version"], one["tensors"]) for one in every]
