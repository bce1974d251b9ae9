"""Stands for srun, scontrol and sbatch on hosts made of network namespaces; one file, three names.

STUB_SLURM is a folder: `hosts.json` maps node names to commands that enter the host, `calls.log`
gets a line per call.  srun runs its command on the named node in a child and passes SIGTERM on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["STUB_SLURM"])


def main() -> int:
    name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    with (STATE / "calls.log").open("a") as log:
        log.write(json.dumps([name, *arguments]) + "\n")
    if name == "srun":
        return srun(arguments)
    if name == "scontrol" and arguments[:2] == ["show", "hostnames"]:
        print("\n".join(arguments[2].split(",")))
    return 0


def srun(arguments: list[str]) -> int:
    options = [item for item in arguments if item.startswith("--")]
    command = arguments[next(i for i, a in enumerate(arguments) if not a.startswith("--")) :]
    options = options[: arguments.index(command[0])]
    values = dict(option.partition("=")[::2] for option in options)
    enter = json.loads((STATE / "hosts.json").read_text())[values["--nodelist"]]
    with Path(values["--output"]).open("a") as log:
        child = subprocess.Popen([*enter, *command], stdout=log, stderr=subprocess.STDOUT)
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
