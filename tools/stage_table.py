"""Which stage of the test suite a test belongs to, and which area its seconds count for.

A stage is a part of the suite that ends within 40 minutes on two free cores.  Every test belongs to
exactly one stage (tests/unit/test_stages.py collects all tests and counts).  Two facts place a
test: its file, and its kind, which follows from its marks (`kind_of`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal

Kind = Literal[
    "none", "default", "full", "gpu", "gpu_profile", "mooncake", "smollm2", "clients", "reference"
]

_PLAIN = "not gpu and not gpu_profile and not mooncake and not smollm2 and not clients"
# Which tests a kind has, as pytest's -m takes it; kind_of says the same of one test.
EXPRESSIONS: Mapping[Kind, str] = {
    "default": f"not full and {_PLAIN}",
    "full": f"full and {_PLAIN}",
    "mooncake": "mooncake and not gpu and not gpu_profile and not smollm2",
    "smollm2": "smollm2 and not gpu and not gpu_profile",
    "clients": "clients and not gpu and not gpu_profile and not mooncake and not smollm2",
    "gpu_profile": "gpu_profile and not gpu",
    "gpu": "gpu",
    "reference": "",  # all of one folder, which only the stage's own environment collects
}


@dataclass(frozen=True, slots=True)
class Stage:
    """Tests of one kind below some paths; the kind `none` has commands in place of tests."""

    name: str
    estimate_s: int  # on two free cores
    kind: Kind
    paths: tuple[str, ...] = ()
    workers: int = 1  # pytest processes; a file stays in one of them, as its fixtures do
    environment: str = ""  # one of its own, made by tools/test_env.sh
    of_programs: bool = False  # the environment is of programs that the tests start, not of tests

    @property
    def optional(self) -> bool:
        """It may be unavailable on a machine, and the suite can be green without it."""
        return self.kind in ("gpu", "gpu_profile", "mooncake", "smollm2", "clients", "reference")


_LAYOUTS = (
    "tests/unit",
    "tests/property",
    "tests/multi/test_convert_torchrun.py",
    "tests/multi/test_gpu_lock.py",
    "tests/multi/test_gpu_meta.py",
    "tests/multi/test_hf_weights.py",
    "tests/multi/test_layout_families.py",
    "tests/multi/test_layout_families_gradients.py",
    "tests/multi/test_layout_sglang.py",
    "tests/multi/test_sglang_lora_pool.py",
    "tests/multi/test_model_torch_dist.py",
)
_TRAINER = (
    "tests/multi/test_checkpoint_writer.py",
    "tests/multi/test_critic.py",
    "tests/multi/test_gpu_checkpoint.py",
    "tests/multi/test_ref_model_ranks.py",
    "tests/multi/test_minibatch_training.py",
    "tests/multi/test_lora_parity.py",
    "tests/multi/test_lora_files.py",
    "tests/multi/test_lora_bf16.py",
    "tests/multi/test_lora_reference.py",
    "tests/multi/test_lora_routers.py",
    "tests/multi/test_lora_sync.py",
    "tests/multi/test_lora_te.py",
    "tests/multi/test_mismatch_dump.py",
    "tests/multi/test_processes.py",
    "tests/multi/test_replay_matrix.py",
    "tests/multi/test_resume_layouts.py",
    "tests/multi/test_second_model.py",
    "tests/multi/test_train_loop.py",
    "tests/multi/test_trainer_model.py",
    "tests/multi/test_trainer_parity.py",
    "tests/multi/test_trainer_probe.py",
    "tests/multi/test_trainer_score.py",
)
_SYNC = (
    "tests/multi/test_sync_session.py",
    "tests/multi/test_transports.py",
    "tests/e2e/test_delta.py",
    "tests/e2e/test_mixed_engines_run.py",
    "tests/e2e/test_model_plan.py",
    "tests/e2e/test_sync.py",
)
_ENGINE = (
    "tests/e2e/test_agent_streams.py",
    "tests/e2e/test_engine_e2e.py",
    "tests/e2e/test_fp32_head_engine.py",
    "tests/e2e/test_grammars.py",
    "tests/e2e/test_long_answers_engine.py",
    "tests/e2e/test_model_dp_attention.py",
    "tests/e2e/test_modes.py",
    "tests/e2e/test_replay_engine.py",
)
_MODELS = ("tests/e2e/test_model_dsa.py", "tests/e2e/test_model_families.py")
_RECIPES = (
    "tests/e2e/test_lora_adapter_engine.py",
    "tests/e2e/test_lora_run.py",
    "tests/e2e/test_model_start_run.py",
    "tests/e2e/test_recipes.py",
    "tests/e2e/test_sft.py",
)
_VARIANTS = (
    "tests/e2e/test_train.py",
    "tests/e2e/test_agent_environment_run.py",
    "tests/e2e/test_agent_long_episode.py",
    "tests/e2e/test_agent_mixture_run.py",
    "tests/e2e/test_agent_run.py",
    "tests/e2e/test_long_contexts.py",
    "tests/e2e/test_turns.py",
    "tests/e2e/test_variants.py",
)
_FAULTS = (
    "tests/e2e/test_agent_turn_log.py",
    "tests/e2e/test_async.py",
    "tests/e2e/test_chaos.py",
    "tests/e2e/test_failure.py",
    "tests/e2e/test_ref_models_run.py",
    "tests/e2e/test_membership_e2e.py",
    "tests/e2e/test_stragglers.py",
)
_HOSTS = (
    "tests/multi/test_engine_nodes.py",
    "tests/multi/test_gpu_environments.py",
    "tests/multi/test_hosts.py",
    "tests/multi/test_slurm.py",
    "tests/multi/test_wide_engines.py",
)
_SAFE = ("tests/security",)
_SEVERAL_PROCESSES = ("tests/multi", "tests/e2e", "tests/security")
# Stages with folders of tests read everything: some of their tests are about files of the project.
_PAGES = ("docs/*", "*.md", ".github/*")
# Files of tests that tests of other stages import.
_SHARED_TESTS = (
    "tests/unit/*",
    "tests/e2e/test_agent_run.py",
    "tests/e2e/test_async.py",
    "tests/e2e/test_chaos.py",
    "tests/e2e/test_main_job.py",
    "tests/e2e/test_recipes.py",
    "tests/e2e/test_variants.py",
    "tests/multi/test_hosts.py",
    "tests/security/test_damaged_records.py",
)

STAGES = (
    Stage("checks", 60, "none"),
    Stage("unit", 240, "default", ("tests/unit", "tests/property"), workers=2),
    # Half of a run's seconds are starts and waits of one process: a second run uses them.
    Stage("processes", 800, "default", _SEVERAL_PROCESSES, workers=2),
    Stage("layouts", 800, "full", _LAYOUTS),
    Stage("trainer", 1500, "full", _TRAINER),
    Stage("sync", 600, "full", _SYNC),
    Stage("engine", 1230, "full", _ENGINE),
    Stage("models", 1950, "full", _MODELS),
    Stage("recipes", 1000, "full", _RECIPES),
    Stage("variants", 1600, "full", _VARIANTS),
    Stage("faults", 1400, "full", _FAULTS),
    Stage("hosts", 1450, "full", _HOSTS),
    Stage("safe", 1800, "full", _SAFE),
    Stage("gpu", 300, "gpu", ("tests/gpu",)),
    Stage("gpu-profile", 400, "gpu_profile", ("tests/multi",)),
    Stage("references", 240, "reference", ("tests/references",), environment="reference"),
    Stage("mooncake", 600, "mooncake", _SEVERAL_PROCESSES, environment="mooncake"),
    Stage("smollm2", 2300, "smollm2", ("tests/e2e",), environment="smollm2"),
    Stage("clients", 600, "clients", ("tests/e2e",), environment="clients", of_programs=True),
)
DEFAULT = tuple(stage for stage in STAGES if stage.kind in ("none", "default"))


@dataclass(frozen=True, slots=True)
class Area:
    """Test files of one subject, and the seconds they may take in the default selection."""

    name: str
    allowance_s: int
    files: tuple[str, ...] = ()  # fnmatch patterns


CORE = "core"
AREAS = (
    Area(CORE, 870),  # every file that no other area names, and the stage `checks`
    Area("safe", 90, ("tests/security/*",)),
    Area("models", 120, ("tests/*/test_model_*.py",)),
    Area("gpu", 120, ("tests/*/test_gpu_*.py",)),
    Area("agents", 90, ("tests/*/test_agent*.py",)),
    Area("lora", 90, ("tests/*/test_lora*.py",)),
)


def kind_of(marks: Iterable[str]) -> Kind:
    """The kind of a test with these marks."""
    marks = set(marks)
    kinds: tuple[Kind, ...] = ("gpu", "gpu_profile", "smollm2", "mooncake", "clients", "full")
    return next((kind for kind in kinds if kind in marks), "default")


def stages_of(file: str, marks: Iterable[str]) -> list[str]:
    """Names of the stages that run a test of this file: one, when the table is right."""
    kind = "reference" if file.startswith("tests/references/") else kind_of(marks)
    return [
        stage.name
        for stage in STAGES
        if stage.kind == kind and any(_below(file, path) for path in stage.paths)
    ]


def reads(stage: Stage, file: str) -> bool:
    """Whether a change of this file can change what the stage says."""
    if not stage.paths or any(not path.endswith(".py") for path in stage.paths):
        return True
    if any(fnmatch(file, pattern) for pattern in _PAGES):
        return False
    is_test = fnmatch(file, "tests/*/test_*.py")
    shared = any(fnmatch(file, pattern) for pattern in _SHARED_TESTS)
    return not is_test or shared or any(_below(file, path) for path in stage.paths)


def area_of(file: str) -> str:
    for area in AREAS:
        if any(fnmatch(file, pattern) for pattern in area.files):
            return area.name
    return CORE


def _below(file: str, path: str) -> bool:
    return file == path or file.startswith(f"{path}/")
