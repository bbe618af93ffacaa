"""Several turns: a number is guessed, and the environment replies. Some tasks have a fault."""

import asyncio

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: str
    fault: str = ""


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        if self.data.fault == "scoring":
            raise KeyError("the referee is ill")
        return float(trace.last_reply == self.data.number)

    @vf.intercept
    async def rewrite(self, response: vf.Response) -> vf.Response | None:
        if self.data.fault != "rewrite":
            return None
        return response.model_copy(update={"message": vf.AssistantMessage(content="9")})

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> list[GuessTask]:
        faults = ["", "scoring", "agents", "rewrite", "waits"]
        return [GuessTask(GuessData(prompt="3", number="7", fault=fault), self.config.task) for fault in faults]


class GuessConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        fault = task.data.fault
        async with agents.agent.interaction(task) as game:
            reply = await game.turn()
            for _ in range(3):
                if reply.terminated or reply.last_reply == task.data.number:
                    break
                if fault == "waits":
                    await asyncio.sleep(3600)
                reply = await game.turn("0")
        if fault == "agents":
            await agents.agent.run(task)


__all__ = ["GuessEnv", "GuessTaskset"]
