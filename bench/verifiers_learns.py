"""Does a policy learn in an environment of verifiers, unchanged, against a learning rate of 0?

    tools/test_env.sh clients                                        (once: build/clients)
    python bench/verifiers_learns.py --out runs/verifiers-bench      (stopped? the same line again)

A tiny model with random weights answers with one character; the task set
(`tests/helpers/clients/last_digit_taskset.py`) rewards the last digit of a number, and digits near
it in part.  verifiers 0.4 plays in a worker from an environment of its own, by
`examples/verifiers_agent.py`; its tasks, rewards, interception server and client are its own, and
its harness runs in the worker.  A tenth of the numbers is never trained and evaluated by episodes.

Required, over the seeds: held-out reward of the last tenth of the steps above that of the first,
and above that of the rate 0, by 5 standard errors (`learning_arms.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from figures import ROOT
from learning_arms import STILL, HeldOut, arguments, learns, run_arms, train

ARMS = {"verifiers": [], "rate 0": [STILL]}
HARNESS = {"agent": {"harness": {"id": "here_harness"}, "runtime": {"type": "subprocess"}}}
SETTINGS = [
    "digits-by-agent",
    "run.steps=50",
    "task.agent.workers=1",
    "task.max_turns=1",
    "task.limits.processes=512",
    "sampling.max_new_tokens=1",
    "rollout.groups_per_step=16",
    "rollout.group_size=8",
    "rollout.max_groups_in_flight=32",
    "trainer.parallel={dp: 1, ep: 1}",  # one core trains while the other generates
    # The answer is one token: without entropy in the loss all siblings soon say the same digit.
    "trainer.optimizer={lr: 1.0e-3, min_lr: 1.0e-3, warmup_steps: 5}",
    "algorithm.entropy_coef=0.01",
    "evaluation.every=5",
    "evaluation.prompts=100",
    "evaluation.temperature=1.0",
    "evaluation.top_p=0.95",
    "evaluation.top_k=64",
    "evaluation.hold_s=60",
    "checkpoint.every=0",
    "observe.engine_alone_s=0",
]


def worker(clients: Path, folder: Path) -> str:
    """The command, with variables of its own; clients: its environment, folder: an empty one."""
    variables = {
        "PATH": f"{clients / 'bin'}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT / "tests/helpers/clients"),
        "HOME": str(folder),
        # Every client of HTTP reads all certificates, most of an episode; no address is https.
        "SSL_CERT_DIR": str(folder),
    }
    given = [f"{name}={value}" for name, value in variables.items()]
    agent = [str(ROOT / "examples/verifiers_agent.py"), "last_digit_taskset", json.dumps(HARNESS)]
    return json.dumps(["env", "-u", "SSL_CERT_FILE", *given, str(clients / "bin/python"), *agent])


def play(clients: Path, settings: Sequence[str], out: Path, arm: str, seed: int) -> HeldOut:
    folder = out / "home"
    folder.mkdir(exist_ok=True)
    command = f"task.agent.command={worker(clients, folder)}"
    return train(out, arm, seed, [*SETTINGS, command, *ARMS[arm], *settings])


def main() -> None:
    parser = arguments(__doc__, "runs/verifiers-bench", list(ARMS))
    parser.add_argument("--clients", type=Path, default=ROOT / "build/clients")
    options = parser.parse_args()
    if not (options.clients / "bin/python").exists():
        parser.error(f"--clients: {options.clients} is missing; run tools/test_env.sh clients")
    once = partial(play, options.clients.absolute(), options.settings)
    sys.exit(0 if run_arms(options, list(ARMS), once, partial(learns, "verifiers")) else 1)


if __name__ == "__main__":
    main()
