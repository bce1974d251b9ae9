"""Records from a scheduler to its host: exact arrays, narrow files, and no file that is left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moerl.core.errors import RecordError
from moerl.engine.plugin import record_output
from moerl.engine.record_files import FIELD, RecordReader, RecordWriter, name_of
from tests.helpers.patience import patience

NAME = "3.1:0.0.17."
WRITER = partial(RecordWriter, inline_bytes=0)
DRAW = np.random.default_rng(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "records"
    path.mkdir(mode=0o700)
    return path


def arrays() -> dict[str, np.ndarray]:
    return {
        "routes": DRAW.integers(0, 256, (40, 3, 8), np.int32),
        "positions": DRAW.integers(-1, 65534, (40, 2, 5), np.int32),
        "mask_lengths": DRAW.integers(1, 9, 40, np.int32),
        "mask_ids": DRAW.integers(0, 151936, 200, np.int32),
        "mask_logprobs": -DRAW.random(40, np.float32),
    }


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        ([0, 255], 1),
        ([0, 256], 2),
        ([-1, 254], 1),
        ([-1, 65534], 2),
        ([-1, 65535], 4),
        ([0, 2**31 - 1], 4),
        ([-(2**31), 2**31 - 1], 4),
        ([-1, 2**32 - 1], 8),
    ],
)
def test_integers_keep_their_values_in_the_narrowest_type(
    folder: Path, values: list[int], stored: int
) -> None:
    array = np.array(values, np.int64 if values[-1:] == [2**32 - 1] else np.int32)
    told = WRITER(folder).write(NAME, {"a": array})
    assert (folder / name_of(NAME)).stat().st_size == stored * len(values)
    assert RecordReader(folder).take(NAME, told)["a"].tolist() == values


def test_a_record_is_read_once_and_equals_what_was_written(folder: Path) -> None:
    wrote = arrays()
    told = WRITER(folder).write(NAME, wrote)
    path = folder / name_of(NAME)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == 40 * 3 * 8 + 40 * 2 * 5 * 2 + 40 + 200 * 4 + 40 * 4
    assert len(told) < 500
    read = RecordReader(folder).take(NAME, told)
    assert list(read) == list(wrote)
    for name, array in wrote.items():
        assert read[name].shape == array.shape
        np.testing.assert_array_equal(read[name], array)
    assert read["mask_logprobs"].dtype == np.float32
    assert os.listdir(folder) == []
    with pytest.raises(RecordError, match="No such file"):
        RecordReader(folder).take(NAME, told)


def _shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def _open_to_others(path: Path) -> None:
    path.chmod(0o644)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _give_anothers(path: Path) -> None:
    (path.parent / name_of("other")).replace(path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (Path.unlink, "No such file"),
        (_shorten, "bytes, want"),
        (_alter, "are not those that were written"),
        (_open_to_others, "is not ours alone"),
        (_link, "symbolic links"),
        (_give_anothers, "are not those that were written"),
    ],
)
def test_another_file_is_refused_and_removed(
    folder: Path, damage: Callable[[Path], None], says: str
) -> None:
    writer = WRITER(folder)
    told = writer.write(NAME, arrays())
    writer.write("other", arrays())
    damage(folder / name_of(NAME))
    with pytest.raises(RecordError, match=says) as caught:
        RecordReader(folder).take(NAME, told)
    assert caught.value.reason == "record_file"
    assert not os.path.lexists(folder / name_of(NAME))


@pytest.mark.parametrize(
    "told",
    [
        "",
        "x",
        7,
        {},
        "[]",
        '{"parts": 3}',
        '{"parts": [{"name": "a", "dtype": "object", "shape": [1]}]}',
        '{"parts": [{"name": "a", "dtype": "uint8", "shape": [-1]}]}',
        '{"parts": [{"name": "a", "dtype": "uint8", "shape": [1180591620717411303424]}]}',
        '{"digest": "", "parts": []}',
    ],
)
def test_a_reference_that_is_none_is_refused(folder: Path, told: object) -> None:
    WRITER(folder).write(NAME, arrays())
    with pytest.raises(RecordError, match="record_file"):
        RecordReader(folder).take(NAME, told)
    assert os.listdir(folder) == []


def test_a_record_without_rows(folder: Path) -> None:
    wrote = {"routes": np.zeros((0, 3, 8), np.int32), "mask_lengths": np.ones(1, np.int32)}
    read = RecordReader(folder).take(NAME, WRITER(folder).write(NAME, wrote))
    assert {name: array.shape for name, array in read.items()} == {
        "routes": (0, 3, 8),
        "mask_lengths": (1,),
    }


def test_a_small_record_needs_no_file(folder: Path) -> None:
    writer, reader, wrote = RecordWriter(folder), RecordReader(folder), arrays()
    told = writer.write(NAME, wrote)
    assert os.listdir(folder) == []
    for name, array in reader.take(NAME, told).items():
        np.testing.assert_array_equal(array, wrote[name])
    wrong = told.replace('"inline":"', '"inline":"AAAA')
    for other in (wrong, told.replace('"digest":"', '"digest":"0')):
        with pytest.raises(RecordError, match="are not those that were written"):
            reader.take(NAME, other)
    writer.write(NAME, {"routes": np.zeros(4097, np.int32)})
    assert os.listdir(folder) == [name_of(NAME)], "control: another byte is too much"


def test_a_reply_without_a_reference_has_no_records(folder: Path) -> None:
    assert RecordReader(folder).take(NAME, None) == {}


def test_unread_files_have_a_limit(folder: Path) -> None:
    writer, reader = WRITER(folder, limit_bytes=250), RecordReader(folder)
    hundred = {"a": np.arange(100)}
    told = {name: writer.write(name, hundred) for name in ("a", "b", "c")}
    assert len(os.listdir(folder)) == 2
    with pytest.raises(RecordError, match="the host has not read 200 of 250 bytes allowed"):
        reader.take("c", told["c"])
    assert reader.take("a", told["a"])["a"].tolist() == list(range(100))
    assert reader.take("d", writer.write("d", hundred))["a"].tolist() == list(range(100))


def test_a_full_disk_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        told = WRITER(folder).write(NAME, arrays())
    assert os.listdir(folder) == []
    with pytest.raises(RecordError, match="No space left on device"):
        RecordReader(folder).take(NAME, told)


def test_what_nothing_waits_for_is_removed(folder: Path) -> None:
    writer, reader = WRITER(folder), RecordReader(folder)
    reader.expect(["a", "b"])
    told = {name: writer.write(name, arrays()) for name in ("a", "b")}
    reader.leave(["a"])  # its call was cancelled
    writer.write("c", arrays())  # aborted before this host's server knew it
    assert reader.sweep() == 2
    assert os.listdir(folder) == [name_of("b")]
    assert reader.take("b", told["b"])
    folder.rmdir()
    assert reader.sweep() == 0, "the server was stopped"


# --- the scheduler's side -------------------------------------------------------------------------
@dataclass
class Chunk:
    lengths: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass
class Output:
    """The fields of SGLang's BatchTokenIDOutput that are read."""

    finished_reasons: list[dict[str, Any] | None]
    routed_experts: list[Any] | None = None
    indexer_topk: list[Any] | None = None
    output_token_sampling_mask: list[Any] | None = None
    output_top_logprobs_val: list[Any] | None = None
    output_top_logprobs_idx: list[Any] | None = None


@dataclass
class Req:
    rid: str
    output_ids: list[int] = field(default_factory=lambda: [7])
    return_logprob: bool = False
    logprob: Any = None
    send_output_token_logprobs_offset: int = 0


@dataclass
class Sender:
    """SGLang's SenderWrapper."""

    folder: Path
    socket: object = "a socket"
    sent: list[Any] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    files: list[set[str]] = field(default_factory=list)  # that were there

    def send_output(self, output: Any, recv_obj: object = None) -> None:
        self.files.append(set(os.listdir(self.folder)))
        self.threads.append(threading.current_thread().name)
        self.sent.append(output)


@dataclass
class Scheduler:
    folder: Path
    reader: RecordReader
    writer: RecordWriter
    sender: Sender
    reports: bool = True

    def stream(self, output: Any, *reqs: Req) -> None:
        """As SGLang does: made, then sent."""
        record_output.to_files(output, SimpleNamespace(output_reqs=list(reqs)), dp_rank=None)
        self.sender.send_output(output)

    def wait(self, number: int) -> None:
        end = time.monotonic() + patience(10)
        while len(self.sender.sent) < number:
            assert time.monotonic() < end, f"{len(self.sender.sent)} of {number} outputs were sent"
            time.sleep(0.002)


@pytest.fixture
def scheduler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    state = Scheduler(folder, RecordReader(folder), WRITER(folder), Sender(folder))
    replies = record_output.RecordedReplies(state.writer)
    monkeypatch.setattr(record_output, "_replies", lambda: replies)
    monkeypatch.setattr(record_output, "_reports", lambda: state.reports)
    record_output.send_recorded(None, SimpleNamespace(send_to_detokenizer=state.sender))
    return state


def chunk(*rows: list[int]) -> Chunk:
    lengths = np.array([len(row) for row in rows], np.int32)
    ids = np.array([one for row in rows for one in row], np.int32)
    return Chunk(lengths, ids, -ids[np.cumsum(lengths) - 1].astype(np.float32))


def test_masks_of_all_outputs_are_written_when_the_request_ends(scheduler: Any) -> None:
    """A streamed request sends its first token at once, and a short one beside it ends there."""
    long, short = Req("long"), Req("short")
    routes = torch.arange(12, dtype=torch.int32).reshape(2, 3, 2)
    first = Output(
        [None, {"type": "stop"}], [None, routes], None, [chunk([5, 6]), chunk([8], [9, 4])]
    )
    scheduler.stream(first, long, short)
    assert os.listdir(scheduler.folder) == [name_of("short")]
    read = scheduler.reader.take("short", first.finished_reasons[1][FIELD])
    np.testing.assert_array_equal(read["routes"], routes.numpy())
    assert read["mask_lengths"].tolist() == [1, 2]
    assert read["mask_ids"].tolist() == [8, 9, 4]
    assert first.routed_experts == [None, None], "nothing of it is sent"
    assert all(len(c.lengths) == 0 for c in first.output_token_sampling_mask)
    last = Output([{"type": "abort"}], [routes], None, [chunk([1, 2, 3], [4])])
    scheduler.stream(last, long)
    read = scheduler.reader.take("long", last.finished_reasons[0][FIELD])
    assert read["mask_lengths"].tolist() == [2, 3, 1]
    assert read["mask_ids"].tolist() == [5, 6, 1, 2, 3, 4]
    assert read["mask_logprobs"].tolist() == [-6.0, -3.0, -4.0]


def test_the_likeliest_entries_of_all_outputs_are_written_and_none_is_sent(scheduler: Any) -> None:
    """The request keeps all of them; one more than was sent is of a token that comes after."""
    values, ids = [[-0.5, -1.0], [-0.25, -2.0], [-9.0, -9.5]], [[3, 9], [8, 1], [0, 2]]
    own = SimpleNamespace(
        top_logprobs_num=2, output_top_logprobs_val=values, output_top_logprobs_idx=ids
    )
    req = Req("a", [3, 8], return_logprob=True, logprob=own)
    for sent, reason in ((1, None), (2, {"type": "length"})):
        req.send_output_token_logprobs_offset = sent
        pieces = {"output_top_logprobs_val": [values[:1]], "output_top_logprobs_idx": [ids[:1]]}
        output = Output([reason], **pieces)
        scheduler.stream(output, req)
        assert (output.output_top_logprobs_val, output.output_top_logprobs_idx) == ([[]], [[]])
    read = scheduler.reader.take("a", output.finished_reasons[0][FIELD])
    assert read["top_ids"].tolist() == ids[:2]
    assert read["top_logprobs"].tolist() == values[:2]


@pytest.mark.parametrize("how", ["silent rank", "no token"])
def test_no_file_is_written_without_a_reply_that_names_it(scheduler: Any, how: str) -> None:
    scheduler.reports = how != "silent rank"
    req = Req("a", [] if how == "no token" else [7])
    output = Output([{"type": "abort"}], [torch.zeros(2, 3, 2, dtype=torch.int32)], None, None)
    scheduler.stream(output, req)
    assert os.listdir(scheduler.folder) == []
    assert output.finished_reasons == [{"type": "abort"}]
    assert output.routed_experts == [None]


def test_a_server_of_somebody_else_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_output.tempfile, "gettempdir", lambda: str(tmp_path))
    record_output._replies.cache_clear()
    rows = torch.zeros(2, 3, 2, dtype=torch.int32)
    output = Output([{"type": "stop"}], [rows], None, None)
    record_output.to_files(output, SimpleNamespace(output_reqs=[Req("a")]))
    sender = Sender(tmp_path)
    record_output.send_recorded(None, SimpleNamespace(send_to_detokenizer=sender))
    record_output._replies.cache_clear()
    assert output.routed_experts is not None
    assert output.routed_experts[0] is rows
    assert "send_output" not in vars(sender)


# --- the thread that writes -----------------------------------------------------------------------
LONG = torch.full((record_output.LOOP_BYTES // 4 + 1, 1, 1), 7, dtype=torch.int32)


def ended(rows: torch.Tensor = LONG) -> Output:
    return Output([{"type": "stop"}], [rows], None, None)


@dataclass
class HeldWriter:
    """Writes when it is told to."""

    own: RecordWriter
    may: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)

    def write(self, request_id: str, arrays: Any) -> str:
        self.entered.set()
        in_loop = threading.current_thread() is threading.main_thread()
        assert self.may.wait(0 if in_loop else patience(10))
        return self.own.write(request_id, arrays)


@pytest.fixture
def held(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> HeldWriter:
    writer = HeldWriter(scheduler.writer)
    monkeypatch.setattr(record_output.os, "_exit", lambda _status: None)
    monkeypatch.setattr(record_output._replies(), "_writer", writer)
    return writer


def test_a_reply_is_sent_after_its_record_and_the_loop_goes_on(
    scheduler: Scheduler, held: HeldWriter
) -> None:
    """Later outputs wait behind it, without records and with short ones."""
    outputs = [ended(), Output([None], [None]), ended(LONG[:2]), ended()]
    for name, output in zip("abcd", outputs, strict=True):
        scheduler.stream(output, Req(name))
    assert held.entered.wait(patience(10))
    assert scheduler.sender.sent == [], "the loop went on, and no reply was sent"
    assert os.listdir(scheduler.folder) == []
    held.may.set()
    scheduler.wait(4)
    assert scheduler.sender.sent == outputs, "in their order"
    files = [name_of(one) for one in "acd"]
    assert scheduler.sender.files == [{*files[:n]} for n in (1, 1, 2, 3)], "each after its file"
    assert set(scheduler.sender.threads) == {"moerl records"}
    for name, output in (("a", outputs[0]), ("d", outputs[3])):
        assert output.finished_reasons[0] is not None
        read = scheduler.reader.take(name, output.finished_reasons[0][FIELD])
        np.testing.assert_array_equal(read["routes"], LONG.numpy())


def test_short_records_are_written_in_the_loop(scheduler: Scheduler) -> None:
    """A thread would cost more; after a long one has gone, too."""
    own = threading.current_thread().name
    scheduler.stream(ended(LONG[:-1]), Req("a"))
    assert scheduler.sender.threads == [own]
    scheduler.stream(ended(), Req("b"))
    scheduler.wait(2)
    replies = record_output._replies()
    assert replies is not None
    replies._queue.join()
    scheduler.stream(ended(LONG[:2]), Req("c"))
    assert scheduler.sender.threads == [own, "moerl records", own]


def test_a_thread_far_behind_holds_the_loop(
    scheduler: Scheduler, held: HeldWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = record_output._replies()
    assert replies is not None
    monkeypatch.setattr(replies._queue, "maxsize", 2)
    loop = threading.Thread(
        target=lambda: [scheduler.stream(ended(), Req(str(n))) for n in range(5)]
    )
    loop.start()
    assert held.entered.wait(patience(10))
    loop.join(0.2)
    assert loop.is_alive(), "one is written, two wait, the fourth finds no place"
    held.may.set()
    scheduler.wait(5)
    loop.join()


def test_a_thread_that_fails_ends_its_scheduler(
    scheduler: Scheduler, held: HeldWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server then ends, too; without it its requests would wait for ever."""
    status: list[int] = []
    over = threading.Event()
    monkeypatch.setattr(record_output.os, "_exit", lambda code: (status.append(code), over.set()))
    monkeypatch.setattr(scheduler.writer, "write", lambda *_: 1 / 0)
    held.may.set()
    scheduler.stream(ended(), Req("a"))
    assert over.wait(patience(10))
    assert (status, scheduler.sender.sent) == ([1], [])


def test_ranks_without_a_socket_send_as_before(scheduler: Scheduler) -> None:
    silent = Sender(scheduler.folder, socket=None)
    record_output.send_recorded(None, SimpleNamespace(send_to_detokenizer=silent))
    assert "send_output" not in vars(silent)
    assert "send_output" in vars(scheduler.sender)
