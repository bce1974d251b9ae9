"""The newest row of a run as Prometheus text, for callers with the run's token alone."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from moerl.core.errors import ConfigError
from moerl.observe.metrics import MetricsWriter
from moerl.observe.sinks import PrometheusServer, exposition
from moerl.runtime.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "r1")


@pytest.fixture
def server(run: RunDir) -> Iterator[PrometheusServer]:
    server = PrometheusServer(run, "127.0.0.1", _free_port(), "secret")
    yield server
    server.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _get(url: str, token: str = "secret") -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_newest_row_is_served_behind_the_token(run: RunDir, server: PrometheusServer) -> None:
    assert _get(server.url) == (200, ""), "no step yet"
    writer = MetricsWriter(run.metrics)
    for step in range(2):
        writer.write(step, "0.1", {"reward/mean": step + 0.5}, time_s=7.0)
    assert _get(server.url) == (
        200,
        '# TYPE moerl_step gauge\nmoerl_step{run="r1"} 1\n'
        '# TYPE moerl_time_s gauge\nmoerl_time_s{run="r1"} 7.0\n'
        '# TYPE moerl_reward_mean gauge\nmoerl_reward_mean{run="r1"} 1.5\n',
    )
    for stranger in ("", "guess", "secret2"):
        assert _get(server.url, stranger) == (401, "")
    assert _get(server.url.replace("/metrics", "/other"))[0] == 404
    with pytest.raises(ConfigError, match=r"observe\.prometheus_port = \d+ .* use a free port"):
        PrometheusServer(run, "127.0.0.1", int(server.url.split(":")[2].split("/")[0]), "x")


def test_names_and_labels_are_valid(tmp_path: Path) -> None:
    text = exposition({"a/b-c": 1.0, "a/b_c": 2.0, "nonfinite": ["x"], "version": "0.1"}, 'r"\n\\')
    assert text == '# TYPE moerl_a_b_c gauge\nmoerl_a_b_c{run="r\\"\\n\\\\"} 1.0\n', "once each"
