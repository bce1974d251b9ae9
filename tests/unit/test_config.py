"""Every bad setting is one sentence that names the field, the value and what is allowed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from typer.models import CommandInfo
from typer.testing import CliRunner

from moerl.cli import _named_run, app
from moerl.config import Config, load_config, resolve, save_config
from moerl.config.checks import check, check_model_sizes
from moerl.config.functions import load_below
from moerl.config.load import load_saved
from moerl.config.resume import resume_facts
from moerl.config.schema import NodeGroup, ParallelConfig, TinyModel
from moerl.config.task_tables import (
    ENVIRONMENT_NAMES,
    ENVIRONMENTS,
    PACKAGE,
    REWARD_NAMES,
    REWARDS,
    SOURCES,
)
from moerl.config.validate import either, read_section
from moerl.core.errors import ConfigError, ModelError
from moerl.data.tiny_model import make_tiny_model
from moerl.launch.engine_commands import engines
from moerl.planning.dry_run import describe
from moerl.runtime.run_dir import RunDir, read_manifest


def _commands() -> list[CommandInfo]:
    return [*app.registered_commands, *engines.registered_commands]


OWN = "package.module:function"
BAD = [
    ("run.stepz=3", "run.stepz = 3", "unknown key; did you mean run.steps"),
    ("run.zzz=3", "run.zzz = 3", "unknown key; run has name, root, seed, steps, console"),
    (
        "rollout.group_sise=4",
        "rollout.group_sise = 4",
        "unknown key; did you mean rollout.group_size, ",
    ),
    ("sampling.topk=4", "sampling.topk = 4", "unknown key; did you mean sampling.top_k, "),
    ("run.steps=many", "run.steps = 'many'", "int is needed"),
    ("run.steps=0", "run.steps = 0", "at least 1"),
    ("sampling.top_p=1.5", "sampling.top_p = 1.5", "in (0, 1]"),
    ("sampling.top_p=high", "sampling.top_p = 'high'", "float is needed"),
    ("sampling.top_k=1", "sampling.top_k = 1", "greedy sampling has no gradient"),
    ("sampling.top_k=100000", "sampling.top_k = 100000", "2..4096"),
    ("sampling.temperature=0", "sampling.temperature = 0.0", "above 0"),
    ("trainer.parallel.ep=3", "trainer.parallel.ep = 3", "must divide tp x cp x dp = 2"),
    ("trainer.parallel.vpp=2", "trainer.parallel.vpp = 2", "interleaved over stages"),
    ("trainer.dtype=fp8", "trainer.dtype = 'fp8'", "fp32 or bf16"),
    (
        "engine.args.enable_fp32_lm_head=true",
        "engine.args.enable_fp32_lm_head = True",
        "it must be model.fp32_lm_head = False, which sets it for trainer and engines",
    ),
    ("task.name=poetry", "task.name = 'poetry'", either(tuple(SOURCES))),
    ("trainer.megatron.moe_router_fusion=true", "moe_router_fusion = True", "before replay"),
    ("trainer.megatron.cuda_graph_impl=local", "cuda_graph_impl = 'local'", "a captured router"),
    ("trainer.megatron.enable_cuda_graph=true", "enable_cuda_graph = True", "a captured router"),
    ("rollout.max_lag=0", "rollout.max_lag = 0", "buffer_depth=0"),
    ("trainer.minibatches=3", "trainer.minibatches = 3", "divide rollout.groups_per_step = 32"),
    ("rollout.in_flight_mode=pause", "in_flight_mode = 'pause'", "in_place or retract"),
    ("replay.probe=-1", "replay.probe = -1", "at least 0"),
    ("replay.routing=R9", "replay.routing = 'R9'", "R3, R2 or off"),
    ("bogus.key=1", "bogus", "unknown key"),
    ("run=3", "run = 3", "a section of settings: name, root, seed"),
    ("trainer.parallel=2", "trainer.parallel = 2", "a section of settings: tp, pp"),
    ("cluster.nodes.x.gpus=2", "cluster.nodes.x.gpus = 2", "nodes.x has roles, count, hosts"),
    ("engine.mem_fraction_static=7", "mem_fraction_static = 7.0", "in (0, 1]"),
    ("algorithm.gae_gamma=1.1", "algorithm.gae_gamma = 1.1", "in [0, 1]"),
    ("trainer.optimizer.beta1=1", "trainer.optimizer.beta1 = 1.0", "in [0, 1)"),
    ("trainer.optimizer.eps=0", "trainer.optimizer.eps = 0.0", "above 0"),
    ("model.tiny.num_heads=0", "model.tiny.num_heads = 0", "at least 1"),
    ("run.name=../x", "run.name = '../x'", "not . or - first"),
    ("task.reward=exact", "task.reward = 'exact'", either((*REWARD_NAMES, OWN))),
    ("task.environment=x", "task.environment = 'x'", either((*ENVIRONMENT_NAMES, OWN))),
    ("steps", "override = 'steps'", "key=value"),
]


@pytest.mark.parametrize(("override", "names", "allows"), BAD, ids=[b[0] for b in BAD])
def test_bad_override(override: str, names: str, allows: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(resolve(load_config("quickstart", [override])))
    text = str(error.value)
    assert names in text
    assert allows in text
    assert "\n" not in text


def test_one_setting_makes_both_heads_fp32() -> None:
    plain, both = (
        resolve(load_config("quickstart", [f"model.fp32_lm_head={on}"])) for on in (False, True)
    )
    check(both)
    assert both.engine.args == plain.engine.args | {"enable_fp32_lm_head": True}
    assert resolve(both) == both
    text = describe(both, [])
    assert text.count("fp32 and fp32 head") == 1, "the trainer's row"
    assert text.count("float32 and fp32 head") == 1, "the engine's"
    assert "fp32 head" not in describe(plain, [])
    by_hand = ["model.fp32_lm_head=true", "engine.args.enable_fp32_lm_head=false"]
    refused = resolve(load_config("quickstart", by_hand))
    with pytest.raises(ConfigError, match=r"must be model\.fp32_lm_head = True"):
        check(refused)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: [1,\n", "not readable as YAML: line 2: expected the node content"),
        ("- a\n", "a YAML mapping of settings is needed"),
        ("include: models/tiny_moe\n", "a list of files is needed"),
        ("include: [models/no_such]\n", "no such file next to"),
        ("run:\n  steps: 3\n  steps: 4\n", "line 3 sets steps a second time"),
        ("run: 3\n", "run = 3 is not usable: it is a section"),
        ("{}\n", "model.path = '' is not usable: name a model's folder"),
        ("run: {steps: [1]}\n", "run.steps = [1] is not usable: int is needed"),
    ],
)
def test_bad_recipe_file(tmp_path: Path, text: str, says: str) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(text)
    sentence = fails("train", str(recipe), "--dry-run")
    assert says in sentence
    assert "\n" not in sentence


def test_an_anchor_may_be_merged_and_one_of_its_keys_replaced(tmp_path: Path) -> None:
    recipe = tmp_path / "merged.yaml"
    recipe.write_text(
        "include: [recipes/quickstart]\nengine: {args: {a: &a {x: 1}, b: {<<: *a, x: 2}, c: *a}}\n"
    )
    assert load_config(str(recipe)).engine.args == {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 1}}


def test_every_line_of_the_task_tables_names_a_function() -> None:
    lines = [*(reward.function for reward in REWARDS.values()), *ENVIRONMENTS.values()]
    lines += [path for source in SOURCES.values() for path in (source.factory, source.reward)]
    for line in filter(None, lines):
        assert callable(load_below(PACKAGE, line)), line
    with pytest.raises(AttributeError):  # negative control
        load_below(PACKAGE, "rewards:no_such")


@pytest.mark.parametrize("field", ["task.reward", "task.environment", "algorithm.objective"])
@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("http://localhost:80/score", "use "),
        ("no_such_module:f", "have no module no_such_module; use "),
        ("tests.helpers.run_rewards:no_such", "run_rewards.py defines no no_such; use "),
    ],
)
def test_a_function_that_does_not_exist_is_refused_before_a_start(
    field: str, value: str, why: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check(resolve(load_config("quickstart", [f"{field}={value}"])))
    assert (error.value.field, error.value.value) == (field, value)
    assert why in error.value.allowed
    assert error.value.allowed.endswith("package.module:function")


def test_experts_are_whole_or_cut_as_the_rest() -> None:
    for etp, ep in ((1, 1), (2, 1), (1, 2)):
        sizes = [
            f"trainer.parallel.{name}={n}" for name, n in (("tp", 2), ("etp", etp), ("ep", ep))
        ]
        check(load_config("quickstart", sizes))
    with pytest.raises(ConfigError, match="use 1 or tp = 4"):
        check(load_config("quickstart", ["trainer.parallel.tp=4", "trainer.parallel.etp=2"]))


@pytest.mark.parametrize(
    ("cluster", "transport"),
    [
        ("laptop", "shm"),
        ("node8", "shm"),
        ("hosts", "gloo"),
        ("slurm", "nccl"),
        ("kuberay", "nccl"),
    ],
)
def test_the_transport_follows_the_cluster(cluster: str, transport: str, tmp_path: Path) -> None:
    config = resolve(load_config("quickstart", [f"cluster={cluster}"]))
    assert config.sync.transport == transport
    save_config(config, tmp_path / "config.yaml")
    assert f"transport: {transport}\n" in (tmp_path / "config.yaml").read_text()
    chosen = ["sync.transport=disk", f"cluster={cluster}"]
    assert resolve(load_config("quickstart", chosen)).sync.transport == "disk"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "none without rollout.group_quorum"),
        (["rollout.selection=strict"], "strict would wait"),
        (["rollout.fixed_lag=1"], "lag is not fixed"),
        (["algorithm.advantage=online_dpo", "algorithm.objective=dpo"], "pairs siblings"),
        (["algorithm.advantage=process_mean"], "not those of their steps"),
    ],
)
def test_late_siblings_cannot_be_carried_everywhere(overrides: list[str], says: str) -> None:
    quorum = ["rollout.group_quorum=4", "rollout.slice_tokens=2"] if overrides else []
    carry = ["rollout.late_siblings=carry", *quorum, *overrides]
    with pytest.raises(ConfigError, match=says):
        check(load_config("quickstart", carry), starts=False)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.selection=strict"], "strict trains whole groups"),
        (["rollout.fixed_lag=1"], "no sibling is older than another"),
        (["algorithm.advantage=online_dpo", "algorithm.objective=dpo"], "pairs siblings"),
        (["algorithm.advantage=process_std"], "not those of their steps"),
    ],
)
def test_stale_siblings_cannot_be_dropped_everywhere(overrides: list[str], says: str) -> None:
    check(load_config("quickstart", ["rollout.stale_siblings=drop"]), starts=False)
    with pytest.raises(ConfigError, match=f"stale_siblings = .drop. .*{says}"):
        check(load_config("quickstart", ["rollout.stale_siblings=drop", *overrides]), starts=False)


@pytest.mark.parametrize("override", ["rollout.selection=strict", "rollout.fixed_lag=1"])
def test_later_groups_do_not_fill_the_buffer_before_the_next(override: str) -> None:
    check(load_config("quickstart", ["rollout.admission=unbounded"]), starts=False)
    with pytest.raises(ConfigError, match=r"admission = 'unbounded' .*wait for the next"):
        check(load_config("quickstart", ["rollout.admission=unbounded", override]), starts=False)


def test_a_quorum_is_of_the_group() -> None:
    check(load_config("quickstart", ["rollout.group_quorum=4"]))
    with pytest.raises(ConfigError, match=r"group_quorum = 9 .*group_size = 8"):
        check(load_config("quickstart", ["rollout.group_quorum=9"]))


def test_what_may_be_trained_is_not_cancelled_later() -> None:
    check(load_config("quickstart", ["rollout.cancel_lag=2"]))
    with pytest.raises(ConfigError, match="cancel_lag = 5 is not usable: use at most max_lag = 4"):
        check(load_config("quickstart", ["rollout.cancel_lag=5"]))


def test_ranks_must_divide_the_model() -> None:
    hf = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 16}
    check_model_sizes(ParallelConfig(tp=2, ep=4, dp=4), 2, hf)
    with pytest.raises(ConfigError, match=r"trainer\.parallel\.ep = 3 .* num_experts = 16"):
        check_model_sizes(ParallelConfig(ep=3, dp=3), 1, hf)
    with pytest.raises(ConfigError, match=r"engine\.tp = 3 .* num_attention_heads = 8"):
        check_model_sizes(ParallelConfig(), 3, hf)


def test_stages_must_divide_the_layers() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.parallel\.pp = 3 .* num_hidden_layers = 8"):
        check_model_sizes(ParallelConfig(pp=3), 1, {"num_hidden_layers": 8})
    with pytest.raises(ConfigError, match=r"trainer\.parallel\.vpp = 3 .* stage, \[4, 4\]"):
        check_model_sizes(ParallelConfig(pp=2, vpp=3), 1, {"num_hidden_layers": 8})


def settings_of(schema: type, above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, type, default) of every setting."""
    for item in fields(schema):
        kind = get_type_hints(schema, include_extras=True)[item.name]
        if is_dataclass(kind):
            yield from settings_of(kind, f"{above}{item.name}.")
        else:
            yield f"{above}{item.name}", kind, getattr(schema(), item.name)


SETTINGS = [*settings_of(Config)]
NUMBERS = [name for name, _, default in SETTINGS if type(default) in (int, float)]
UNBOUNDED = {  # rules about several settings bound these
    *("sampling.top_k", "sampling.mask_top_k", "evaluation.top_k", "algorithm.dual_clip"),
    *(f"algorithm.{name}_low" for name in ("icepop", "mis_token", "mis_sequence", "mis_geometric")),
    *(
        f"cluster.ports.{name}"
        for name in ("controller", "blobs", "ray", "rendezvous", "ref_models")
    ),
}
INFINITE = {  # infinity: no limit
    f"algorithm.{name}_high" for name in ("icepop", "mis_token", "mis_sequence", "mis_geometric")
}


def test_numbers_without_a_range_are_known() -> None:
    assert {name for name, kind, _ in SETTINGS if kind in (int, float)} == UNBOUNDED


@pytest.mark.parametrize("name", sorted({*NUMBERS} - UNBOUNDED))
def test_infinity_and_nan_lie_in_no_range(name: str) -> None:
    allowed = {math.inf} if name in INFINITE else set()
    for value in {math.nan, math.inf, -math.inf, -7} - allowed:
        with pytest.raises(ConfigError) as error:
            read_section(Config, nested(name, value))
        assert error.value.field == name
    for value in allowed:
        read_section(Config, nested(name, value))


def nested(name: str, value: Any) -> dict[str, Any]:
    """a.b = 3 as {"a": {"b": 3}}."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("name", [n for n, kind, _ in SETTINGS if get_origin(kind) is Literal])
def test_a_choice_lists_what_may_be_used(name: str) -> None:
    (choices,) = (get_args(kind) for other, kind, _ in SETTINGS if other == name)
    with pytest.raises(ConfigError) as error:
        read_section(Config, nested(name, "nonsense"))
    listed = ", ".join(choices[:-1]) + f" or {choices[-1]}"
    assert str(error.value) == f"{name} = 'nonsense' is not usable: use {listed}"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("run.steps=0", "run.steps = 0 is not usable: a number of at least 1 is needed"),
        ("run.seed=-1", "run.seed = -1 is not usable: a number of at least 0 is needed"),
        ("run.seed=0.5", "run.seed = 0.5 is not usable: int is needed"),
        ("run.seed=.inf", "run.seed = inf is not usable: int is needed"),
        ("sync.bucket_bytes=1", "sync.bucket_bytes = 1 is not usable: a number of at least 1024"),
        ("sync.timeout_s=.inf", "sync.timeout_s = inf is not usable: a finite number above 0"),
        ("sampling.top_p=0", "sampling.top_p = 0.0 is not usable: a number in (0, 1] is needed"),
        ("sampling.min_p=1", "sampling.min_p = 1.0 is not usable: a number in [0, 1) is needed"),
        ("engine.tp_each=[2, x]", "engine.tp_each = [2, 'x'] is not usable: list[int] is needed"),
        ("engine.tp_each={a: 1}", "engine.tp_each = {'a': 1} is not usable: list[int] is needed"),
        ("engine.args=[1]", "engine.args = [1] is not usable: dict[str, Any] is needed"),
        ("engine.args=3", "engine.args = 3 is not usable: dict[str, Any] is needed"),
        ("cluster.nodes=3", "cluster.nodes = 3 is not usable: dict[str, NodeGroup] is needed"),
        ("cluster.nodes.x=3", "cluster.nodes.x = 3 is not usable: it is a section of settings: ro"),
        ("cluster.nodes.x.count=0", "cluster.nodes.x.count = 0 is not usable: a number of at lea"),
        ("cluster.nodes.all.roles=[x]", "cluster.nodes.all.roles = ['x'] is not usable: use some"),
        ("run.seed=${run.x}", "run.seed = '' is not usable: Interpolation key 'run.x' not found"),
    ],
)
def test_a_range_or_a_type_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("quickstart", [name])
    assert str(error.value).startswith(sentence)


def test_a_configuration_made_in_python_is_held_to_its_types() -> None:
    config = load_config("quickstart")
    check(config)
    with pytest.raises(ConfigError, match=r"run.steps = 0 .*at least 1"):
        check(replace(config, run=replace(config.run, steps=0)))
    with pytest.raises(ConfigError, match=r"cluster.nodes.x.roles = \[\] .*some of controller"):
        check(replace(config, cluster=replace(config.cluster, nodes={"x": NodeGroup()})))


def test_yaml_is_read_as_it_is_meant(tmp_path: Path) -> None:
    """off is a choice, 1e-3 a number, an account of digits and a date are texts."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "include: [recipes/quickstart]\n"
        "replay: {routing: off, sampling_mask: off}\n"
        "trainer: {optimizer: {lr: 1e-3}, megatron: {x: 1e-3}}\n"
        "run: {name: 2026-01-31}\n"
        "cluster: {slurm: {account: 1234}}\n"
    )
    config = load_config(str(recipe))
    assert (config.replay.routing, config.replay.sampling_mask) == ("off", False)
    assert config.trainer.optimizer.lr == config.trainer.megatron["x"] == 1e-3
    assert config.run.name == "2026-01-31"
    assert config.cluster.slurm["account"] == "1234"
    assert load_config("quickstart", ["replay.routing=off"]).replay.routing == "off"


def test_defaults_are_their_own_choices() -> None:
    check(Config())


def test_a_truncating_recipe_gets_the_bound() -> None:
    config = resolve(load_config("quickstart", ["sampling.top_k=-1", "sampling.mask_top_k=77"]))
    assert config.sampling.top_k == 77
    free = resolve(load_config("quickstart", ["sampling.top_k=-1", "sampling.top_p=1.0"]))
    assert free.sampling.top_k == -1


def test_saved_configuration_comes_back_equal(tmp_path: Path) -> None:
    config = resolve(load_config("quickstart", ["engine.args.log_level=info", "run.seed=9"]))
    save_config(config, tmp_path / "config.yaml")
    place = replace(config.run, root=str(tmp_path.parent), name=tmp_path.name)
    assert load_saved(tmp_path / "config.yaml") == replace(config, run=place)


def test_every_field_is_described_in_the_schema_by_a_type() -> None:
    def walk(section: object) -> None:
        for item in fields(section):  # type: ignore[arg-type]
            value = getattr(section, item.name)
            assert item.type, item.name
            if is_dataclass(value):
                walk(value)

    walk(Config())


# --- through the command line --------------------------------------------------------------------
def fails(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    assert isinstance(result.exception, ConfigError), result.exception
    return str(result.exception)


def test_a_dry_run_refuses_a_reward_that_does_not_exist() -> None:
    for value in ("no_such_module:f", "ftp://host/reward"):
        for dry in ([], ["--dry-run"]):
            text = fails("train", "quickstart", f"task.reward={value}", *dry)
            assert text.startswith(f"task.reward = '{value}' is not usable: ")
    good = ["train", "quickstart", "task.reward=tests.helpers.run_rewards:digit_share", "--dry-run"]
    done = CliRunner().invoke(app, good)  # negative control
    assert done.exit_code == 0, done.output


def test_missing_model_folder() -> None:
    text = fails("train", "quickstart", "model.tiny.enabled=false", "model.path=/no/such")
    assert text.startswith("model.path = '/no/such' is not usable: a Hugging Face model folder")


def test_a_model_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    assert "no *.safetensors" in fails("train", "quickstart", f"model.path={tmp_path}")


def test_unreadable_prompt_file(tmp_path: Path) -> None:
    text = fails("train", "quickstart", "task.name=jsonl", f"task.path={tmp_path}/none.jsonl")
    assert text.startswith("task.path = ")
    assert "JSON lines" in text


def test_unknown_recipe_lists_the_known_ones() -> None:
    assert "quickstart" in fails("train", "no-such-recipe")


def test_resume_of_nothing() -> None:
    assert fails("train", "--resume", "no-such-run").startswith("--resume = 'no-such-run'")


def test_dry_run_starts_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["train", "quickstart", f"run.root={tmp_path}", "--dry-run", "--run", "x"]
    )
    assert result.exit_code == 0, result.output
    assert "moerl.distributed.torchrun" in result.output
    assert "trainer rank" in result.output
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_a_start_would() -> None:
    sentence = fails("train", "quickstart", "engine.tp=3", "--dry-run")
    assert sentence.startswith("engine.tp = 3 is not usable: it must divide the model's num_att")


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a run with 20 steps behind it."""
    run = RunDir(tmp_path / "mine")
    run.create()
    model = tmp_path / "model"
    make_tiny_model(model, TinyModel(enabled=True), seed=0)
    config = load_config(
        "quickstart", [f"model.path={model}", f"run.root={tmp_path}", "run.steps=20"]
    )
    save_config(replace(config, run=replace(config.run, name="mine")), run.config)
    run.checkpoint(20).mkdir()
    manifest = resume_facts(config) | {"step": 20, "files": {"metadata.json": [2, ""]}}
    (run.checkpoint(20) / "manifest.json").write_text(json.dumps(manifest))
    (run.checkpoint(20) / "metadata.json").write_text("{}")
    return run.root


def test_a_resume_is_checked_before_anything_starts(finished: Path) -> None:
    sentence = fails("train", "--resume", str(finished), "run.steps=2")
    assert sentence == "run.steps = 2 is not usable: 20 steps are done; use at least that"
    assert fails("train", "--resume", str(finished), "--run", "x").startswith("--run = 'x'")
    wider = ["trainer.parallel.ep=1", "trainer.parallel.dp=1"]
    assert "--reset-optimizer" in fails("train", "--resume", str(finished), *wider)


def test_a_checkpoint_without_its_manifest_is_named(finished: Path) -> None:
    manifest = finished / "checkpoints/step-000020/manifest.json"
    manifest.write_text("{")
    with pytest.raises(ModelError, match=r"manifest\.json: not JSON"):
        read_manifest(manifest.parent)
    manifest.unlink()
    done = CliRunner().invoke(app, ["train", "--resume", str(finished)])
    assert isinstance(done.exception, ModelError)
    assert str(done.exception) == f"{manifest}: there is no such file"


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.root = .*/file' .*/file/x cannot be made: Not a"):
        RunDir(tmp_path / "file" / "x").create()


def test_a_dry_run_of_a_resume_starts_nothing(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moerl.cli._guarded", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr("moerl.planning.dry_run.describe", lambda config, words: f"{words}")
    done = CliRunner().invoke(app, ["train", "--resume", str(finished), "--dry-run"])
    assert (done.exit_code, done.output) == (0, f"['--resume', '{finished}']\n")


@pytest.mark.parametrize("name", ["007", "1e3", "true", "null"])
def test_a_run_is_named_as_it_was_called(name: str) -> None:
    assert load_config("quickstart", _named_run(name)).run.name == name


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--records", "none.jsonl", "an existing .jsonl, .npz or .step file"),
        ("--records", "README.md", "an existing .jsonl, .npz or .step file"),
        ("--page", "no/such/folder/x.html", "its folder does not exist"),
        ("--keep", "docs", "it exists; name a new folder"),
    ],
)
def test_mismatch_refuses_before_it_starts_an_engine(option: str, value: str, says: str) -> None:
    assert fails("mismatch", "quickstart", option, value) == (
        f"{option} = '{value}' is not usable: {says}" + (" is needed" if "file" in says else "")
    )


def test_mismatch_needs_a_token() -> None:
    done = CliRunner().invoke(app, ["mismatch", "quickstart", "--tokens", "0"])
    assert done.exit_code == 2
    assert "--tokens" in done.output


def test_a_report_is_made_of_what_is_there(finished: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(finished)])
    assert (done.exit_code, done.output) == (0, f"{finished}/report.html\n")
    assert "Stopped before the first step" in (finished / "report.html").read_text()
    assert fails("report", "no-such-run").startswith("RUN = 'no-such-run'")


def test_a_run_that_is_over_has_no_engines(finished: Path) -> None:
    done = CliRunner().invoke(app, ["engines", "list", str(finished)])
    assert "is not being trained now" in str(done.exception)
    assert done.output == ""


@pytest.mark.parametrize("command", [c.callback.__name__ for c in _commands() if c.callback])
def test_every_command_says_what_it_does_with_an_example(command: str) -> None:
    words = command.removeprefix("engines_").replace("_", "-").split()
    group = ["engines"] if command.startswith("engines_") else []
    done = CliRunner().invoke(app, [*group, *words, "--help"])
    assert done.exit_code == 0
    assert f"moerl {' '.join([*group, *words])} " in done.output.partition("Example")[2]
