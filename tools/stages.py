"""Stages of the test suite: which tests each has, what they depend on, and whether they are green.

`tools/test` makes the environment and calls this file.  A stage is one pytest command: a mark
expression and the files of some tests.  Its result is kept in build/test-stages/NAME.json with a
hash of the files that it depends on; a green result stays valid until one of them changes.  So
`--full` runs what is missing, and may be interrupted and started again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
BIN = ROOT / ".venv/bin"
PYTHON = str(BIN / "python")
KEPT = ROOT / "build/test-stages"
GPU_PROFILE = ROOT / "build/gpu-profile"  # 12 GB: too large to be made for one stage
PROMISED_S = 720  # the default selection, on two free cores
OPTIONAL = ("gpu", "gpu_profile", "mooncake", "smollm2", "clients")  # marks of optional stages
PLAIN = " and ".join(f"not {mark}" for mark in OPTIONAL)
DEFAULT_MARKS, FULL_MARKS = f"not full and {PLAIN}", f"full and {PLAIN}"
PROGRAMS = ("tools/test", "tools/quickstart", "tools/gpu-check", "tools/gpu-bundle")
SCRIPTS = (*PROGRAMS, "tools/*.sh", "tools/launch/*")
LINES = ("ruff check .", "ruff format --check .", "mypy", f"shellcheck {' '.join(SCRIPTS)}")

_WEIGHTS = (
    "configs moerl/__init__.py moerl/core moerl/runtime moerl/config moerl/data moerl/distributed"
    " moerl/records moerl/layout moerl/engine moerl/kernels moerl/weight_sync moerl/algorithms"
    " moerl/trainer moerl/audit moerl/observe moerl/planning moerl/launch moerl/sandbox"
    " moerl/scoring"
)
_TRAINER = f"{_WEIGHTS} moerl/controller moerl/episodes"


@dataclass(frozen=True, slots=True)
class Stage:
    """Tests with some marks in files below tests/, and the paths that their result depends on."""

    name: str
    minutes: int  # estimated, on two free cores
    files: str  # glob patterns below tests/, one word each
    reads: str = "moerl configs examples"  # glob patterns, beside its own files and _SHARED
    marks: str = FULL_MARKS
    workers: int = 2  # pytest processes
    environment: str = ""  # made by tools/test_env.sh
    of_programs: bool = False  # the environment has programs that tests start, not the tests' own

    @property
    def optional(self) -> bool:
        """A machine may be unable to run it."""
        return self.marks not in ("", DEFAULT_MARKS, FULL_MARKS)

    def paths(self) -> list[str]:
        """Its test files and folders, relative to the repository."""
        tests = ROOT / "tests"
        found = (path for word in self.files.split() for path in sorted(tests.glob(word)))
        return [str(path.relative_to(ROOT)) for path in found]


# What every stage depends on.
_SHARED = (
    "tests/conftest.py tests/*/conftest.py tests/helpers tests/data tests/double tests/cpu_sglang"
    " pyproject.toml requirements patches csrc tools"
)

# Three workers: a server that starts and a run that ends leave cores idle.
DEFAULT = Stage("default", 11, "e2e security multi unit property", ".", DEFAULT_MARKS, 3)
CHECKS = Stage("checks", 2, "", ".", marks="")
STAGES = (
    CHECKS,
    DEFAULT,
    Stage("units", 4, "unit property", "."),
    Stage(
        "layouts",
        14,
        "multi/test_layout_*.py multi/test_gpu_[!e]*.py multi/test_convert_torchrun.py"
        " multi/test_engine_kernels.py multi/test_head_logprob_tp.py multi/test_hf_weights.py"
        " multi/test_model_*.py"
        " multi/test_object_collectives.py multi/test_optimizer_shards.py"
        " multi/test_rank_server.py multi/test_transports.py",
        _WEIGHTS,
    ),
    Stage(
        "trainer",
        18,
        "multi/test_bad_steps.py multi/test_checkpoint_writer.py multi/test_critic.py"
        " multi/test_dither*.py multi/test_grouped_experts.py multi/test_lora_*.py"
        " multi/test_minibatch_training.py multi/test_mismatch_dump.py"
        " multi/test_processes.py multi/test_re[fps]*.py multi/test_second_model.py"
        " multi/test_sglang_lora_pool.py multi/test_shared_prompts.py"
        " multi/test_support_training.py multi/test_teacher_training.py multi/test_train*.py"
        " multi/test_turn_rows_training.py multi/test_value_models.py",
        _TRAINER,
    ),
    Stage(
        "engine",
        20,
        "e2e/test_agent_gateway.py e2e/test_agent_streams.py e2e/test_delta.py"
        " e2e/test_engine_e2e.py e2e/test_eval_command.py e2e/test_fp32_head_engine.py"
        " e2e/test_grammars.py"
        " e2e/test_long_answers_engine.py e2e/test_mixed_engines_run.py"
        " e2e/test_model_dp_attention.py e2e/test_model_plan.py e2e/test_modes.py"
        " e2e/test_replay_engine.py e2e/test_sleeping_engine.py e2e/test_sync.py"
        " multi/test_sync_session.py",
    ),
    Stage("models", 21, "e2e/test_model_dsa.py e2e/test_model_families.py"),
    Stage(
        "recipes",
        19,
        "e2e/test_architecture.py e2e/test_colocated_run.py e2e/test_data_files_run.py"
        " e2e/test_examples_run.py e2e/test_lora_*.py e2e/test_model_start_run.py"
        " e2e/test_nccl_settings.py e2e/test_recipes.py e2e/test_sft.py e2e/test_template_run.py"
        " e2e/test_train.py",
    ),
    Stage(
        "variants",
        19,
        "e2e/test_agent_*_run.py e2e/test_agent_long_episode.py e2e/test_agent_run.py"
        " e2e/test_gpu_loop.py e2e/test_long_contexts.py e2e/test_main_job.py"
        " e2e/test_scoring_run.py e2e/test_turns.py e2e/test_variants.py",
    ),
    Stage(
        "faults",
        21,
        "e2e/test_agent_turn_log.py e2e/test_async.py e2e/test_chaos.py"
        " e2e/test_copied_runs.py e2e/test_failure.py"
        " e2e/test_killed_processes.py e2e/test_membership_e2e.py e2e/test_ref_models_run.py"
        " e2e/test_rerun.py e2e/test_resume_run.py e2e/test_stragglers.py e2e/test_teachers_run.py"
        " e2e/test_value_head_run.py",
    ),
    Stage(
        "hosts",
        24,
        "multi/test_engine_nodes.py multi/test_gpu_environments.py multi/test_hosts.py"
        " multi/test_slurm.py multi/test_wide_engines.py",
        workers=1,  # its networks and batch systems have fixed names
    ),
    Stage("safe", 20, "security"),
    Stage("gpu", 5, "gpu", marks="gpu", workers=1),
    Stage("gpu-profile", 40, "multi", marks="gpu_profile and not gpu", workers=1),
    Stage("references", 4, "references", ".", "not gpu", 1, "reference"),
    Stage("mooncake", 10, "multi e2e security", ".", "mooncake and not gpu", 1, "mooncake"),
    Stage("smollm2", 39, "e2e", ".", "smollm2 and not gpu", 1, "smollm2"),
    Stage("clients", 10, "e2e", ".", "clients and not gpu", 1, "clients", of_programs=True),
)


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one stage on the files of one digest."""

    digest: str
    state: str  # passed, failed or unavailable
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    why: str = ""

    def acceptable(self, stage: Stage) -> bool:
        return self.state == "passed" or (stage.optional and self.state == "unavailable")


def digest(stage: Stage) -> str:
    """Hash of names and contents of the files that the result of a stage depends on."""
    words = [*stage.reads.split(), *_SHARED.split(), *stage.paths()]
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
    listed = subprocess.run([*git, *words], cwd=ROOT, check=True, capture_output=True).stdout
    total = hashlib.sha256(repr(stage).encode())
    for name in sorted(set(listed.split(b"\0")) - {b""}):
        path = ROOT / os.fsdecode(name)
        content = path.read_bytes() if path.is_file() else b"not a file"
        total.update(hashlib.sha256(name + b"\0" + content).digest())
    return total.hexdigest()


def kept(stage: Stage) -> Result | None:
    """The result of the files as they are now, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        result = Result(**json.loads((KEPT / f"{stage.name}.json").read_text()))
        return result if result.digest == digest(stage) else None
    return None


def unavailable(stage: Stage) -> str:
    """Why this machine cannot run the stage; empty when it can."""
    if stage.name == "gpu":
        see = "import sys, torch; sys.exit(not torch.cuda.is_available())"
        return "torch sees no CUDA device" if call([PYTHON, "-c", see]) else ""
    if stage.name == "gpu-profile":
        stamp = GPU_PROFILE / ".moerl-stamp"
        whole = stamp.is_file() and stamp.read_text().startswith("gpu ")
        return "" if whole else "tools/setup.sh --gpu build/gpu-profile makes what it needs: 12 GB"
    if not stage.environment:
        return ""
    command = ["tools/test_env.sh", stage.environment]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = made.stderr.strip().splitlines() or [f"exit status {made.returncode}"]
    return lines[-1] if made.returncode else ""


def call(command: Sequence[str], environment: dict[str, str] | None = None) -> int:
    """The exit status of a command that writes to the terminal of this process."""
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | (environment or {})) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:  # it reached the command too, whose fixtures end processes
            child.wait()
            raise


def run(stage: Stage) -> Result:
    """Run a stage and keep its result."""
    say(f"{stage.name}: begins at {time.strftime('%H:%M:%S')}")
    files, begin = digest(stage), time.monotonic()
    if why := unavailable(stage):
        result = Result(files, "unavailable", why=why)
    else:
        result = run_tests(stage, files) if stage.files else run_checks(files)
    if digest(stage) != files:
        result = replace(result, state="failed", why="files changed while it ran")
    result = replace(result, seconds=round(time.monotonic() - begin, 1))
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{stage.name}.json").write_text(json.dumps(asdict(result), indent=1))
    say(f"{stage.name}: {result.state}, {result.seconds:.0f} s {result.why}".rstrip())
    return result


def run_checks(files: str) -> Result:
    """Lint and types; the output of a command is printed when it fails."""
    for line in LINES:
        program, *words = line.split()
        command = [str(BIN / program), *words]
        if program == "shellcheck":
            command = [command[0], *(str(path) for word in words for path in ROOT.glob(word))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout + done.stderr, flush=True)
            return Result(files, "failed", why=f"{program} ended with {done.returncode}")
    return Result(files, "passed")


def run_tests(stage: Stage, files: str) -> Result:
    junit = KEPT / f"{stage.name}.xml"
    junit.unlink(missing_ok=True)
    own = stage.environment and not stage.of_programs
    python = str(ROOT / f"build/{stage.environment}/bin/python") if own else PYTHON
    libraries = {"LD_LIBRARY_PATH": f"{ROOT}/build/{stage.environment}/lib/system"} if own else {}
    command = [python, "-m", "pytest", "-m", stage.marks, f"--junitxml={junit}"]
    if stage.workers > 1:  # groups of tests/conftest.py, in the order of the paths
        command += ["-n", str(stage.workers), "--dist=loadfile", "--no-loadscope-reorder"]
    # Some hundred processes import moerl: what one has compiled is kept for the others.
    code = call([*command, *stage.paths()], libraries | {"PYTHONDONTWRITEBYTECODE": ""})
    if not junit.exists():
        return Result(files, "failed", why=f"pytest ended with {code} and no report")
    suite = ElementTree.parse(junit).getroot()[0]
    counts = {
        name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")
    }
    failed, skipped = counts["failures"] + counts["errors"], counts["skipped"]
    passed = counts["tests"] - failed - skipped
    why = "no test passed" if not passed else f"pytest ended with {code}" if code else ""
    return Result(files, "failed" if why else "passed", 0.0, passed, failed, skipped, why)


def say(line: str) -> None:
    print(f"[test] {line}", flush=True)


def table(results: Mapping[str, Result | None]) -> list[str]:
    lines = [f"{'stage':12}{'estimate':>10}  {'state':13} passed failed skipped     s"]
    for stage in STAGES:
        if stage.name in results:
            it = results[stage.name] or Result("", "-")
            counts = f"{it.passed:7}{it.failed:7}{it.skipped:8}{it.seconds:6.0f}"
            minutes = f"{stage.name:12}{stage.minutes:6} min"
            lines.append(f"{minutes}  {it.state:13}{counts}  {it.why}".rstrip())
    return lines


def run_default() -> int:
    """Checks and tests beside each other, always anew."""
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as beside:
        checks = beside.submit(run, CHECKS)
        results = {DEFAULT.name: run(DEFAULT), CHECKS.name: checks.result()}
    report(results)
    say(f"{time.monotonic() - begin:.0f} s in all, {PROMISED_S} s are promised on two free cores")
    return int(any(result.state != "passed" for result in results.values()))


def run_full() -> int:
    """Every stage without a green result on these files; then one table of all."""
    results = {stage.name: kept(stage) for stage in STAGES}
    missing = [stage for stage in STAGES if getattr(results[stage.name], "state", "") != "passed"]
    for number, stage in enumerate(missing, 1):
        left = sum(each.minutes for each in missing[number - 1 :])
        say(f"stage {number} of {len(missing)}, about {left} min to the end of the last")
        results[stage.name] = run(stage)
    report(results)
    red = [s.name for s in STAGES if not (r := results[s.name]) or not r.acceptable(s)]
    say(f"not green: {', '.join(red)}" if red else "green")
    return int(bool(red))


def report(results: Mapping[str, Result | None]) -> None:
    for line in table(results):
        say(line)


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--stage", choices=[stage.name for stage in STAGES])
    chosen, words = parser.parse_known_args()
    # A shell's background job ignores SIGINT, and so would all processes that a test starts.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if words:
        pytest = [PYTHON, "-m", "pytest", "-m", PLAIN if chosen.full else DEFAULT_MARKS]
        return 1 if run_checks("").state != "passed" else call([*pytest, *words])
    if chosen.list:
        print("\n".join(table({stage.name: kept(stage) for stage in STAGES})))
        return 0
    if chosen.stage:
        stage = next(each for each in STAGES if each.name == chosen.stage)
        result = run(stage)
        report({stage.name: result})
        return int(not result.acceptable(stage))
    return run_full() if chosen.full else run_default()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
