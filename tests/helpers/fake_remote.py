"""Stands for `ssh HOST WORDS...` and does what ssh does: a shell reads the words, joined by spaces.

    python fake_remote.py [-o OPTION]... HOST WORDS...

FAULTS is a JSON file {host: {fault: value}}; `remote_site` makes them in what the shell starts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

SITE = Path(__file__).with_name("remote_site")


def main() -> None:
    words = sys.argv[1:]
    options = []
    while words[0] == "-o":
        options.append(words[1])
        words = words[2:]
    if "BatchMode=yes" not in options:
        raise SystemExit("ssh: would ask for a password on the terminal")
    host, *command = words
    faults = json.loads(Path(os.environ["FAULTS"]).read_text(encoding="utf-8")).get(host, {})
    if faults.get("unreachable"):
        raise SystemExit("ssh: connect to host: No route to host")
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "FAKE_HOST": host}
    os.execvp("sh", ["sh", "-c", " ".join(command)])


if __name__ == "__main__":
    main()
