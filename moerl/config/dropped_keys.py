"""Keys that settings had once: a recipe with one of them is refused, and nothing is translated."""

from __future__ import annotations

_MOVED = {  # below task, and below an entry of tasks
    "agent.environment": "environment",
    "agent.options": "environment_options",
    **{
        f"agent.{name}": name
        for name in (
            *("environment_workers", "environment_s", "tools", "tool_s"),
            *("max_turns", "max_sampled_tokens", "context_tokens", "wall_s"),
            *("call_format", "reasoning_format"),
        )
    },
}
_REWARD = "agent.reward"
_GROUPS = "rollout.groups_per_request"
_TEACHER = "algorithm.teacher"


def dropped_key(field: str) -> str:
    """A sentence about a key that is no more, with the name of the new one; empty for others.

    field: its dotted name.
    """
    if field == _GROUPS:
        return "there is no such key any more: groups that start together travel together"
    if field == _TEACHER:
        return "use algorithm.teachers=[{path: FOLDER}]"
    if not field.startswith(("task.", "tasks.")):
        return ""
    above, last = field.rsplit(".", 2)[0], ".".join(field.rsplit(".", 2)[1:])
    if last in _MOVED:
        return f"use {above}.{_MOVED[last]}; task.agent is for programs alone"
    if last == _REWARD:
        return (
            f"use {above}.reward: empty for the agent's own, source for that of the source of "
            "prompts, or a name"
        )
    return ""
