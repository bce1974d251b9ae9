"""Names that the host of an engine and the plug-in inside SGLang exchange.

`moerl.engine.host` runs in our process, `moerl.engine.plugin` in the processes of SGLang; neither
imports the other.  This file imports neither torch nor SGLang.
"""

from __future__ import annotations

from pathlib import Path

from moerl.core.json_files import read_json

# --- modes of a commit: how running requests meet new weights -------------------------------------
IN_PLACE, RETRACT, RETRACT_AUDIT = "in_place", "retract", "retract_audit"
MODES = ("", IN_PLACE, RETRACT, RETRACT_AUDIT)  # "" = no request is running
ADAPTER = "adapter"  # the base stays, requests end under the adapter that they began with

# --- memory that an engine gives back and takes again, by SGLang's tags ---------------------------
SLEEP, WAKE = "sleep", "wake"
MEMORY_PARTS = ("kv_cache", "weights")

# --- custom parameters of a request ---------------------------------------------------------------
SAMPLED = "moerl_sampled"  # number of tokens at the end of its prompt that its grammar has allowed

# --- environment variables of a server ------------------------------------------------------------
MODEL_FOLDER = "MOERL_ENGINE_MODEL"  # the folder of its model
DP_ATTENTION = "MOERL_DP_ATTENTION"  # set with data-parallel attention


def model_type_of(folder: Path) -> str:
    """Read `model_type` of a model folder; empty where the folder has no config.json yet."""
    file = folder / "config.json"
    return str(read_json(file).get("model_type", "")) if file.is_file() else ""
