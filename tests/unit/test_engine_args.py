"""Server arguments: every name is checked, ours are ours, what replay does not allow is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moerl.config import load_config
from moerl.config.schema import EngineConfig
from moerl.core.errors import ConfigError
from moerl.engine.host import server_args
from moerl.engine.host.sglang_server import cause_in, free_port

RECIPES = sorted(p.stem for p in (Path(__file__).parents[2] / "configs/recipes").glob("*.yaml"))


def built(config: EngineConfig, routing: bool = True) -> dict[str, Any]:
    return server_args.server_args(
        config, Path("model"), routing=routing, version="0.3", port=1, nccl_port=2
    )


def test_cpu_arguments() -> None:
    got = built(EngineConfig(platform="cpu", tp=2, args={"chunked_prefill_size": 64}))
    assert got["device"] == "cpu"
    assert got["attention_backend"] == "torch_native"
    assert (got["tp_size"], got["weight_version"], got["chunked_prefill_size"]) == (2, "0.3", 64)
    assert set(got) <= server_args.field_names()


def test_cuda_arguments_keep_weights_as_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own choice for some families and GPUs would be refused by
    moerl.engine.weight_layout.
    """
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    got = built(EngineConfig(platform="cuda"))
    assert got["moe_runner_backend"] == "triton"
    assert got["disable_shared_experts_fusion"] is True
    assert "device" not in got
    assert set(got) <= server_args.field_names()


def test_both_platforms_sample_with_the_backend_whose_masks_are_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for platform in ("cpu", "cuda"):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        assert built(EngineConfig(platform=platform))["sampling_backend"] == "pytorch"
        wanted = EngineConfig(platform=platform, args={"sampling_backend": "flashinfer"})
        for routing in (True, False):  # sampling masks are recorded without routes too
            with pytest.raises(ConfigError, match=r"sampling_backend = 'flashinfer'.*'pytorch'"):
                built(wanted, routing=routing)


def test_data_parallel_attention_has_no_prefill_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With routes recorded; decoding keeps its graphs."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    name = "disable_prefill_cuda_graph"

    def asked(routing: bool = True, **args: Any) -> dict[str, Any]:
        own = {"attn_dp_size": 2} | args
        return built(EngineConfig(platform="cuda", tp=2, args=own), routing)

    assert asked()[name] is True
    assert "disable_decode_cuda_graph" not in asked()
    assert name not in asked(routing=False)
    assert name not in asked(attn_dp_size=1)
    for wrong in ({name: False}, {"cuda_graph_backend_prefill": "breakable"}):
        with pytest.raises(ConfigError, match="would be those of other tokens"):
            asked(**wrong)
        assert asked(attn_dp_size=1, **wrong)


def test_sglang_may_size_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built(EngineConfig())["max_total_tokens"] == 65536
    assert "max_total_tokens" not in built(EngineConfig(max_total_tokens=0))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_asks_for_what_a_start_allows(recipe: str) -> None:
    config = load_config(recipe)
    server_args.check_args(config.engine.args, replay=config.replay.routing == "R3")


def test_large_recipes_replay_the_routes_of_quantised_experts_on_many_ranks() -> None:
    for recipe in ("deepseek-v3", "kimi-k2"):
        config = load_config(recipe)
        assert config.engine.args == {"ep_size": 8, "attn_dp_size": 8, "quantization": "fp8"}
        assert (config.replay.routing, config.replay.sampling_mask) == ("R3", True)


def test_user_arguments_replace_defaults_we_do_not_own() -> None:
    config = EngineConfig(platform="cpu", args={"attention_backend": "triton"})
    assert built(config)["attention_backend"] == "triton"


def test_our_tables_name_existing_arguments() -> None:
    assert set(server_args._OWNED) - {"config"} <= server_args.field_names()


def test_unknown_name_suggests_close_ones() -> None:
    with pytest.raises(ConfigError, match=r"engine.args.chunked_prefil_size = 64.*chunked_prefill"):
        built(EngineConfig(args={"chunked_prefil_size": 64}))


@pytest.mark.parametrize("name", ["port", "model_path", "enable_return_routed_experts", "api_key"])
def test_arguments_we_own_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.args.{name}"):
        built(EngineConfig(args={name: 1}))


def test_platform_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"engine.platform = 'tpu'"):
        server_args.uses_cuda("tpu")


def test_secret_hides_and_survives_pickling() -> None:
    """In a process of its own: the server's module arms hooks when it is imported."""
    code = (
        "import pickle; from moerl.engine.plugin.server_process import Secret\n"
        "secret = pickle.loads(pickle.dumps(Secret('abc')))\n"
        "print(secret == 'abc', f'Bearer {secret}', {'api_key': secret})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True Bearer abc {'api_key': '***'}\n"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (["[ts] Scheduler hit an exception: Traceback", "RuntimeError: No memory", "[ts] bye"],
         "RuntimeError: No memory"),
        (["RuntimeError: No memory", "Traceback", "EOFError"], "RuntimeError: No memory"),
        (["Traceback", "EOFError"], "EOFError"),
        (["ERROR: [Errno 98] error while attempting to bind: address already in use"],
         "[Errno 98] error while attempting to bind: address already in use"),
        (["Fatal Python error: Segmentation fault", "", "Thread 0x7f (most recent call first):"],
         "Fatal Python error: Segmentation fault"),
        (["all is well", "Ignore import error: x"], ""),
    ],
)  # fmt: skip
def test_cause_of_a_death(log: list[str], cause: str) -> None:
    assert cause_in(log) == cause


def test_free_ports_differ() -> None:
    assert len({free_port("127.0.0.1") for _ in range(8)}) > 1
