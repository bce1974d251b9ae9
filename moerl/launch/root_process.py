"""Root process of a run: `python -m moerl.launch.root_process REQUEST`, started by `moerl train`.

REQUEST is a JSON object.  `moerl.runtime.process_tree` says why there are two processes.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moerl.config.clusters import is_local
from moerl.config.load import load_config, load_saved
from moerl.config.schema import Config
from moerl.core.errors import ConfigError, MoerlError, printable
from moerl.runtime.process_tree import become_subreaper, die_with_parent


def main() -> int:
    request = json.loads(sys.argv[1])
    die_with_parent()
    become_subreaper()
    try:
        return _run(request)
    except MoerlError as error:
        print(f"moerl: {printable(error)}", file=sys.stderr)
        return 1


def _run(request: dict[str, Any]) -> int:
    resume, scratch = bool(request["resume"]), Path(request["scratch"])
    if resume:
        config = load_saved(Path(request["resume"]) / "config.yaml", request["overrides"])
    else:
        config = load_config(request["recipe"], request["overrides"])
    set_ray_environment(config)
    from moerl.launch.train import train

    reset = resume and request["reset_optimizer"]
    return train(config, resume=resume, reset_optimizer=reset, scratch=scratch)


def set_ray_environment(config: Config) -> None:
    """What Ray reads on import: this run's own cluster, with authentication."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # the report is written after Ray has ended; the client would end this process earlier
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        "RAY_AUTH_MODE": "token",
        "RAY_worker_niceness": "0",  # default 15, inherited by servers: engines would be slow
    }
    os.environ["RAY_AUTH_TOKEN"] = ray_token(config, os.environ)
    if is_local(config.cluster):
        # its setting for macOS and Windows: all of Ray listens on loopback, not on all interfaces
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def ray_token(config: Config, environment: Mapping[str, str]) -> str:
    """A token of this start, or of the running Ray cluster that the run joins."""
    if not config.cluster.ray:
        return secrets.token_hex(32)
    if not environment.get("RAY_AUTH_TOKEN"):
        raise ConfigError(
            "cluster.ray", config.cluster.ray, "the environment needs RAY_AUTH_TOKEN, its token"
        )
    return environment["RAY_AUTH_TOKEN"]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all children have ended; Ray's exit hooks would wait for them
