"""Tool environment: a server of verifiers adds numbers, and its calls are counted in the state."""

import verifiers.v1 as vf


class Count(vf.State):
    calls: int = 0


class ToolConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Calculator(vf.Toolset[vf.ToolsetConfig, Count]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        self.state.calls += 1
        return str(a + b)


class ToolData(vf.TaskData):
    answer: str


class ToolTask(vf.Task[ToolData, Count, ToolConfig]):
    @classmethod
    def toolsets(cls, config: ToolConfig) -> list[vf.Toolset]:
        return [Calculator(config.tools)]

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(trace.state.calls)


class ToolTasksetConfig(vf.TasksetConfig):
    task: ToolConfig = ToolConfig()


class ToolTaskset(vf.Taskset[ToolTask, ToolTasksetConfig]):
    def load(self) -> list[ToolTask]:
        return [ToolTask(ToolData(prompt="12+34=", answer="46"), self.config.task)]


if __name__ == "__main__":
    Calculator.run()

__all__ = ["ToolTaskset"]
