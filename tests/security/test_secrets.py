"""The value of a setting that is named as a secret is in nothing that people share."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from moerl import cli
from moerl.config import load_config, save_config
from moerl.config.load import load_saved
from moerl.config.schema import Config, EngineConfig
from moerl.config.secret_values import HIDDEN, hide_override, hide_value, refuse_hidden
from moerl.core.errors import ConfigError
from moerl.core.rpc import Keys
from moerl.data.tasks import load_tokenizer
from moerl.distributed.token_server import ServerAddress
from moerl.engine.host.host import EngineContext
from moerl.engine.host.server_args import server_args
from moerl.launch.run_context import RunContext
from moerl.launch.train import ray_token
from moerl.observe.report import write_report
from moerl.planning.dry_run import describe
from moerl.runtime.run_dir import RunDir
from moerl.trainer.train_loop import RankContext

SECRET = "s3cr3t-value"
NAMES = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "credentials")


def configured() -> Config:
    words = [f"cluster.environment.{name}={SECRET}" for name in NAMES]
    words += [f"cluster.environment.https_proxy=http://me:{SECRET}@proxy:3128"]
    words += ["task.agent.models.judge.base_url=http://h/v1"]
    words += [f"task.agent.models.judge.api_key={SECRET}"]
    return load_config("quickstart-smoke", [*words, "cluster.environment.NCCL_DEBUG=INFO"])


def run_context(config: Config, run: RunDir, folder: Path) -> RunContext:
    return RunContext(
        config=config,
        run=run,
        model_path=folder,
        hf_config={},
        token=SECRET,
        incarnation=0,
        node="local",
        blob_dir=folder,
        checkpoint=None,
    )


def test_files_of_a_run_hide_them_and_a_resume_has_them(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    config = configured()
    config = replace(config, run=replace(config.run, root=str(tmp_path), name="run"))
    save_config(config, run.config)
    write_report(run, config, {})
    holding = {path.name for path in run.root.iterdir() if path.is_file() and has_it(path)}
    assert holding == {"secrets.yaml"}
    assert stat.S_IMODE((run.root / "secrets.yaml").stat().st_mode) == 0o600
    assert "NCCL_DEBUG: INFO" in run.config.read_text(encoding="utf-8")
    assert load_saved(run.config) == config
    other = load_saved(run.config, ["cluster.environment.HF_TOKEN=new"])
    assert other.cluster.environment["HF_TOKEN"] == "new"


def has_it(path: Path) -> bool:
    return SECRET in path.read_text(encoding="utf-8")


def test_a_configuration_without_its_secrets_does_not_start(tmp_path: Path) -> None:
    save_config(configured(), tmp_path / "config.yaml")
    refuse_hidden(load_saved(tmp_path / "config.yaml"))
    (tmp_path / "secrets.yaml").unlink()
    with pytest.raises(ConfigError, match=r"was in secrets\.yaml") as refusal:
        refuse_hidden(load_saved(tmp_path / "config.yaml"))
    assert refusal.value.field == "task.agent.models.judge.api_key"


def test_secrets_of_an_earlier_start_go(tmp_path: Path) -> None:
    save_config(configured(), tmp_path / "config.yaml")
    save_config(load_config("quickstart-smoke"), tmp_path / "config.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_dry_run_hides_them_in_settings_and_in_commands() -> None:
    words = [
        f"cluster.environment={{HF_TOKEN: {SECRET}, A: b}}",
        f"cluster.environment.K_KEY={SECRET}",
    ]
    text = describe(configured(), ["quickstart-smoke", *words, "--run", "a"])
    assert SECRET not in text
    assert "cluster.environment.K_KEY=(hidden)" in text
    assert "A: b" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 8),
        ("engine.args.tokenizer_path", "/models/x"),
        ("HF_TOKEN", ""),
        ("image", "registry:5000/a@sha256:00"),
    ],
)
def test_other_values_are_shown(name: str, value: object) -> None:
    assert hide_value(name, value) == value


def test_words_of_a_command_are_hidden_as_little_as_possible() -> None:
    for word in ("quickstart", "--run", "run.steps=3", "engine.args={tokenizer_path: a}", "a={"):
        assert hide_override(word) == word
    assert hide_override("engine.args={api_key: x}") == "engine.args=api_key: (hidden)"


def test_refusals_do_not_show_them() -> None:
    for word in (
        f"cluster.environment.HF_TOKEN=[{SECRET}]",
        f"cluster.HF_TOKEN={SECRET}",
        f"cluster.environment.HF_TOKEN={{{SECRET}",
        f"task.agent.models.judge.api_key=[{SECRET}]",
        f"task.agent.models.judge.apikey={SECRET}",
    ):
        with pytest.raises(ConfigError) as refusal:
            load_config("quickstart-smoke", [word])
        assert SECRET not in str(refusal.value), word
        assert HIDDEN in str(refusal.value)


def test_objects_do_not_print_tokens(tmp_path: Path) -> None:
    config, run = configured(), RunDir(tmp_path)
    context = run_context(config, run, tmp_path)
    shown = [
        config,
        context,
        RankContext(run, "", Keys(SECRET.encode(), SECRET.encode()), 0, None, None),  # type: ignore[arg-type]
        EngineContext(tmp_path, None, config.replay, run, SECRET),  # type: ignore[arg-type]
        ServerAddress("127.0.0.1", 1, SECRET),
    ]
    for one in shown:
        assert SECRET not in repr(one), type(one)


def test_each_start_has_a_token_of_its_own_for_ray() -> None:
    """A variable that the user has set would join two runs."""
    config = load_config("quickstart-smoke")
    given = {"RAY_AUTH_TOKEN": SECRET}
    assert len({SECRET, ray_token(config, given), ray_token(config, given)}) == 3
    joins = replace(config, cluster=replace(config.cluster, ray="127.0.0.1:1"))
    assert ray_token(joins, given) == SECRET
    with pytest.raises(ConfigError, match="the environment needs RAY_AUTH_TOKEN"):
        ray_token(joins, {})


def test_the_last_line_moves_no_cursor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cause may quote what a model, a data set or another process wrote."""

    def fail(**_: object) -> None:
        raise ConfigError("model.path", "x", "\x1b[2J\x1b]0;title\x07 \x9b31m\r bad \ud800\nnext")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit):
        cli.main()
    line = capsys.readouterr().err
    assert line.endswith("next\n")
    assert all(character.isprintable() or character == "\n" for character in line)


def test_an_engine_that_runs_code_of_its_model_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(args={"trust_remote_code": True}, platform="cpu")
    settings = {"routing": False, "version": "0.0", "port": 1, "nccl_port": 2}
    server_args(config, Path("/models/x"), **settings)  # type: ignore[arg-type]
    assert "trust_remote_code is set: the engine runs code of /models/x" in caplog.text


def test_tokenizers_run_no_code_of_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left to its default, transformers asks on the terminal of the run."""
    asked: list[bool | None] = []

    def from_pretrained(*_: object, trust_remote_code: bool | None = None, **__: object) -> None:
        asked.append(trust_remote_code)

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    load_tokenizer(tmp_path)
    context = run_context(configured(), RunDir(tmp_path), tmp_path)
    context.tokenizer()
    assert asked == [False, False]
