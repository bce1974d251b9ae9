"""Follow a run's stream with msgpack, zstandard and xxhash alone: one JSON line per trained step.

    python examples/read_stream.py runs/NAME [--follow]

docs/formats.md describes the files.  The run may be running: --follow waits for further steps.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import xxhash
import zstandard


def lines(log: Path, follow: bool) -> Iterator[dict[str, Any]]:
    """The log's objects in order; raises ValueError where the chain breaks."""
    previous, at = "", 0
    while True:
        data = log.read_bytes()[at:]
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            found = json.loads(line)
            if found["previous"] != previous:
                raise ValueError(f"the chain breaks at byte {at}")
            previous, at = hashlib.sha256(line).hexdigest(), at + len(line)
            yield found
        if not follow:
            return
        time.sleep(1)


def parts(path: Path) -> dict[str, Any]:
    """The decoded parts of a step file: the plan, and [group, blobs by URI] of each group."""
    data = path.read_bytes()
    digest, size = data[:16].decode(), int.from_bytes(data[16:24], "little")
    index, at, found = data[24 : 24 + size], 24 + size, {}
    if xxhash.xxh3_64_hexdigest(index) != digest:
        raise ValueError(f"the index of {path} is damaged")
    for name, length, _ in msgpack.unpackb(index):
        frame = zstandard.ZstdDecompressor().decompress(data[at : at + length])
        found[name], at = msgpack.unpackb(frame, strict_map_key=False), at + length
    return found


def array(value: tuple[str, list[int], bytes]) -> list[int]:
    """A one-dimensional int32 array, which is stored as [dtype, shape, bytes]."""
    _, _, data = value
    return [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]


def main() -> None:
    root = Path(sys.argv[1]) / "stream"
    for line in lines(root / "log.jsonl", "--follow" in sys.argv):
        if line["kind"] == "step":
            groups = {}
            for name, value in parts(root / "steps" / line["file"]).items():
                if name != "plan":
                    episodes = value[0]["episodes"]
                    rows = [turn["rollout"] for one in episodes for turn in one["turns"]]
                    groups[name.removeprefix("group ")] = {
                        "rewards": [one["score"]["reward"] for one in episodes],
                        "tokens": [array(row["token_ids"]) for row in rows],
                    }
            print(json.dumps({"step": line["step"], "groups": groups}), flush=True)


main()
