"""OpenEnv's own server with an environment that echoes, two sessions at once; prints its port."""

from __future__ import annotations

import os
import socket
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Said(Action):
    message: str


class Echo(Observation):
    echoed: str


class EchoEnvironment(Environment[Said, Echo, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Echo:
        self._state = State(episode_id=episode_id, step_count=0)
        return Echo(echoed=f"{episode_id} begins", reward=None, done=False)

    def step(self, action: Said, timeout_s: float | None = None, **given: Any) -> Echo:
        if action.message == "fail":
            raise ValueError("no echo")
        self._state.step_count += 1
        count = self._state.step_count
        return Echo(echoed=f"{count}: {action.message}", reward=0.25 * count, done=count == 3)

    @property
    def state(self) -> State:
        return self._state


def main() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app = create_fastapi_app(EchoEnvironment, Said, Echo, max_concurrent_envs=2)
    os.write(1, f"{listener.getsockname()[1]}\n".encode())
    # Pings come within the time that the test thinks.
    config = uvicorn.Config(app, log_level="warning", ws_ping_interval=0.5, ws_ping_timeout=0.5)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
