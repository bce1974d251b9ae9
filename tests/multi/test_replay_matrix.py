"""Both replays under every parallel layout: each case against one rank; controls that must fail.

For every layout, with packing on and off, recompute none and full, for a Qwen3-MoE and a
DeepSeek-V3 (first dense layer, latent attention, sigmoid with bias, groups, shared expert):
log-probability of each token within 1e-5, gradient of each parameter within 1e-5 in relative L2,
experts in the dispatchers' maps equal to the record bitwise, in forward and recompute, and every
count exact.  Four processes serve all cases (tests/helpers/replay_matrix_ranks.py); a covering
subset runs by default.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moerl.observe.console import alerts
from tests.helpers.rank_server import run_ranks

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(1000)
GATE = 1e-5
TIMEOUT_S = 900.0  # of all cases of `full` on a loaded machine
RECOMPUTE = {
    "none": {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
# The clip is open, so that no token of a tiny model is lost; the teacher is the reference.
PROXIMAL = {"ratio": "proximal", "clip_low": 0.9, "clip_high": 9.0, "kl": "k3", "kl_coef": 0.1}
LOSSES = {
    "moe_z_loss_coeff": 0.1,
    "moe_aux_loss_coeff": 0.1,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
SEVERAL = {
    "r2": {
        "does": "several_steps",
        "router_losses": LOSSES,
        "minibatches": 2,
        "routing": "R2",
        "algorithm": PROXIMAL | {"corrections": ["m2"], "m2_limit": 0.5},
    },
    "r3": {"does": "several_steps", "minibatches": 2, "routing": "R3", "algorithm": PROXIMAL},
    "critic": {
        "does": "with_critic",
        "algorithm": {"advantage": "gae", "gae_lambda": 0.9, "critic_lr": 0.05},
    },
}
Case = dict[str, Any]
Found = dict[str, Any]
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2-etp2": {"tp": 2, "etp": 2},
    "pp2": {"pp": 2},
    "pp2-vpp2": {"pp": 2, "vpp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "cp2": {"cp": 2},
    "ep4": {"dp": 4, "ep": 4},
    "ep2-dp2": {"dp": 4, "ep": 2},
    "tp2-ep2-etp2": {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
    "pp2-ep2": {"pp": 2, "dp": 2, "ep": 2},
    "cp2-ep2": {"cp": 2, "dp": 2, "ep": 2},
    "tp2-pp2-etp2": {"tp": 2, "pp": 2, "etp": 2},
    "cp2-tp2-etp2": {"cp": 2, "tp": 2, "etp": 2},
}


def case(
    layout: str,
    model: str,
    packing: bool,
    recompute: str,
    dispatcher: str = "alltoall",
    alter: str = "",
    several: str = "",
) -> Case:
    """several: a key of SEVERAL, for a batch in two optimizer steps or with a critic."""
    parts = [layout, model, "packed" if packing else "padded", recompute, dispatcher, alter]
    return SEVERAL.get(several, {}) | {
        "name": "-".join(filter(None, [*parts, several])),
        "several": several,
        "layout": layout,
        "model": model,
        "packing": packing,
        "megatron": RECOMPUTE[recompute],
        "recompute": recompute,
        "dispatcher": dispatcher,
        "alter": alter or None,
    }


CONTROLS = [
    case("pp2", "qwen", False, "full", "allgather", alter)
    for alter in ("shifted", "reversed", "corrupted", "wrong_microbatch")
]
SPARSE = [  # attention over recorded positions
    case("tp2-etp2", "sparse", True, "none"),
    case("pp2", "sparse", True, "full"),
    case("cp2", "sparse", False, "full"),
    case("cp2", "sparse", True, "none"),
    case("tp2-pp2-etp2", "sparse", False, "block"),
]
MOVED = case("pp2", "sparse", False, "none", alter="positions_moved")
COVER = [
    case("pp2", "deepseek", True, "full"),
    case("pp2", "qwen", False, "full", "allgather"),
    case("pp2-vpp2", "qwen", True, "block"),
    case("pp2-vpp2", "deepseek", False, "full"),
    case("cp2", "deepseek", True, "full"),
    case("cp2", "qwen", False, "none"),
    case("tp2-etp2", "deepseek", False, "moe"),
    case("tp2-etp2", "qwen", True, "none", "allgather"),
    case("cp2-ep2", "qwen", True, "full"),
    case("pp2-ep2", "deepseek", False, "full"),
    case("tp2-pp2-etp2", "qwen", True, "full"),
]
STEPS = [  # batches in two optimizer steps, by default
    case("pp2-vpp2", "qwen", True, "full", several="r2"),
    case("cp2", "deepseek", False, "none", several="r3"),
    case("tp2-etp2", "qwen", True, "full", several="r2"),
    case("pp2-ep2", "deepseek", True, "full", several="r3"),
]
VALUED = [  # with a critic, by default
    case("pp2", "qwen", False, "full", several="critic") | {"resume": True},
    case("tp2-etp2", "qwen", True, "none", several="critic"),
    case("cp2", "deepseek", True, "full", several="critic"),
    case("tp2-pp2-etp2", "deepseek", False, "none", several="critic") | {"resume": True},
    case("tp2-pp2-etp2", "qwen", True, "none", several="critic")
    | {"continues": "pp2-qwen-padded-full-alltoall-critic"},
]
WHOLE_VALUED = [
    case(layout, model, packing, "none", several="critic") | {"resume": model == "qwen"}
    for layout in LAYOUTS
    for model, packing in (("qwen", False), ("deepseek", True))
]
PROBED = [
    case(layout, "qwen", packing, "none") | {"does": "probed", "name": f"probe-{layout}"}
    for layout, packing in (
        ("pp2-vpp2", True),
        ("cp2", True),
        ("tp2-etp2", False),
        ("pp2-ep2", False),
    )
]
WHOLE_STEPS = [  # every layout with both, packed and padded, for one model or the other
    case(layout, model, packing, "full" if packing else "none", several=several)
    for layout in LAYOUTS
    for model, packing, several in (
        ("qwen", True, "r2"),
        ("qwen", False, "r3"),
        ("deepseek", False, "r2"),
        ("deepseek", True, "r3"),
    )
]
WHOLE = [
    case(layout, model, packing, recompute)
    for layout in LAYOUTS
    for model in ("qwen", "deepseek")
    for packing in (False, True)
    for recompute in ("none", "full")
] + [
    case(layout, model, packing, recompute, dispatcher)
    for layout, recompute, dispatcher in (
        ("ep2", "none", "allgather"),
        ("tp2-ep2", "full", "allgather"),
        ("pp2-vpp2", "full", "allgather"),
        ("pp2-vpp2", "block", "alltoall"),
        ("pp2-ep2", "moe", "alltoall"),
    )
    for model in ("qwen", "deepseek")
    for packing in (False, True)
]
RESUMED = ("pp2-qwen-padded-none-alltoall", "pp2-vpp2-qwen-padded-none-alltoall")
for _case in WHOLE:
    _case["resume"] = _case["name"] in RESUMED


def run(work: Path, cases: list[Case]) -> dict[str, Found]:
    """Everything the cases found, and the one-rank references under the models' names."""
    families = json.loads((ROOT / "tests/data/layout_families.json").read_text())
    qwen = families["qwen3_moe"] | {"mlp_only_layers": []}
    sparse = families["deepseek_v32"] | {"index_topk": 4}  # below the shortest rollouts' lengths
    configs = (("qwen", qwen), ("deepseek", families["deepseek_v3"]), ("sparse", sparse))
    for name, config in configs:
        (work / f"{name}.json").write_text(json.dumps(config))
    alone = [
        [
            {"name": model, "model": model, "controls": model == "qwen"},
            {"name": f"{model}-live", "model": model, "does": "record_live"},
            *(kind | {"name": f"{model}-{name}", "model": model} for name, kind in SEVERAL.items()),
        ]
        for model in ("qwen", "deepseek")
    ]
    alone.append([{"name": "sparse", "model": "sparse"}])
    stages: list[list[dict[str, Any]]] = [
        [
            {"name": f"one{i}", "ranks": [i], "sizes": {}, "cases": alone[i]}
            for i in range(len(alone))
        ],
        [],
        [],
    ]
    for layout, sizes in LAYOUTS.items():
        chosen = [c for c in cases if c["layout"] == layout]
        world = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1) * sizes.get("dp", 1)
        stage = stages[1 if world == 2 else 2]
        pair = len(stage) % 2 * 2  # trainers of two work side by side
        ranks = list(range(4)) if world == 4 else [pair, pair + 1]
        if chosen:
            stage.append({"name": layout, "ranks": ranks, "sizes": sizes, "cases": chosen})
    (work / "schedule.json").write_text(json.dumps(stages))
    start_workers(work)
    names = [c["name"] for part in (cases, *alone) for c in part]
    return {name: torch.load(work / f"{name}.pt", weights_only=True) for name in names}


def start_workers(work: Path) -> None:
    """Four processes; the schedule says which trainers they form."""
    program = str(ROOT / "tests/helpers/replay_matrix_ranks.py")
    run_ranks(4, [program, str(work)], timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def cover(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return run(
        tmp_path_factory.mktemp("cover"),
        COVER + SPARSE + [MOVED] + CONTROLS + STEPS + PROBED + VALUED,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return run(tmp_path_factory.mktemp("whole"), WHOLE)


@pytest.fixture(scope="module")
def whole_valued(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return run(tmp_path_factory.mktemp("whole_valued"), WHOLE_VALUED)


@pytest.fixture(scope="module")
def whole_steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return run(tmp_path_factory.mktemp("whole_steps"), WHOLE_STEPS)


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def compare(found: Found, alone: Found, recomputed: bool) -> None:
    assert gap(found["logprobs"], alone["logprobs"]) <= GATE
    assert found["gradients"].keys() == alone["gradients"].keys()
    for name, want in alone["gradients"].items():
        distance = float((found["gradients"][name] - want).norm())
        assert distance <= GATE * float(want.norm()), f"{name}: gradients differ by {distance:.1e}"
    maps = found["executed"]
    assert maps["forward_maps"] == maps["forward_right"] > 0, "experts are those of the record"
    assert maps["recompute_maps"] == maps["recompute_right"]
    assert (maps["recompute_maps"] > 0) == recomputed
    check_counts(found)


def check_counts(found: Found) -> None:
    """Every token, row, kept entry and byte once over the trainer."""
    counts, recorded = found["counts"], found["recorded"]
    assert counts["fed_rows"] == counts["replayed_rows"] > 0, "coverage is 1"
    assert counts["routing_bytes"] == recorded["routing_bytes"], "u8, each row read by one rank"
    for name in ("fed", "sampled", "kept"):
        assert counts[name] == recorded[name], name
    assert counts["masked"] == counts["sampled_truncated"] == recorded["sampled"]
    assert found["mask_ids"] == recorded["mask_ids"]


@pytest.mark.parametrize("name", [c["name"] for c in COVER])
def test_a_layout_computes_what_one_rank_does(name: str, cover: dict[str, Found]) -> None:
    (chosen,) = (c for c in COVER if c["name"] == name)
    compare(cover[name], cover[chosen["model"]], chosen["recompute"] != "none")


@pytest.mark.parametrize("name", [c["name"] for c in SPARSE])
def test_attention_reads_the_recorded_positions_in_any_layout(
    name: str, cover: dict[str, Found]
) -> None:
    (chosen,) = (c for c in SPARSE if c["name"] == name)
    found, alone = cover[name], cover["sparse"]
    compare(found, alone, chosen["recompute"] != "none")
    check_attended(found, chosen["recompute"] != "none")
    assert found["read_bytes"] == alone["read_bytes"] > 0, "each record is read by one rank"


def check_attended(found: Found, recomputed: bool) -> None:
    """The keys given to the attention function are those of the record, bitwise."""
    calls, counts = found["attended"], found["counts"]
    assert calls["forward_calls"] == calls["forward_right"] > 0
    assert calls["recompute_calls"] == calls["recompute_right"]
    assert (calls["recompute_calls"] > 0) == recomputed
    assert counts["indexer_rows"] == counts["fed_index_rows"] > 0, "coverage is 1"


def test_positions_of_the_token_before_fail_the_gate(cover: dict[str, Found]) -> None:
    found, alone = cover[MOVED["name"]], cover["sparse"]
    assert gap(found["logprobs"], alone["logprobs"]) > 100 * GATE
    assert found["attended"]["forward_right"] == 0


def compare_steps(found: Found, alone: Found, same_plan: bool) -> None:
    """Two optimizer steps: the second one's numbers, the weights' whole way, every metric."""
    assert gap(found["logprobs"], alone["logprobs"]) <= GATE
    assert found["moved"].keys() == alone["moved"].keys()
    for name, want in alone["moved"].items():
        distance = float((found["moved"][name] - want).norm())
        assert distance <= 2 * GATE * float(want.norm()) + 1e-7, f"{name}: {distance:.1e}"
    assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-3, abs=GATE)
    assert found["metrics"]["loss/grad_norm_router"] > 0, "and alike, in every layout"
    assert found["metrics"]["loss/moved_k3"] > GATE, "the first step moved it by 0.5 % and more"
    if same_plan:
        assert found["probe"] == pytest.approx(alone["probe"], rel=1e-4, abs=GATE)
    experts = found["experts"]
    assert experts["maps"] == experts["trained"] == experts["recomputed"] > 0, "of both passes"


@pytest.mark.parametrize("name", [c["name"] for c in STEPS])
def test_two_optimizer_steps_are_those_of_one_rank(name: str, cover: dict[str, Found]) -> None:
    (chosen,) = (c for c in STEPS if c["name"] == name)
    reference = cover[f"{chosen['model']}-{chosen['several']}"]
    compare_steps(cover[name], reference, LAYOUTS[chosen["layout"]].get("dp", 1) == 1)


def compare_valued(found: Found, alone: Found) -> None:
    """Values, GAE, gradients and the values after a step are those of one rank."""
    for what in ("values", "advantages", "returns", "after"):
        assert gap(found[what], alone[what]) <= GATE * (100 if what == "after" else 1), what
    assert found["gradients"].keys() == alone["gradients"].keys()
    for name, want in alone["gradients"].items():
        distance = float((found["gradients"][name] - want).norm())
        assert distance <= GATE * float(want.norm()) + 1e-7, f"{name}: {distance:.1e}"
    assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=GATE)
    assert gap(found["values"], found["after"]) > 100 * GATE, "control: a step moves them"
    for name, (uninterrupted, resumed) in found.get("resumed", {}).items():
        assert resumed == pytest.approx(uninterrupted, rel=1e-6), name


@pytest.mark.parametrize("name", [c["name"] for c in VALUED])
def test_a_critic_in_any_layout_is_that_of_one_rank(name: str, cover: dict[str, Found]) -> None:
    (chosen,) = (c for c in VALUED if c["name"] == name)
    compare_valued(cover[name], cover[f"{chosen['model']}-critic"])
    assert ("resumed" in cover[name]) == chosen.get("resume", False)
    if left := chosen.get("continues"):
        assert gap(cover[name]["continued"], cover[left]["after"]) <= GATE, "its checkpoint"


@pytest.mark.full
@pytest.mark.parametrize("name", [c["name"] for c in WHOLE_VALUED])
def test_the_whole_matrix_with_a_critic(name: str, whole_valued: dict[str, Found]) -> None:
    (chosen,) = (c for c in WHOLE_VALUED if c["name"] == name)
    compare_valued(whole_valued[name], whole_valued[f"{chosen['model']}-critic"])


@pytest.mark.parametrize("name", [c["name"] for c in PROBED])
def test_the_probe_tells_right_records_from_wrong_ones_in_every_layout(
    name: str, cover: dict[str, Found]
) -> None:
    right, shifted = cover[name]["right"], cover[name]["shifted"]
    assert alerts(right) == []
    assert right["probe/exact_abs_dlogp_max"] <= GATE
    assert right["probe/live_agree_frac"] == right["probe/live_agree_same_input_frac"] == 1.0
    assert right["probe/k3_live"] <= 1e-8
    every = ["alert/replay_exact", "alert/replay_routes", "alert/replay_worth"]
    assert alerts(shifted) == every
    assert shifted["probe/exact_tokens"] == right["probe/exact_tokens"] > 32


def test_the_reference_replays_its_record(cover: dict[str, Found]) -> None:
    for model in ("qwen", "deepseek"):
        maps = cover[model]["executed"]
        assert maps["forward_maps"] == maps["forward_right"] > 0
        check_counts(cover[model])


@pytest.mark.parametrize("alter", [c["alter"] for c in CONTROLS])
def test_wrong_routes_fail_the_gate(alter: str, cover: dict[str, Found]) -> None:
    (chosen,) = (c for c in CONTROLS if c["alter"] == alter)
    found = cover[chosen["name"]]
    assert gap(found["logprobs"], cover["qwen"]["logprobs"]) > 100 * GATE
    assert found["executed"]["forward_right"] < found["executed"]["forward_maps"]


@pytest.mark.parametrize("control", ["response_only", "no_mask", "other_temperature"])
def test_missing_or_foreign_records_fail_the_gate(control: str, cover: dict[str, Found]) -> None:
    controls = cover["qwen"]["controls"]
    assert gap(controls["right"], cover["qwen"]["logprobs"]) <= GATE
    assert gap(controls[control], controls["right"]) > 100 * GATE


def test_a_rank_holds_its_share_of_the_routes(cover: dict[str, Found]) -> None:
    """Ids wait as one byte each, for the microbatches in flight and this rank's layers only."""
    for name in ("qwen", "cp2-qwen-padded-none-alltoall"):
        found = cover[name]
        ranks = len(found["peak_bytes"])
        every_row = found["counts"]["forwarded"] * 4 * 2  # 4 layers, 2 experts
        # no recompute: a microbatch's rows are gone before the next is loaded
        assert sum(found["peak_bytes"]) < 0.6 * every_row, name
        assert max(found["peak_bytes"]) * ranks == sum(found["peak_bytes"]), "equal shares"


def test_gradient_reaches_routers_and_replayed_experts_only(cover: dict[str, Found]) -> None:
    for model, first in (("qwen", 0), ("deepseek", 1)):
        gradients = cover[model]["gradients"]
        for layer in range(first, 4):
            assert (gradients[f"model.layers.{layer}.mlp.gate.weight"].abs().amax(1) > 0).all()


@pytest.mark.full
@pytest.mark.parametrize("name", [c["name"] for c in WHOLE])
def test_the_whole_matrix(name: str, whole: dict[str, Found]) -> None:
    (chosen,) = (c for c in WHOLE if c["name"] == name)
    compare(whole[name], whole[chosen["model"]], chosen["recompute"] != "none")


@pytest.mark.full
@pytest.mark.parametrize("name", [c["name"] for c in WHOLE_STEPS])
def test_the_whole_matrix_of_two_steps(name: str, whole_steps: dict[str, Found]) -> None:
    (chosen,) = (c for c in WHOLE_STEPS if c["name"] == name)
    reference = whole_steps[f"{chosen['model']}-{chosen['several']}"]
    same_plan = LAYOUTS[chosen["layout"]].get("dp", 1) == 1
    compare_steps(whole_steps[name], reference, same_plan)


@pytest.mark.full
@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_over_stages_resumes_exactly(name: str, whole: dict[str, Found]) -> None:
    for what, (uninterrupted, resumed) in whole[name]["resumed"].items():
        assert uninterrupted == resumed, what


LONG = 32_768


@pytest.mark.full
def test_a_long_rollout_over_context_parallel_ranks(tmp_path: Path) -> None:
    """32k tokens on two ranks: the numbers of one rank, half of its route bytes each."""
    long = {"model": "long", "longest": LONG, "packing": True}
    families = json.loads((ROOT / "tests/data/layout_families.json").read_text())
    config = families["qwen3_moe"] | {
        "mlp_only_layers": [],
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": LONG + 1,
    }
    (tmp_path / "long.json").write_text(json.dumps(config))
    stages = [
        [{"name": "one", "ranks": [0], "sizes": {}, "cases": [long | {"name": "one"}]}],
        [
            {
                "name": "two",
                "ranks": [0, 1],
                "sizes": {"cp": 2},
                "cases": [long | {"name": "two", "megatron": RECOMPUTE["full"]}],
            }
        ],
    ]
    (tmp_path / "schedule.json").write_text(json.dumps(stages))
    start_workers(tmp_path)
    one, two = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("one", "two"))
    compare(two, one, recomputed=True)
    assert max(len(values) for values in two["logprobs"].values()) > LONG - 8
    assert max(two["peak_bytes"]) <= 1.01 * max(one["peak_bytes"]) / 2
