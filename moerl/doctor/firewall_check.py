"""Whether ports that only their own node needs are closed to other nodes.

    python -m moerl.doctor.firewall_check listen
    python -m moerl.doctor.firewall_check connect HOST PORT

`listen` opens a port of the range that engines take their ports from, on every interface as
SGLang's store does, and prints its number; `connect` prints `open` or `closed`.
"""

from __future__ import annotations

import random
import socket
import sys

from moerl.doctor import pair_check

FIRST, LAST = 20000, 31999  # `moerl.engine.host.sglang_server.free_port`
_CONNECT_S = 3.0


def listen() -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", _free_port()))
        listener.listen()
        pair_check.hold(str(listener.getsockname()[1]))


def attempt(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError:
        return "closed"
    return "open"


def _free_port() -> int:
    ports = list(range(FIRST, LAST + 1))
    random.SystemRandom().shuffle(ports)
    for port in ports:
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {FIRST} and {LAST}")


def main() -> None:
    if sys.argv[1] == "listen":
        listen()
    else:
        print(attempt(sys.argv[2], int(sys.argv[3])))


if __name__ == "__main__":
    main()
