"""One rank of the doctor's link check: an all-reduce, then 8 MiB to the next rank, over gloo.

    python -m moerl.doctor.link_check --rank 0 --world 3 --master 10.9.0.1:17103 --interface eth0

Prints {"reduce_ms", "gb_s"} as seen by this rank.  Uses no GPU: it checks whether the nodes reach
each other on the ports that gloo and NCCL would use, and how fast.  The first line of standard
input is a token that all ranks share; rank 0 serves their store behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import timedelta

_BYTES = 8 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, kind in (("rank", int), ("world", int), ("master", str), ("interface", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--wait-s", type=float, default=20.0, help="for the other nodes")
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = args.interface
    import torch
    import torch.distributed as dist

    from moerl.distributed.store_server import StoreServer
    from moerl.distributed.token_server import ServerAddress
    from moerl.distributed.token_store import TokenStore

    wait = timedelta(seconds=args.wait_s)
    host, _, port = args.master.rpartition(":")
    server = ServerAddress(host, int(port), sys.stdin.readline().strip())
    if not server.token:
        sys.exit("link_check: the first line of standard input must be the token of all ranks")
    if args.rank == 0:
        _server = StoreServer(host, port=server.port, token=server.token)  # until this rank ends
    store = TokenStore(server, wait)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=args.rank,
        world_size=args.world,
        timeout=wait,
    )
    numbers = torch.ones(1024)
    dist.all_reduce(numbers)  # connects all pairs
    assert numbers[0] == args.world, "the sum over the nodes is wrong"
    begin = time.perf_counter()
    dist.all_reduce(numbers)
    reduce_s = time.perf_counter() - begin
    data, room = torch.zeros(_BYTES, dtype=torch.uint8), torch.empty(_BYTES, dtype=torch.uint8)
    begin = time.perf_counter()
    pending = dist.isend(data, (args.rank + 1) % args.world)
    dist.recv(room, (args.rank - 1) % args.world)
    assert pending is not None, "gloo gives a handle"
    pending.wait()
    seconds = time.perf_counter() - begin
    dist.barrier()
    print(json.dumps({"reduce_ms": reduce_s * 1e3, "gb_s": _BYTES / seconds / 1e9}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
