"""Print docs/replay-support.md: deployment features, then model families.

The figures of families are those of `tests/e2e/test_model_families.py -m full`, which writes them
into tests/data/model_families.json with MOERL_WRITE_FAMILIES=1.  A test keeps page and file equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moerl.config.schema import TinyModel
from moerl.engine import feature_table
from moerl_cpu_sglang.registry import hooks_of
from tests.helpers.tiny_families import FAMILY_FIELDS, family_config

RESULTS = Path(__file__).resolve().parents[1] / "data/model_families.json"
_COLUMNS = (
    "family", "engine serves", "modules of SGLang stood in for, without CUDA", "routes exact",
    "mask exact", "fp32 max", "control", "bf16 k3, both", "bf16 k3, none", "publishes", "trained",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FamilyResult:
    """One family as the full test saw it."""

    routes_exact: float  # share of rows: transformers chooses the record, the trainer runs it
    mask_exact: float  # share of tokens
    fp32_max: float  # nats, both replays; `moerl mismatch` and the synchronous run
    control: float  # nats, the next expert in place of each
    bf16_both: float  # k3
    bf16_none: float
    publishes: int  # whose digests agreed
    trained_steps: int  # half of them synchronous


def markdown(results: Mapping[str, FamilyResult]) -> str:
    """The section on families."""
    lines = [
        "",
        "# Model families and replay",
        "",
        "Made by `python -m tests.helpers.family_table` from `tests/data/model_families.json`,",
        "which `MOERL_WRITE_FAMILIES=1 pytest -m full tests/e2e/test_model_families.py` writes.",
        "Each family is a tiny random model on a CPU; engine and trainer are in fp32 where the",
        "table names no other dtype.",
        "",
        "- *routes exact*: transformers chooses the recorded experts, the trainer runs them;",
        "- *mask exact*: transformers keeps the recorded tokens;",
        "- *fp32 max*: largest abs(d) in nats with both replays, also after publishes;",
        "- *control*: the same with the next expert in place of each;",
        "- *bf16 k3*: a trainer in bf16 with both replays, and with none;",
        "- *publishes*: those whose digests agreed; *trained*: steps, half of them synchronous.",
        "",
        "The modules stood in for are described in [cpu_sglang](../tests/cpu_sglang/README.md).",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'---|' * len(_COLUMNS)}",
    ]
    return "\n".join([*lines, *(_line(name, results) for name in FAMILY_FIELDS)]) + "\n"


def _line(family: str, results: Mapping[str, FamilyResult]) -> str:
    model_type = family_config(family, TinyModel(), 128)["model_type"]
    names = dict.fromkeys(_short(hook.symbol) for hook in hooks_of(model_type))
    modules = ", ".join(f"`{name}`" for name in names) or "none"
    found = results.get(family)
    if found is None:
        return f"| {family} | not run | {modules} |{' |' * (len(_COLUMNS) - 3)}"
    cells = [
        family, "yes", modules, f"{100 * found.routes_exact:g} %", f"{100 * found.mask_exact:g} %",
        f"{found.fp32_max:.1e}", f"{found.control:.1e}", f"{found.bf16_both:.1e}",
        f"{found.bf16_none:.1e}", str(found.publishes), str(found.trained_steps),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _short(symbol: str) -> str:
    """Class and method, or the function."""
    *_, owner, name = symbol.split(".")
    return f"{owner}.{name}" if owner[0].isupper() else name


def load_results() -> dict[str, FamilyResult]:
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {family: FamilyResult(**values) for family, values in stored.items()}


def page() -> str:
    """The whole of docs/replay-support.md."""
    return feature_table.markdown() + markdown(load_results())


if __name__ == "__main__":
    print(page(), end="")
