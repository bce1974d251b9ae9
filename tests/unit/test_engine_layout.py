"""Identity of an engine's weight layout: what is not known to be canonical is refused by name."""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moerl.core.errors import ConfigError, EngineError, LayoutError
from moerl.core.rpc import Keys
from moerl.engine import weight_layout
from moerl.engine.host.server_args import field_names
from moerl.engine.host.sglang_server import EngineServer
from moerl.engine.plugin import loaded_weights
from moerl.engine.plugin.loaded_weights import check_modules
from moerl.engine.weight_layout import LiveWeightLayout, check_model, engine_layout
from tests.helpers.scripted_host import QWEN, new_server

# /server_info of a plain server of SGLang 0.5.23, on one CPU rank; what no layout asks is left out.
RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "sglang_server_info.json").read_text()
)
PLAIN = RECORDED | {"tp_size": 2, "dtype": "bfloat16"}


def identity(
    args: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    config: dict[str, Any] = QWEN,
    release: str = "0.5.23",
) -> LiveWeightLayout:
    return engine_layout(PLAIN | (args or {}), environment or {}, config, release=release)


def test_our_table_names_existing_arguments() -> None:
    assert set(RECORDED) - {"version"} <= field_names()
    assert set(weight_layout._ALLOWED) <= set(RECORDED)


def test_the_fingerprint_is_stable() -> None:
    """It is compared between processes and kept with plans: a change here is a change of format."""
    assert identity() == LiveWeightLayout(
        "0.5.23", "qwen3_moe", 2, 1, 1, "triton", "none", "bfloat16", ()
    )
    assert identity().fingerprint() == "108bcfab1d2dbb57"


def test_every_part_of_the_identity_changes_the_fingerprint() -> None:
    changed = [
        identity({"tp_size": 4}),
        identity({"ep_size": 2}),
        identity({"attn_dp_size": 2}),
        identity({"dtype": "float32"}),
        identity({"enable_fp32_lm_head": True}),
        identity(config=QWEN | {"model_type": "mixtral"}),
    ]
    assert len({one.fingerprint() for one in [identity(), *changed]}) == 7


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
    ("quantization", "fp8", "the checkpoint's quant_method is None"),
    ("quantization", "a_new_one", "serve unquantised weights, or fp8 blocks"),
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


class Answers:
    """A client of a server that serves at once and reports `info`."""

    def __init__(self, info: dict[str, Any]) -> None:
        self._info = info

    async def healthy(self) -> bool:
        return True

    def authenticate(self, token: str) -> None: ...

    async def freeze_garbage(self) -> None: ...

    async def server_info(self) -> dict[str, Any]:
        return self._info


def test_such_a_model_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    server = new_server(tmp_path, QWEN | {"tie_word_embeddings": True})
    with pytest.raises(ConfigError, match="tie_word_embeddings = True"):
        asyncio.run(server.start(Answers(RECORDED)))  # type: ignore[arg-type]
    assert server.pid == 0


def serve(server: EngineServer, info: dict[str, Any], checked: int = 1) -> None:
    """Start against `info`, with a sleeping process in SGLang's place."""

    def spawn() -> None:
        server.log.write_text(f"{weight_layout.MODULES_CHECKED}\n" * checked)
        server._process = subprocess.Popen(["sleep", "60"])

    server._spawn = spawn  # type: ignore[method-assign]
    server._check_listener = lambda: None  # type: ignore[method-assign]  # it sleeps
    asyncio.run(server.start(Answers(info)))  # type: ignore[arg-type]


def ended(server: EngineServer) -> bool:
    return server._process is not None and server._process.poll() is not None


def test_a_full_disk_leaves_no_scratch_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_keys: Keys, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Keys, "write", full)
    server = new_server(tmp_path)
    with pytest.raises(EngineError, match=r"takes no keys: .*No space left"):
        serve(server, RECORDED)
    assert server._scratch is not None
    assert not server._scratch.path.exists()
    assert server.pid == 0


def test_a_started_server_knows_its_layout(tmp_path: Path) -> None:
    server = new_server(tmp_path)
    serve(server, RECORDED)
    assert server.layout == LiveWeightLayout(
        "0.5.23", "qwen3_moe", 1, 1, 1, "triton", "none", "float32", ()
    )
    assert not ended(server)
    asyncio.run(server.stop())
    assert ended(server)


@pytest.mark.parametrize(
    ("change", "checked", "why"),
    [
        ({"moe_runner_backend": "flashinfer_trtllm"}, 1, "packs expert weights into blocks"),
        ({"quantization": "fp8"}, 1, "the checkpoint's quant_method is None"),
        ({"version": "0.6.0"}, 1, "sglang = '0.6.0'"),
        ({"enable_eplb": True}, 1, "experts then move"),
        ({"enable_fp32_lm_head": True}, 1, "the trainer's model.fp32_lm_head is False"),
        ({}, 0, "0 of 1 ranks checked the layout of their weights"),
    ],
)
def test_a_server_with_another_layout_is_ended(
    tmp_path: Path, change: dict[str, Any], checked: int, why: str
) -> None:
    server = new_server(tmp_path)
    with pytest.raises((ConfigError, EngineError), match=why) as refusal:
        serve(server, RECORDED | change, checked)
    assert "\n" not in str(refusal.value)
    assert ended(server)


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
KERNEL = {"fp8_gemm_runner_backend": "auto"}


@pytest.mark.parametrize("asked", [None, "fp8"])
def test_fp8_blocks_are_those_of_the_checkpoint(asked: str | None) -> None:
    config = QWEN | {"quantization_config": BLOCKS}
    found = identity(KERNEL | {"quantization": asked}, config=config)
    assert found == replace(identity(), quantization="fp8_block")


@pytest.mark.parametrize(
    ("stored", "args", "why"),
    [
        ({"quant_method": "mxfp4"}, {}, "the checkpoint's quant_method is 'mxfp4'"),
        ({}, {"quantization": "awq"}, "quantization = 'awq'"),
        ({"weight_block_size": None}, {}, r"weight_block_size = None .* allowed: \[128, 128\]"),
        ({"weight_block_size": [64, 128]}, {}, r"weight_block_size = \[64, 128\]"),
        ({"activation_scheme": "static"}, {}, "activation_scheme = 'static'"),
        ({"scale_fmt": "ue8m0"}, {}, "scale_fmt = 'ue8m0' .* scales are fp32"),
        ({}, {"fp8_gemm_runner_backend": "flashinfer_trtllm"}, "was never compared"),
    ],
)
def test_other_forms_of_fp8_are_refused(
    stored: dict[str, Any], args: dict[str, Any], why: str
) -> None:
    config = QWEN | {"quantization_config": BLOCKS | stored}
    with pytest.raises(ConfigError, match=why):
        identity(KERNEL | args, config=config)


def test_a_checkpoint_of_fp8_blocks_is_replayed(tmp_path: Path) -> None:
    server = new_server(tmp_path, QWEN | {"quantization_config": BLOCKS})
    server.args["enable_return_routed_experts"] = True
    serve(server, RECORDED | KERNEL)
    assert server.layout is not None
    assert server.layout.quantization == "fp8_block"
    asyncio.run(server.stop())


def test_another_quantised_checkpoint_is_not_replayed(tmp_path: Path) -> None:
    server = new_server(tmp_path, QWEN | {"quantization_config": {"quant_method": "mxfp4"}})
    server.args["enable_return_routed_experts"] = True
    with pytest.raises(ConfigError, match="a quantised cache is refused with replay"):
        asyncio.run(server.start(None))  # type: ignore[arg-type]
    assert server.pid == 0


class UnquantizedFusedMoEMethod:
    def __init__(self, **flags: object) -> None:
        vars(self).update(flags)


class Fp8MoEMethod(UnquantizedFusedMoEMethod):
    weight_block_size = (128, 128)


class Fp8KVCacheMethod:
    pass


def layer(method: object, **flags: object) -> SimpleNamespace:
    parameters = [("weight", SimpleNamespace(**flags))]
    return SimpleNamespace(quant_method=method, named_parameters=lambda recurse: parameters)


def test_live_fp8_layers_are_asked() -> None:
    blocks = Fp8MoEMethod(weight_block_size=[128, 128])
    check_modules([("a", layer(blocks))])
    with pytest.raises(LayoutError, match=r"a: blocks of Fp8MoEMethod are \(128, 128\)"):
        check_modules([("a", layer(Fp8MoEMethod()))])
    for flag in loaded_weights._WEIGHT_FLAGS:
        with pytest.raises(LayoutError, match=rf"a.weight: {flag}, its values"):
            check_modules([("a", layer(blocks, **{flag: True}))])
    marlin = Fp8MoEMethod(weight_block_size=[128, 128], use_marlin=True)
    with pytest.raises(LayoutError, match="a: use_marlin of Fp8MoEMethod"):
        check_modules([("a", layer(marlin))])
    cache = SimpleNamespace(quant_method=Fp8KVCacheMethod(), k_scale_float=1.0, v_scale_float=1.0)
    check_modules([("a", cache)])
    cache.v_scale_float = 0.5
    with pytest.raises(LayoutError, match="a: the checkpoint scales its cache"):
        check_modules([("a", cache)])


class AWQLinearMethod:
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
    for flag in loaded_weights._METHOD_FLAGS:
        with pytest.raises(LayoutError, match=f"b: {flag} of UnquantizedFusedMoEMethod"):
            check_modules(modules(UnquantizedFusedMoEMethod(**{flag: True})))
    with pytest.raises(LayoutError, match="b: weights of AWQLinearMethod have no layout"):
        check_modules(modules(AWQLinearMethod()))
    with pytest.raises(LayoutError, match="b: SGLang packs its weights for AMX"):
        check_modules(modules(None, use_intel_amx_backend=True))
    with pytest.raises(LayoutError, match="b: SGLang stores its shared experts among"):
        check_modules(modules(None, num_fused_shared_experts=1))


def test_a_rank_says_that_it_checked(capsys: pytest.CaptureFixture[str]) -> None:
    def runner(method: object) -> object:
        modules = [("a", SimpleNamespace(quant_method=method))]
        model = SimpleNamespace(named_modules=lambda: modules)
        args = SimpleNamespace(resolved_dict=lambda: {"enable_fp32_lm_head": False})
        return SimpleNamespace(model=model, server_args=args)

    loaded_weights.check_loaded(None, runner(UnquantizedFusedMoEMethod()))
    assert capsys.readouterr().out == f"{weight_layout.MODULES_CHECKED}\n"
    with pytest.raises(LayoutError):
        loaded_weights.check_loaded(None, runner(AWQLinearMethod()))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("asked", [False, True])
def test_a_rank_whose_head_is_not_that_of_the_trainer_is_refused(asked: bool) -> None:
    """SGLang turns the fp32 head on for some config.json, whatever the server argument says."""

    def load(fp32: bool, fp32_output: bool = False, module: str = "logits_processor") -> None:
        head = SimpleNamespace(use_fp32_lm_head=fp32, use_fp32_lm_head_output=fp32_output)
        modules = [(module, head if module else SimpleNamespace())]
        model = SimpleNamespace(named_modules=lambda: modules)
        args = SimpleNamespace(resolved_dict=lambda: {"enable_fp32_lm_head": asked})
        loaded_weights.check_loaded(None, SimpleNamespace(model=model, server_args=args))

    load(asked)
    wrong = [(True, False, ""), (False,)] if asked else [(True,), (False, True)]
    for other in wrong:  # the first: a model without SGLang's own head
        with pytest.raises(ConfigError, match=f"model.fp32_lm_head is {asked}"):
            load(*other)
