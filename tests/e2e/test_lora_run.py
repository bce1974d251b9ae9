"""`moerl train` by low-rank adapters alone: what engines serve is W0 + s B A, bit for bit.

The sum is computed here once more, by numpy from the model folder and from the factors that the run
wrote for each version; digests of engines are those of the log.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from moerl.config.load import load_saved
from moerl.config.lora_settings import LoraConfig
from moerl.layout import ModelSpec, at, sglang_tiles
from moerl.trainer.checkpoints.torch_dist_files import TorchDistFiles
from moerl.trainer.hf_io.adapter_files import load_adapter
from moerl.trainer.hf_io.hf_folder import HfFolder
from moerl.weight_sync.buckets import WirePolicy, seeds, version_digest
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import PLAN_ID, TransferPlan
from tests.helpers.train_runs import Run, start, survivors

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1500)]

STEPS = 21  # of which 20 are published
GATE = 5e-5  # nats, fp32 engine against fp32 trainer
STAGES = [f"trainer.parallel.{sizes}" for sizes in ("pp=2", "dp=2", "ep=2", "tp=1")]
FORMS = {
    "shared, routers, head": [
        "lora.experts=shared",
        "lora.targets=['*_proj', '*.mlp.gate', lm_head]",
        "trainer.parallel.vocab_divisible_by=1",
    ],
    "bf16": ["trainer.dtype=bf16", "engine.dtype=bfloat16"],
}
EXACT = ["rollout.max_lag=0", "rollout.buffer_depth=0", "observe.engine_alone_s=0"]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows some of the task: random weights stay random below the adapters."""
    root = tmp_path_factory.mktemp("warm")
    run = start(root, "quickstart", "run.steps=16", "checkpoint.every=0", name="warm")
    assert run.finish() == 0, run.text()
    return run.dir.hf


@pytest.fixture(scope="module")
def trained(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = [f"model.path={warm}", f"run.steps={STEPS}", "checkpoint.keep_versions=true"]
    settings += ["checkpoint.every=10", "trainer.packing=true", *STAGES, *EXACT]
    run = start(tmp_path_factory.mktemp("lora"), "quickstart-lora", *settings, name="x")
    assert run.finish(900) == 0, run.text()
    return run


def merged(
    base: dict[str, Tensor], factors: dict[str, Tensor], lora: LoraConfig
) -> dict[str, Tensor]:
    """In fp32, one rank after the other, as docs/algorithms.md says; rounded once."""
    found = dict(base)
    for name, weight in base.items():
        own = name.removesuffix(".weight")
        layer = re.sub(r"\.experts\.\d+", ".experts", own)  # of factors that experts share
        a, b = (factors.get(f"{own}.lora_{x}", factors.get(f"{layer}.lora_{x}")) for x in "AB")
        if a is None or b is None:
            continue
        total = np.zeros(weight.shape, np.float32)
        for row, column in zip(a.float().numpy(), b.float().numpy().T, strict=True):
            total += np.outer(column, row)
        whole = total * np.float32(lora.scale) + weight.float().numpy()
        found[name] = torch.from_numpy(whole).to(weight.dtype)
    return found


def digest_of(weights: dict[str, Tensor], spec: ModelSpec, run: Run) -> str:
    """What an engine of one rank with these weights says that it serves."""
    config = load_saved(run.dir.config)
    policy = WirePolicy(config.engine.dtype, bucket_bytes=config.sync.bucket_bytes)
    parallel = config.trainer.parallel
    plan = TransferPlan(spec, parallel, EngineLayout(), PLAN_ID, policy).receiver(0)
    live = {}
    for name, local in sglang_tiles(spec, 1, 0).items():
        kind = local.dtype or config.engine.dtype
        live[name] = torch.zeros(local.shape, dtype=getattr(torch, kind))
        for tile in local.tiles:
            live[name][at(tile.box)] = weights[tile.hf][at(tile.hf_box)]
    total = 0
    for region in plan.regions:
        for piece, seed in zip(region.pieces, seeds(region), strict=True):
            data = live[piece.dst_name][at(piece.dst_box)].contiguous().view(-1).view(torch.uint8)
            total += xxhash.xxh3_64_intdigest(data.numpy().tobytes(), seed=seed)
    return version_digest([total])


def served(run: Run) -> dict[str, str]:
    """Digest by version, of the log."""
    log = (run.dir.logs / "trainer-0.log").read_text()
    return dict(re.findall(r"engine 0 serves (\S+), digest (\w+)", log))


def lora_of(run: Run) -> LoraConfig:
    return load_saved(run.dir.config).lora


def base_of(run: Run) -> HfFolder:
    return HfFolder(load_saved(run.dir.config).model.path)


def test_every_publish_is_the_merged_model_and_sends_factors_alone(trained: Run) -> None:
    lora, source = lora_of(trained), base_of(trained)
    base = {name: source.read(name) for name in source.names}
    digests = served(trained)
    assert len(digests) == len(set(digests.values())) == STEPS - 1, "each publish changed weights"
    num_bytes = 0
    for version, found in digests.items():
        folder = trained.dir.adapter.with_name(version)
        factors = load_adapter(folder, source.spec, lora)
        want = merged(base, factors, lora)
        assert found == digest_of(want, source.spec, trained), version
        saved = load_file(trained.dir.versions / version / "model.safetensors")
        assert all(torch.equal(saved[name], want[name]) for name in saved)
        num_bytes = sum(factor.nbytes for factor in factors.values())
    control = base | {"model.norm.weight": base["model.norm.weight"] * 1.0001}
    assert digest_of(control, source.spec, trained) != digest_of(base, source.spec, trained)
    sent = [row["async/sync_bytes"] for row in trained.rows() if row.get("async/sync_bytes")]
    assert set(sent) == {float(num_bytes)}
    full = sum(tensor.nbytes for tensor in base.values())
    print(f"a publish sends {num_bytes:,} bytes, weights would be {full:,}")


def test_the_engine_serves_what_is_trained(trained: Run) -> None:
    rows = trained.rows()
    assert [row["step"] for row in rows] == list(range(STEPS))
    worst = max(row["mismatch/abs_dlogp_max/lag_0"] for row in rows)
    print(f"largest |d log p| at lag 0: {worst:.1e}")
    assert worst <= GATE
    assert all(row["routing/replay_cover_frac"] == row["keep/cover_frac"] == 1.0 for row in rows)
    assert all(row["lora/changed_frac"] > 0.5 for row in rows if row["loss/grad_norm"] > 0)
    assert not [key for row in rows for key in row if key.startswith("refused/")]


def test_it_learns_by_adapters_alone(trained: Run) -> None:
    rewards = [row["reward/mean"] for row in trained.rows()]
    print("reward:", " ".join(f"{reward:.3f}" for reward in rewards))
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.05


def test_a_checkpoint_holds_adapters_alone(trained: Run) -> None:
    (*_, (_, newest)) = trained.dir.finished_checkpoints()
    names = TorchDistFiles(newest).names
    weights = {name for name in names if not name.startswith(("optimizer", "random", "moerl"))}
    assert weights
    assert all(name.startswith("lora.model.layers.") for name in weights), weights


@pytest.mark.parametrize("form", FORMS)
def test_engines_serve_other_forms_of_adapters_as_they_are_trained(
    tmp_path: Path, form: str
) -> None:
    settings = ["run.steps=4", "checkpoint.keep_versions=true", "rollout.groups_per_step=8"]
    sizes = [f"trainer.parallel.{size}" for size in ("tp=2", "etp=1", "ep=2", "dp=1")]
    run = start(tmp_path, "quickstart-lora", *settings, *sizes, *FORMS[form], *EXACT, name="x")
    assert run.finish(480) == 0, run.text()
    lora, source = lora_of(run), base_of(run)
    dtype = getattr(torch, load_saved(run.dir.config).engine.dtype)
    base = {name: source.read(name).to(dtype) for name in source.names}
    digests = served(run)
    assert len(digests) == len(set(digests.values())) == 3
    for version, found in digests.items():
        factors = load_adapter(run.dir.adapter.with_name(version), source.spec, lora)
        assert found == digest_of(merged(base, factors, lora), source.spec, run), version
    rows = run.rows()
    worst = max(row["mismatch/abs_dlogp_max/lag_0"] for row in rows)
    changed = [row["lora/changed_frac"] for row in rows]
    print(f"{form}: |d log p| at lag 0 {worst:.1e}, changed {changed}")
    assert dtype != torch.float32 or worst <= GATE


def test_a_killed_run_and_a_killed_engine_continue_with_whole_adapters(
    warm: Path, tmp_path: Path
) -> None:
    """Engines start with W0; the run continues in another layout, from factors alone."""
    settings = [f"model.path={warm}", "run.steps=12", "checkpoint.every=2", *EXACT]
    settings += ["supervision.backoff_s=0.1", "rollout.groups_per_step=8"]
    run = start(tmp_path, "quickstart-lora", *settings, name="x")
    run.wait_for(lambda: len(run.dir.finished_checkpoints()) > 0)
    members = run.members()
    for member in members:
        os.kill(member.pid, signal.SIGKILL)
    assert survivors(members, 20.0) == []
    other = [f"trainer.parallel.{sizes}" for sizes in ("tp=2", "etp=1", "ep=2", "dp=1")]
    again = start(tmp_path, "--resume", str(run.dir.root), *other)
    begun = len(again.rows())
    again.wait_for(lambda: len(again.rows()) > begun + 2)
    os.kill(again.pids()["engine-0"], signal.SIGKILL)
    assert again.finish(900) == 0, again.text()
    rows = again.rows()
    assert [row["step"] for row in rows] == list(range(12))
    assert max(row.get("mismatch/abs_dlogp_max/lag_0", 0.0) for row in rows) <= GATE
    source, lora = base_of(again), lora_of(again)
    base = {name: source.read(name) for name in source.names}
    want = merged(base, load_adapter(again.dir.adapter, source.spec, lora), lora)
    saved = load_file(again.dir.hf / "model.safetensors")
    assert all(torch.equal(saved[name], want[name]) for name in saved)


# --- other forms of a publish, and the start of another run ---------------------------------------
SMALL = ["run.steps=3", "rollout.groups_per_step=8", "checkpoint.every=2", *EXACT]
BF16 = ["engine.dtype=bfloat16", "trainer.dtype=bf16"]


def _proves(run: Run, base: dict[str, Tensor], dtype: torch.dtype) -> dict[str, dict[str, Tensor]]:
    """Every version that the engine served is the sum of its kept factors; returns the sums."""
    spec, lora, found = base_of(run).spec, lora_of(run), dict[str, dict[str, Tensor]]()
    rounded = {name: weight.to(dtype) for name, weight in base.items()}
    for version, digest in served(run).items():
        factors = load_adapter(run.dir.adapter.with_name(version), spec, lora)
        found[version] = merged(rounded, factors, lora)
        assert digest == digest_of(found[version], spec, run), version
    assert found
    return found


def test_whole_weights_are_sent_and_another_run_starts_from_the_adapters(tmp_path: Path) -> None:
    """The second run serves the first one's adapters before its first step, as version 1.0."""
    keep = ["checkpoint.keep_versions=true", *SMALL]
    first = start(tmp_path, "quickstart-lora", *keep, "lora.send=weights", name="first")
    assert first.finish(400) == 0, first.text()
    source = base_of(first)
    base = {name: source.read(name) for name in source.names}
    _proves(first, base, torch.float32)
    sent = {row["async/sync_bytes"] for row in first.rows() if row.get("async/sync_bytes")}
    assert sent == {float(sum(tensor.nbytes for tensor in base.values()))}
    begin = [f"model.path={source.path}", f"lora.start={first.dir.adapter}"]
    second = start(tmp_path, "quickstart-lora", *keep, *begin, name="second")
    assert second.finish(400) == 0, second.text()
    sums = _proves(second, base, torch.float32)
    last = load_file(first.dir.hf / "model.safetensors")
    assert all(torch.equal(sums["1.0"][name], last[name]) for name in last)
    rows = second.rows()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert max(row["mismatch/abs_dlogp_max/lag_0"] for row in rows) <= GATE


SLOTS = ["lora.delivery=adapter", "lora.targets=['*.q_proj', '*.k_proj', '*.v_proj', '*.o_proj']"]


def test_a_run_over_adapter_slots_learns_and_continues(warm: Path, tmp_path: Path) -> None:
    """Rollouts lag, an engine is killed, and the run goes on with merged weights."""
    settings = [f"model.path={warm}", "run.steps=12", "checkpoint.every=4", *SLOTS]
    settings += ["checkpoint.keep_versions=true", "algorithm.kl=k3", "algorithm.kl_coef=0.001"]
    settings += ["supervision.backoff_s=0.1", "rollout.groups_per_step=8"]
    settings += [f"trainer.parallel.{sizes}" for sizes in ("tp=2", "etp=1", "ep=2", "dp=1")]
    run = start(tmp_path, "quickstart-lora", *settings, name="x")
    run.wait_for(lambda: len(run.rows()) > 5)
    os.kill(run.pids()["engine-0"], signal.SIGKILL)
    assert run.finish(900) == 0, run.text()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(12))
    print("lag 0:", max(row.get("mismatch/abs_dlogp_max/lag_0", 0.0) for row in rows))
    assert max(row.get("mismatch/abs_dlogp_max/lag_0", 0.0) for row in rows) <= GATE
    assert any("mismatch/abs_dlogp_max/lag_0" in row for row in rows)
    changed = [row["lora/changed_frac"] for row in rows if row["loss/grad_norm"] > 0]
    assert 0 < changed[0] < 0.5, "A has no gradient while B is 0"
    assert min(changed[1:]) > 0.9
    assert not [key for row in rows for key in row if key.startswith("refused/")]
    first, last = rows[0]["loss/kl_ref_k3"], rows[-1]["loss/kl_ref_k3"]
    print(f"KL to the base: {first:.1e}, {last:.1e}")
    assert first <= 1e-9 < last
    digests = served(run)
    assert len(digests) == len(set(digests.values())) > 8, "each update changed the adapter"
    lora, source = lora_of(run), base_of(run)
    base = {name: source.read(name) for name in source.names}
    for version in digests:
        factors = load_adapter(run.dir.adapter.with_name(version), source.spec, lora)
        saved = load_file(run.dir.versions / version / "model.safetensors")
        want = merged(base, factors, lora)
        assert all(torch.equal(saved[name], want[name]) for name in saved), version
    again = start(tmp_path, "--resume", str(run.dir.root), "run.steps=14", "lora.delivery=merged")
    assert again.finish(400) == 0, again.text()
    more = again.rows()[12:]
    assert [row["step"] for row in more] == [12, 13]
    assert max(row.get("mismatch/abs_dlogp_max/lag_0", 0.0) for row in more) <= GATE


def test_bf16_engines_serve_what_the_trainer_has(tmp_path: Path) -> None:
    settings = ["checkpoint.keep_versions=true", *SMALL, *BF16]
    run = start(tmp_path, "quickstart-lora", *settings, name="x")
    assert run.finish(400) == 0, run.text()
    source = base_of(run)
    base = {name: source.read(name) for name in source.names}
    sums = _proves(run, base, torch.bfloat16)
    saved = load_file(run.dir.versions / "0.2" / "model.safetensors")
    assert all(torch.equal(saved[name], sums["0.2"][name]) for name in saved)
    rows = run.rows()
    print("k3 at lag 0:", [f"{row['mismatch/k3/lag_0']:.1e}" for row in rows])
    print("changed:", [f"{row['lora/changed_frac']:.3f}" for row in rows])
    assert max(row["mismatch/k3/lag_0"] for row in rows) < 1e-2
