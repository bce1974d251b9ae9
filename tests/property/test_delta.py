"""Deltas: base + delta = full, bitwise; twice = once; anything else is refused untouched."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moerl.core.types import PolicyVersion
from moerl.kernels.build import TARGETS, build
from moerl.kernels.library import library
from moerl.weight_sync import delta
from moerl.weight_sync.delta import DeltaError, apply, changed_reference, encode

V6, V7, V8 = (PolicyVersion(1, step) for step in (6, 7, 8))
Case = tuple[Tensor, Tensor, int]  # old, new (flat uint8), word_bytes


@pytest.fixture(params=["numpy", "built"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The codec with and without its compiled loop."""
    if request.param == "numpy":
        monkeypatch.setattr(delta, "library", lambda _target: None)
    else:
        build(TARGETS["cpu"])
        library.cache_clear()
        assert library("cpu") is not None, "the suite needs a C++ compiler"
    chosen: str = request.param
    return chosen


def change(old: Tensor, word_bytes: int, density: float, seed: int) -> Tensor:
    """Flip about `density` of the words."""
    rng = np.random.default_rng(seed)
    new = old.clone()
    words = new.numpy().reshape(-1, word_bytes)
    rows = np.flatnonzero(rng.random(len(words)) < density)
    words[rows, rng.integers(0, word_bytes, len(rows))] ^= rng.integers(1, 256, len(rows)).astype(
        np.uint8
    )
    return new


def random_bytes(num_bytes: int, seed: int) -> Tensor:
    data = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return torch.from_numpy(data)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    word_bytes = draw(st.sampled_from([1, 2, 4]))
    num_words = draw(st.integers(0, 300) | st.integers(60_000, 200_000))
    seed = draw(st.integers(0, 2**32 - 1))
    density = draw(st.sampled_from([0.0, 1e-5, 1e-3, 0.02, 0.06, 0.2, 0.9, 1.0]))
    old = random_bytes(num_words * word_bytes, seed)
    return old, change(old, word_bytes, density, seed), word_bytes


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([0, 1, 3]))
def check_round_trip(case: Case, level: int) -> None:
    old, new, word_bytes = case
    packed = encode(old, new, word_bytes=word_bytes, base=V7, version=V8, level=level)
    full = encode(torch.zeros_like(new), new, word_bytes=word_bytes, base=V7, version=V8, level=0)
    assert len(packed) <= max(len(full), len(new) + 128)  # never worse than the bytes
    buffer = old.clone()
    info = apply(packed, buffer, holds=V7)
    assert torch.equal(buffer, new)
    assert info.num_changed == int((old != new).view(-1, word_bytes).any(1).sum())
    apply(packed, buffer, holds=V8)
    assert torch.equal(buffer, new)


def test_round_trip(kernel: str) -> None:
    check_round_trip()


# words, changed words of 2 bytes -> the encoding that must be chosen
DENSITIES = [
    (400_000, 0, "index32"),
    (400_000, 2, "index32"),
    (400_000, 400, "gap16"),
    (400_000, 20_000, "gap16"),
    (400_000, 30_000, "bitmap"),
    (400_000, 360_000, "bitmap"),
    (400_000, 390_000, "full"),
    (400_000, 400_000, "full"),
]


@pytest.mark.parametrize(("num_words", "num_changed", "expected"), DENSITIES)
def test_density_chooses_the_encoding(
    kernel: str, num_words: int, num_changed: int, expected: str
) -> None:
    old = random_bytes(2 * num_words, 1)
    new = old.clone()
    rows = np.random.default_rng(2).choice(num_words, num_changed, replace=False)
    new.numpy().reshape(-1, 2)[rows] ^= 0xA5
    packed = encode(old, new, word_bytes=2, base=V7, version=V8, level=0)
    assert len(packed) <= 2 * num_words + 128
    buffer = old.clone()
    info = apply(packed, buffer, holds=V7)
    assert (info.encoding, info.num_changed) == (expected, num_changed)
    assert torch.equal(buffer, new)


@pytest.mark.parametrize("gap", [0, 1, 65_533, 65_534, 65_535, 65_536, 131_069, 131_070, 131_071])
def test_gaps_around_the_filler(gap: int) -> None:
    """gap16 skips long runs by fillers; 65,535 is the first gap that needs one."""
    gaps = np.array([gap, 0, gap])
    entries = delta._gap16(gaps, 3 + int((gaps // 65_535).sum()))
    info = delta.DeltaInfo("gap16", 2, False, 0, 3, V7, V8)
    positions = delta._changed(info, entries, 300_000)
    assert positions.tolist() == (np.cumsum(gaps + 1) - 1).tolist()


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
def test_compiled_loop_equals_its_reference(word_bytes: int) -> None:
    """Every length around a block, a change at every place, and random densities."""
    build(TARGETS["cpu"])
    library.cache_clear()
    for num_words in (*range(0, 150), 1000, 4097):
        old = random_bytes(num_words * word_bytes, num_words).numpy()
        new = old.copy()
        for density in (0.0, 0.02, 0.5, 1.0):
            new = change(torch.from_numpy(old), word_bytes, density, num_words).numpy()
            want = changed_reference(old, new, word_bytes)
            np.testing.assert_array_equal(delta.changed_words(old, new, word_bytes), want)
    for place in range(160 * word_bytes):
        old = random_bytes(160 * word_bytes, place).numpy()
        new = old.copy()
        new[place] ^= 1 << (place % 8)
        assert delta.changed_words(old, new, word_bytes).tolist() == [place // word_bytes]


def example(level: int = 1, density: float = 0.02) -> tuple[Tensor, Tensor, bytes]:
    old = random_bytes(20_000, 3)
    new = change(old, 2, density, 4)
    return old, new, encode(old, new, word_bytes=2, base=V7, version=V8, level=level)


def refused(packed: bytes, buffer: Tensor, holds: PolicyVersion = V7) -> str:
    """Why a delta was refused; the buffer must be as it was."""
    before = buffer.clone()
    with pytest.raises(DeltaError) as caught:
        apply(packed, buffer, holds=holds)
    assert torch.equal(buffer, before), "a refused delta changed the buffer"
    return str(caught.value)


def test_wrong_base_is_refused() -> None:
    old, new, packed = example()
    assert "based on 1.7, the buffer holds 1.6" in refused(packed, old.clone(), V6)
    assert "holds 0.7" in refused(packed, old.clone(), PolicyVersion(0, 7))  # another incarnation
    flipped = old.clone()
    flipped[-1] ^= 1
    assert "does not hold the bytes" in refused(packed, flipped)
    assert "20000 bytes" in refused(packed, old[:-2].clone())
    apply(packed, old, holds=V7)  # negative control
    assert torch.equal(old, new)


def test_full_needs_no_base() -> None:
    _, new, packed = example(density=1.0)
    buffer = torch.zeros_like(new)
    assert apply(packed, buffer, holds=PolicyVersion(0, 0)).encoding == "full"
    assert torch.equal(buffer, new)


@pytest.mark.parametrize(("level", "density"), itertools.product([0, 1], [1e-3, 0.02, 0.3, 1.0]))
def test_truncated_and_garbled_deltas_are_refused(level: int, density: float) -> None:
    old, _, packed = example(level, density)
    for size in (0, 3, 4, 20, 100, len(packed) // 2, len(packed) - 1):
        assert refused(packed[:size], old)
    for place in np.linspace(0, len(packed) - 1, 60).astype(int):
        garbled = bytearray(packed)
        garbled[place] ^= 0x10
        assert refused(bytes(garbled), old)
    assert refused(packed + b"\0", old)


@pytest.mark.parametrize("names_its_size", [True, False])
def test_a_forged_frame_allocates_no_more_than_the_header_says(names_its_size: bool) -> None:
    """2 KiB that would become 64 MiB; the header promises four bytes."""
    packer = zstandard.ZstdCompressor(level=1, write_content_size=names_its_size)
    bomb = packer.compress(bytes(2**26))
    info = delta.DeltaInfo("full", 1, True, 4, 4, V7, V8)
    tracemalloc.start()
    try:
        with pytest.raises(DeltaError, match=r"more than 4 bytes|does not decompress"):
            delta._unpack(info, 0, memoryview(bomb))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_forged_seal_does_not_get_past_the_checks(data: st.DataObject) -> None:
    """Changed anywhere, the outer digest made right again: refused, or the result is the same."""
    old, new, packed = example(data.draw(st.sampled_from([0, 1])), 0.02)
    forged = bytearray(packed)
    place = data.draw(st.integers(20, len(forged) - 1))
    forged[place] ^= data.draw(st.integers(1, 255))
    forged[4:20] = xxhash.xxh3_128_digest(bytes(forged[20:]))
    buffer = old.clone()
    try:
        apply(bytes(forged), buffer, holds=V7)
    except DeltaError:
        return
    assert torch.equal(buffer, new)  # for example the level's number, or the version's


def test_reference_is_the_one_that_is_claimed(kernel: str) -> None:
    """Negative control of the fixture: without the library the numpy loop runs."""
    assert (delta.library("cpu") is None) == (kernel == "numpy")
