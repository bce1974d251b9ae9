"""Identity of an engine's weight layout: what is not known to be canonical is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moerl.config.schema import EngineConfig
from moerl.engine import layout
from moerl.engine.args import field_names
from moerl.engine.layout import EngineLayout, check_model, check_modules, engine_layout
from moerl.engine.server import EngineServer
from moerl.errors import ConfigError, LayoutError

# Resolved arguments of a plain server, as /server_info of SGLang 0.5.23 reports them.
PLAIN: dict[str, Any] = {name: allowed[0] for name, (allowed, _) in layout._ALLOWED.items()} | {
    "tp_size": 2,
    "ep_size": 1,
    "attn_dp_size": 1,
    "moe_runner_backend": "auto",
    "quantization": None,
    "dtype": "bfloat16",
    "disable_shared_experts_fusion": False,
    "attention_backend": "torch_native",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
}
QWEN = {"model_type": "qwen3_moe", "dtype": "bfloat16"}


def identity(
    args: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    config: dict[str, Any] = QWEN,
    release: str = "0.5.23",
) -> EngineLayout:
    return engine_layout(PLAIN | (args or {}), environment or {}, config, release=release)


def test_our_table_names_existing_arguments() -> None:
    assert set(PLAIN) <= field_names()


def test_the_fingerprint_is_stable() -> None:
    """It is compared between processes and kept with plans: a change here is a change of format."""
    assert identity() == EngineLayout(
        "0.5.23", "qwen3_moe", 2, 1, 1, "triton", "none", "bfloat16", ()
    )
    assert identity().fingerprint() == "8090b10cb3f2d8fd"


def test_every_part_of_the_identity_changes_the_fingerprint() -> None:
    changed = [
        identity({"tp_size": 4}),
        identity({"ep_size": 2}),
        identity({"attn_dp_size": 2}),
        identity({"dtype": "float32"}),
        identity(config=QWEN | {"model_type": "mixtral"}),
    ]
    assert len({one.fingerprint() for one in [identity(), *changed]}) == 6


def test_what_does_not_move_weights_does_not_change_it() -> None:
    """auto and triton are one weight format, whatever the device."""
    same = [
        identity({"moe_runner_backend": "triton"}),
        identity({"device": "cuda", "max_running_requests": 7}),
        identity(environment={"SGLANG_USE_AITER": "false", "PATH": "/bin"}),
        identity({"dtype": "auto"}),
    ]
    assert {one.fingerprint() for one in same} == {identity().fingerprint()}


REFUSED = [
    ("moe_runner_backend", "flashinfer_trtllm", "packs expert weights into blocks"),
    ("moe_runner_backend", "flashinfer_cutlass", r"keeps w13 as \[up; gate\]"),
    ("moe_runner_backend", "triton_kernel", "keeps expert weights transposed"),
    ("moe_runner_backend", "aiter", "shuffles expert weights"),
    ("moe_runner_backend", "a_new_one", "was never compared with load_weights"),
    ("quantization", "fp8", "other bytes and scales"),
    ("quantization", "a_new_one", "other bytes and scales"),
    ("attention_backend", "intel_amx", "packed for AMX"),
    ("moe_a2a_backend", "deepep", "dispatcher"),
    ("enable_eplb", True, "experts then move"),
    ("ep_num_redundant_experts", 4, "several slots"),
    ("init_expert_location", "/a/file.pt", "other slots"),
    ("pp_size", 2, "one pipeline stage"),
    ("dp_size", 2, "one replica"),
    ("model_impl", "transformers", "other names"),
    ("device", "npu", "lay weights out in their own way"),
    ("dtype", "float8_e4m3fn", "no other dtype"),
]


@pytest.mark.parametrize(("name", "value", "why"), REFUSED)
def test_another_form_of_weights_is_refused_in_one_sentence(
    name: str, value: object, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as refusal:
        identity({name: value})
    assert str(value) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "SGLANG_USE_AITER"])
def test_a_switch_that_keeps_shapes_and_moves_rows_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = True .* must be off"):
        identity(environment={name: "1"})


def test_an_unknown_flag_release_or_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="a_new_flag = True is not usable: not known"):
        replace(identity(), kernel_flags=("a_new_flag",))
    with pytest.raises(ConfigError, match=r"sglang = '0.6.0'"):
        identity(release="0.6.0")
    with pytest.raises(ConfigError, match="model_type = 'gemma'"):
        identity(config={"model_type": "gemma"})


def test_an_argument_that_is_not_reported_is_refused() -> None:
    args = {name: value for name, value in PLAIN.items() if name != "enable_eplb"}
    with pytest.raises(ConfigError, match=r"enable_eplb = None .* did not report"):
        engine_layout(args, {}, QWEN, release="0.5.23")


def test_auto_lowers_float32() -> None:
    assert identity({"dtype": "auto"}, config=QWEN | {"dtype": "float32"}).dtype == "float16"


def test_shared_experts_must_stay_apart_on_a_gpu() -> None:
    deepseek = {"model_type": "deepseek_v3", "dtype": "bfloat16"}
    assert identity(config=deepseek).family == "deepseek_v3"
    with pytest.raises(ConfigError, match="disable_shared_experts_fusion = False"):
        identity({"device": "cuda"}, config=deepseek)
    identity({"device": "cuda", "disable_shared_experts_fusion": True}, config=deepseek)


def test_olmoe_runs_on_one_rank() -> None:
    olmoe = {"model_type": "olmoe", "dtype": "bfloat16"}
    with pytest.raises(ConfigError, match=r"engine.tp = 2 .* olmoe"):
        identity(config=olmoe)
    assert identity({"tp_size": 1}, config=olmoe).tp == 1


# --- models and modules --------------------------------------------------------------------------
def test_models_that_would_be_served_with_unfilled_weights() -> None:
    check_model(QWEN | {"tie_word_embeddings": False, "mlp_only_layers": []})
    check_model({"model_type": "qwen3", "tie_word_embeddings": True})
    for field, value in (
        ("tie_word_embeddings", True),
        ("mlp_only_layers", [0]),
        ("decoder_sparse_step", 2),
    ):
        with pytest.raises(ConfigError, match=f"{field} = .* unfilled"):
            check_model(QWEN | {field: value})


async def start(folder: Path) -> None:
    server = EngineServer(
        EngineConfig(platform="cpu"),
        folder,
        routing=False,
        version="0.0",
        token="t",
        log=folder / "log",
    )
    await server.start(SimpleNamespace())  # type: ignore[arg-type]


def test_such_a_model_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    import asyncio

    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"tie_word_embeddings": True}))
    with pytest.raises(ConfigError, match="tie_word_embeddings = True"):
        asyncio.run(start(tmp_path))


class UnquantizedFusedMoEMethod:
    def __init__(self, **flags: object) -> None:
        vars(self).update(flags)


class Fp8MoEMethod:
    pass


def test_live_modules_are_asked() -> None:
    def modules(method: object, **more: object) -> list[tuple[str, object]]:
        plain = SimpleNamespace(quant_method=UnquantizedFusedMoEMethod())
        return [
            ("", SimpleNamespace()),
            ("a", plain),
            ("b", SimpleNamespace(quant_method=method, **more)),
        ]

    plain = UnquantizedFusedMoEMethod(w13_swiglu_interleaved=False, _aiter_runner=None)
    check_modules(modules(plain))
    for flag in layout._METHOD_FLAGS:
        with pytest.raises(LayoutError, match=f"b: {flag} of UnquantizedFusedMoEMethod"):
            check_modules(modules(UnquantizedFusedMoEMethod(**{flag: True})))
    with pytest.raises(LayoutError, match="b: weights of Fp8MoEMethod have no layout"):
        check_modules(modules(Fp8MoEMethod()))
    with pytest.raises(LayoutError, match="b: SGLang packs its weights for AMX"):
        check_modules(modules(None, use_intel_amx_backend=True))
    with pytest.raises(LayoutError, match="b: SGLang stores its shared experts among"):
        check_modules(modules(None, num_fused_shared_experts=1))
