"""The command that runs this Python on another node, whatever `cluster.remote` is.

`srun` and `kubectl exec` pass words on as they are.  ssh joins them with spaces and a shell on the
other machine reads the line, so there the words are quoted; questions are off, because a password
would be asked for on the terminal.  Facts that are sent are one word of letters and digits, which
every kind of remote command passes on unchanged.
"""

from __future__ import annotations

import base64
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moerl.config import Config
from moerl.config.clusters import Node, is_local
from moerl.core.errors import ConfigError

_SHELLS = ("ssh", "gsissh")  # programs that hand a line to a shell
_NO_QUESTIONS = ("-o", "BatchMode=yes")


def on_node(config: Config, node: Node, arguments: Sequence[str]) -> list[str]:
    """Command that runs this Python with arguments on a node."""
    command = [sys.executable, *arguments]
    if is_local(config.cluster) or not config.cluster.remote:
        return command
    host = node.address or node.name
    if host.startswith("-"):
        raise ConfigError("cluster.nodes.*.hosts", host, "an option is no address")
    program, *words = shlex.split(config.cluster.remote)
    words = [word.replace("{host}", host) for word in words]
    if Path(program).name in _SHELLS:
        return [program, *_NO_QUESTIONS, *words, shlex.join(command)]
    return [program, *words, *command]


def packed(value: Mapping[str, Any]) -> str:
    """One word of letters, digits, - and _."""
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")
