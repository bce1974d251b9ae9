"""Dumps of other systems: both formats give equal records; a bad field is named with its line."""

from __future__ import annotations

import contextlib
import copy
import json
import struct
import tracemalloc
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moerl.audit.dumps import NEWEST, read_dump, summary
from moerl.core.errors import ConfigError, RecordError
from moerl.core.types import ModelShape
from moerl.records.blob_store import BlobStore

SHAPE = ModelShape(vocab_size=20, num_layers=3, moe_layers=(1, 2), num_experts=8, top_k=2)
INF, NAN = float("inf"), float("nan")
ROW: dict[str, Any] = {
    "id": "a",
    "token_ids": [5, 9, 7, 2],
    "prompt_len": 2,
    "logprobs": [-0.4, -1.1],
    "sampling_mask": [[7, 3], [2]],
    "lag": [3, 1],
    "top_k": 8,
    "temperature": 0.7,
    "routing": [[[0, 5], [1, 2]], [[3, 5], [1, 7]], [[0, 4], [2, 6]]],
}


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


def jsonl(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "x.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def npz(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Path:
    kept = [sorted(ids) for row in rows for ids in row["sampling_mask"]]
    arrays: dict[str, Any] = {
        "id": np.array([row["id"] for row in rows]),
        "num_tokens": np.array([len(row["token_ids"]) for row in rows]),
        "token_ids": np.concatenate([row["token_ids"] for row in rows]),
        "loss_mask": np.concatenate(
            [np.arange(len(r["token_ids"])) >= r["prompt_len"] for r in rows]
        ),
        "logprobs": np.concatenate([row["logprobs"] for row in rows]),
        "routing": np.concatenate([np.array(row["routing"], np.uint8) for row in rows]),
        "mask_offsets": np.cumsum([0, *(len(ids) for ids in kept)]),
        "mask_ids": np.concatenate(kept),
        "lag": np.concatenate([row["lag"] for row in rows]),
        "top_k": np.array(8),
        "temperature": np.array([row["temperature"] for row in rows]),
    }
    path = folder / "x.npz"
    merged = {k: v for k, v in (arrays | changes).items() if v is not None}
    np.savez(path, **merged)
    return path


def longer() -> dict[str, Any]:
    row = copy.deepcopy(ROW) | {"id": "b", "token_ids": [5, 9, 7, 2, 11], "temperature": 0.9}
    row["logprobs"] = [-0.5, -0.1, -3.0]
    row["sampling_mask"] = [[7], [2, 4, 19], [11]]
    row["lag"] = [0, 0, 0]
    row["routing"] = [*ROW["routing"], [[7, 6], [5, 4]]]
    return row


def test_both_formats_give_the_same_records(tmp_path: Path) -> None:
    rows = [ROW, longer()]
    stores = [BlobStore(tmp_path / name, "n") for name in ("j", "z")]
    paths = [jsonl(tmp_path, *rows), npz(tmp_path, rows)]
    one, two = (read_dump(path, s, SHAPE) for path, s in zip(paths, stores, strict=True))
    for row, left, right in zip(rows, one, two, strict=True):
        for rollout, store in ((left, stores[0]), (right, stores[1])):
            assert rollout.token_ids.tolist() == row["token_ids"]
            assert rollout.prompt_len == row["prompt_len"]
            np.testing.assert_allclose(rollout.logprobs, row["logprobs"])
            routing = store.load(rollout.routing[0].ids)
            assert routing.dtype == np.uint8
            assert routing.transpose(1, 0, 2).tolist() == row["routing"]
            (mask,) = rollout.sampling_mask
            offsets, ids = store.load(mask.offsets), store.load(mask.ids)
            sets = [sorted(kept) for kept in row["sampling_mask"]]
            assert [ids[a:b].tolist() for a, b in pairwise(offsets)] == sets
            lag = [NEWEST.step - version.step for version in rollout.version_of_tokens()]
            assert lag == row["lag"]
            assert rollout.sampling.temperature == row["temperature"]
            assert rollout.sampling.top_k == 8


BAD: list[tuple[str, dict[str, Any]]] = [
    ("token_ids", {"token_ids": None}),
    ("token_ids", {"token_ids": [5, 9, 7, 20]}),
    ("token_ids", {"token_ids": [5.5, 9, 7, 2]}),
    ("prompt_len", {"prompt_len": 4}),
    ("loss_mask", {"loss_mask": [0, 0, 1, 1]}),
    ("logprobs", {"logprobs": [-0.4]}),
    ("logprobs", {"logprobs": ["x", "y"]}),
    ("logprob_sign", {"logprobs": [0.4, -1.0]}),
    ("logprob_finite", {"logprobs": [float("nan"), -1.0]}),
    ("routing", {"routing": None}),
    ("routing", {"routing": ROW["routing"][:2]}),
    ("routing", {"routing": [*ROW["routing"][:2], [[0, 4], [6, 6]]]}),
    ("routing", {"routing": [*ROW["routing"][:2], [[0, 4], [6, 8]]]}),
    ("routing", {"routing": [*ROW["routing"][:2], [[0, 4]]]}),
    ("sampling_mask", {"sampling_mask": None}),
    ("sampling_mask", {"sampling_mask": [[7, 3], [3]]}),
    ("sampling_mask", {"sampling_mask": [[7, 3]]}),
    ("sampling_mask", {"sampling_mask": [7, 2]}),
    ("sampling_mask", {"top_k": -1}),
    ("lag", {"lag": [1, 3]}),
    ("lag", {"lag": [1]}),
    ("temperature", {"temperature": 0}),
    ("temperature", {"temperature": "hot"}),
    ("routes", {"routes": []}),
    *(("temperature", {"temperature": bad}) for bad in (INF, NAN, 10**400, True, 1e9, None)),
    *(("top_k", {"top_k": bad}) for bad in (INF, NAN, 10**400, 2.5, -2, [8])),
    *(("top_p", {"top_p": bad}) for bad in (INF, NAN, 1.5, -0.1, "1")),
    ("min_p", {"min_p": 2}),
    ("logprob_finite", {"logprobs": [-INF, -1.0]}),
    ("logprob_finite", {"logprobs": [-1e300, -1.0]}),
    *(("lag", {"lag": bad}) for bad in (2**62, 2**64, 1_000_001, [1, [2, 3]], {"a": 1}, "x", -1)),
    ("token_ids", {"token_ids": [5, 9, 7, 2**63]}),
    ("token_ids", {"token_ids": [5, 9, 7, 10**30]}),
    ("token_ids", {"token_ids": nested(80)}),
    ("routing", {"routing": nested(80)}),
    ("loss_mask", {"loss_mask": [0, 0, 0, 0], "prompt_len": ...}),
    ("sampling_mask", {"loss_mask": [1, 0, 1, 0], "prompt_len": ...}),
    ("prompt_len", {"prompt_len": [2]}),
    ("sampling_mask", {"sampling_mask": [[7, 3], [2**32 + 2]]}),
    ("ids", {"sampling_mask": [[7, 3], [[2]]]}),
]


@pytest.mark.parametrize(("field", "change"), BAD)
def test_bad_field_is_named_with_its_line(
    field: str, change: dict[str, Any], tmp_path: Path
) -> None:
    row = {name: value for name, value in (ROW | change).items() if value is not ...}
    path = jsonl(tmp_path, ROW, row)
    with pytest.raises(RecordError) as error:
        read_dump(path, BlobStore(tmp_path / "b", "n"), SHAPE)
    assert error.value.reason == "dump"
    assert f"x.jsonl line 2: {field}: " in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("num_tokens", {"num_tokens": np.array([4, 4])}),
        ("routing", {"routing": np.zeros((6, 2, 2), np.uint8)}),
        ("logprobs", {"logprobs": -np.ones(4)}),
        ("loss_mask", {"loss_mask": None}),
        ("mask_offsets", {"mask_ids": None}),
        ("temperature", {"temperature": np.array([0.7])}),
        ("id", {"id": np.array([{}, {}], dtype=object)}),
        ("id", {"id": np.array(["a"])}),
        ("id", {"id": np.array("a")}),
        ("routing", {"num_tokens": np.array([2**62, 2**62, 2**62, 2**62 + 9])}),
        ("num_tokens", {"num_tokens": np.array([-1, 10])}),
        ("mask_offsets", {"mask_offsets": np.array([0, 2**63 - 1, -(2**63), -1, 7, 8])}),
        ("mask_offsets", {"mask_offsets": np.array([0, 2, 1, 4, 7, 8])}),
        ("mask_offsets", {"mask_offsets": np.array([1, 2, 3, 4, 7, 8])}),
        ("sampling_mask", {"mask_ids": np.array([3, 7, 2, 7, 2, 4, 19, 2**32 + 11])}),
        ("lag", {"lag": np.array([2**62, 0, 0, 0, 0])}),
        ("temperature", {"temperature": np.array([0.7, np.inf])}),
        ("top_k", {"top_k": np.array(np.nan)}),
        ("arr", {"arr": np.zeros(3)}),
    ],
)
def test_bad_array_is_named(field: str, change: dict[str, Any], tmp_path: Path) -> None:
    path = npz(tmp_path, [ROW, longer()], **change)
    with pytest.raises(RecordError, match="dump") as error:
        read_dump(path, BlobStore(tmp_path / "b", "n"), SHAPE)
    assert field in str(error.value) or "pickle" in str(error.value)


def zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return path


def npy(head: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    size = struct.pack("<H", len(head))
    return b"\x93NUMPY" + version + size + head.encode() + data


HEAD = "{'descr': '<i8', 'fortran_order': False, 'shape': (%s,), }"
HOSTILE = {
    "no archive": (b"x" * 100, "file"),
    "no array": ({"token_ids": b"text"}, "token_ids"),
    "a head of nothing": ({"token_ids": npy("")}, "token_ids"),
    "a head that is code": ({"token_ids": npy("__import__('os')")}, "token_ids"),
    "a nested head": ({"token_ids": npy("(" * 5000)}, "token_ids"),
    "a long array": ({"token_ids": npy(HEAD % 10**15, bytes(8))}, "token_ids"),
    "an array of 2^128": ({"token_ids": npy(HEAD % f"{2**64}, {2**64}", bytes(8))}, "token_ids"),
    "a negative array": ({"token_ids": npy(HEAD % "-1, -1", bytes(8))}, "token_ids"),
    "a short array": ({"token_ids": npy(HEAD % 1, bytes(64))}, "token_ids"),
    "a later version": ({"token_ids": npy(HEAD % 1, bytes(8), b"\x03\x00")}, "token_ids"),
    "another name": ({"a\nb": npy(HEAD % 1, bytes(8))}, r"'a\\nb'"),
    "a path": ({"../token_ids": npy(HEAD % 1, bytes(8))}, "'../token_ids'"),
}


@pytest.mark.parametrize(("data", "field"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_archive_is_refused(data: Any, field: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        zipped(path, **data)
    check_refused(path, field)


def check_refused(path: Path, field: str) -> None:
    with pytest.raises(RecordError, match=rf"x\.npz: {field}: ") as error:
        read_dump(path, BlobStore(path.parent / "b", "n"), SHAPE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", range(0, 3000, 97))
def test_a_damaged_archive_is_refused_or_whole(place: int, tmp_path: Path) -> None:
    path = npz(tmp_path, [ROW, longer()])
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 0xFF
    path.write_bytes(data)
    with contextlib.suppress(RecordError):
        assert len(read_dump(path, BlobStore(tmp_path / "b", "n"), SHAPE)) == 2


@pytest.mark.parametrize("how", ["one array", "many arrays"])
def test_a_small_file_of_many_bytes_is_not_unpacked(how: str, tmp_path: Path) -> None:
    """640 MB in 3 MB."""
    arrays = ["routing"] if how == "one array" else ["token_ids", "loss_mask", "logprobs", "lag"]
    num = (640 << 20) // 8 // len(arrays)
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name in arrays:
            with file.open(f"{name}.npy", "w") as member:
                member.write(npy(HEAD % num))
                for _ in range(num // (1 << 17)):
                    member.write(bytes(1 << 20))
    tracemalloc.start()
    try:
        check_refused(path, arrays[0] if how == "one array" else "loss_mask")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_arrays_that_pack_well_are_read(tmp_path: Path) -> None:
    """Control: more than a hundred times their file, and few."""
    rows = [ROW | {"id": "a" * 20_000}, longer()]
    path = npz(tmp_path, rows)
    with np.load(path) as file:
        np.savez_compressed(path, **dict(file))
    assert len(read_dump(path, BlobStore(tmp_path / "b", "n"), SHAPE)) == 2
    assert path.stat().st_size * 10 < 20_000 * 8


def test_files_that_are_no_dump(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "b", "n")
    (tmp_path / "torn.jsonl").write_text('{"token_ids": [1')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "long.jsonl").write_text('{"id": ' + "9" * 5000 + "}")
    (tmp_path / "twice.jsonl").write_text('{"id": 1, "id": 2}')
    (tmp_path / "x.pt").write_bytes(b"")
    for name, text in (
        ("torn.jsonl", "line 1: line: is not JSON"),
        ("deep.jsonl", "line 1: line: is nested too deeply"),
        ("long.jsonl", "line 1: line: is not JSON: Exceeds the limit"),
        ("twice.jsonl", "line 1: line: has the key 'id' twice"),
        ("empty.jsonl", "no rollout"),
        ("x.pt", "must end in"),
        ("absent.npz", "does not exist"),
    ):
        with pytest.raises(RecordError, match=text):
            read_dump(tmp_path / name, store, SHAPE)


def test_the_model_of_a_check_is_a_folder_or_its_config(tmp_path: Path) -> None:
    dump = jsonl(tmp_path, ROW)
    with pytest.raises(ConfigError, match=r"MODEL = .*x\.jsonl' is not usable: a model folder or"):
        summary(tmp_path, dump)  # the arguments in the other order
