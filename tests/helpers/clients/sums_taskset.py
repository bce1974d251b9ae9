"""A verifiers environment as its users write them: a task with a tool in a server of its own.

verifiers finds it by its name and starts it as a program for the tool.
"""

from __future__ import annotations

import verifiers.v1 as vf


class SumsToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None  # the model knows the tool as plain `add`

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two integers."""
        return str(a + b)


class SumsTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumsTask(vf.Task[vf.TaskData, vf.State, SumsTaskConfig]):
    @classmethod
    def toolsets(cls, config: SumsTaskConfig) -> list[vf.Toolset]:
        return [SumsToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def results(self, trace: vf.Trace) -> float:
        """Results of the tool in the conversation; ten are enough."""
        return min(len(list(trace.tool_messages)), 10) / 10


class SumsTasksetConfig(vf.TasksetConfig):
    task: SumsTaskConfig = SumsTaskConfig()


class SumsTaskset(vf.Taskset[SumsTask, SumsTasksetConfig]):
    def load(self) -> list[SumsTask]:
        return [
            SumsTask(
                vf.TaskData(idx=idx, prompt=f"What is {idx} + 4?", system_prompt="You add."),
                self.config.task,
            )
            for idx in range(8)
        ]


__all__ = ["SumsTaskset"]

if __name__ == "__main__":
    SumsToolset.run()
