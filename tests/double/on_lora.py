"""Adapters on the double: W0 from the host or the device, merged to the same bits; bytes, waits."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from moerl.config.lora_settings import BasePlace, LoraConfig
from moerl.config.schema import ParallelConfig, TrainerConfig
from moerl.layout import at
from moerl.layout.adapters import factor_names, module_of
from moerl.planning.memory import Training, trainer_memory
from moerl.weight_sync.adapters.low_rank import merge_into
from tests.double.mutations import BASE_BLUNDERS, Blunder
from tests.double.train_once import MODEL, largest_difference, make_folder, prepare
from tests.double.watch import PAGEABLE, WAITS, Watch, memory, purpose, watch

if TYPE_CHECKING:
    from moerl.trainer.hf_io.hf_folder import HfFolder
    from moerl.trainer.model.gpt import Model
    from moerl.trainer.model.parallel import Parallel

LORA = LoraConfig(rank=4, alpha=8, ranks={"*.experts.*": 2})
HALF = TrainerConfig(dtype="bf16")
PLACES: tuple[BasePlace, ...] = ("host", "device")


@dataclass(frozen=True)
class Ranks:
    """The only rank, and the model that it loads."""

    parallel: Parallel
    source: HfFolder


@dataclass(frozen=True)
class Merged:
    """A model whose factors are random, after one watched merge."""

    model: Model
    loaded: dict[str, Tensor]  # W0, on the CPU
    seen: Watch
    base_on_device: int  # bytes of W0, or of its buckets

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu() for name, tensor in self.model.tensors.items()}

    def expected(self) -> dict[str, Tensor]:
        """W0 + s B A by tile on the CPU, for each Hugging Face weight."""
        factors = {name: value.cpu() for name, value in self.model.factors().items()}
        found = {name: value.clone() for name, value in self.loaded.items()}
        for name, local in self.model.tiles.items():
            for tile in local.tiles:
                a, b = factor_names(module_of(tile.hf), shared=False)
                if a in factors:
                    rows, cols = (slice(part.start, part.stop) for part in tile.hf_box)
                    place, factor = at(tile.box), (factors[a][:, cols], factors[b][rows])
                    merge_into(found[name][place], self.loaded[name][place], *factor, LORA.scale)
        return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("lora")
    make_folder(folder)
    parallel = prepare("cuda", folder).learner.parallel
    from moerl.trainer.hf_io.hf_folder import HfFolder

    return Ranks(parallel, HfFolder(str(folder / MODEL)))


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    yield
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()


def merged(ranks: Ranks, place: BasePlace, number: int = 0) -> Merged:
    from moerl.trainer.hf_io.hf_folder import load_hf
    from moerl.trainer.model import gpt

    lora, source = replace(LORA, base=place), ranks.source
    model = gpt.build(source.spec, HALF, ranks.parallel, with_replay=False, lora=lora)
    load_hf(model.tensors, model.tiles, source)
    loaded = {name: tensor.detach().cpu() for name, tensor in model.tensors.items()}
    with purpose(f"W0 {place} {number}"):
        model.keep_base()
    for name, factor in model.factors().items():
        chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        factor.copy_(0.1 * torch.randn(factor.shape, generator=chance))
    torch.cuda.synchronize()
    with watch() as seen:
        changes = model.merge()
    assert int(changes.changed) > changes.weights / 2
    return Merged(model, loaded, seen, memory(f"W0 {place} {number}").live)


def told(ranks: Ranks, place: BasePlace) -> int:
    """Bytes of W0 on the device, by the dry run."""
    training = Training(lora=replace(LORA, base=place))
    (rank,) = trainer_memory(ranks.source.spec, ParallelConfig(), training)
    return rank.device_base


@pytest.mark.parametrize("place", PLACES)
def test_w0_from_either_place_gives_the_same_bits(ranks: Ranks, place: BasePlace) -> None:
    """Control: W0 itself is far; a reference pass gets it, and a merge gives them back."""
    found = merged(ranks, place)
    want = found.expected()
    assert want.keys() == found.weights.keys()
    assert all(torch.equal(found.weights[name], value) for name, value in want.items())
    assert largest_difference(found.loaded, want) > 1e-2
    found.model.unmerge()
    assert all(torch.equal(found.weights[name], value) for name, value in found.loaded.items())
    found.model.merge()
    assert all(torch.equal(found.weights[name], value) for name, value in want.items())


def test_bytes_are_those_of_the_dry_run(ranks: Ranks) -> None:
    """Two buckets of the largest weight, or all of W0; on the host all of W0."""
    host, device = (merged(ranks, place, 1) for place in PLACES)
    (adapters,) = host.model.adapters
    sizes = [weight.nbytes for weight in adapters.adapted]
    print("host:", host.base_on_device, "device:", device.base_on_device, "W0:", sum(sizes))
    assert host.base_on_device == told(ranks, "host") == 2 * max(sizes)
    assert device.base_on_device == told(ranks, "device") == sum(sizes) == adapters.base_bytes
    assert sum(sizes) > 5 * host.base_on_device, "the two are told apart"


@pytest.mark.parametrize("place", PLACES)
def test_a_merge_copies_w0_once_and_no_thread_waits(ranks: Ranks, place: BasePlace) -> None:
    seen = merged(ranks, place, 2)
    assert not wrong_copies(seen.seen)
    (adapters,) = seen.model.adapters
    copies = [event.bytes for event in seen.seen.seen if event.kind == "h2d_async"]
    assert sum(copies) == (adapters.base_bytes if place == "host" else 0)


def wrong_copies(seen: Watch) -> str:
    lines = seen.own_lines(*WAITS, PAGEABLE)
    return f"waits or pageable copies {lines}" if lines else ""


@pytest.mark.parametrize("blunder", BASE_BLUNDERS, ids=[b.name for b in BASE_BLUNDERS])
def test_blunders_with_w0_are_caught(
    blunder: Blunder, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    blunder.apply(monkeypatch)
    try:
        found = merged(ranks, "host", 3 + BASE_BLUNDERS.index(blunder))
        caught = wrong_copies(found.seen)
        if found.base_on_device > told(ranks, "host"):
            caught = f"{found.base_on_device} bytes on the device"
    except RuntimeError as error:
        caught = str(error).splitlines()[0]
    print(f"{blunder.name}: {caught or 'NOT CAUGHT'}")
    assert caught
