"""Environments of the package ``verifiers`` (0.4) as environments of conversations; see docs/verifiers.md.

``verifiers`` runs its own rollout, which requests completions from a model. Here this is inverted: the model is an
endpoint on 127.0.0.1 in this process, whose requests wait until the driver sends the student's turn.

These files import nothing else of the project: they run in the Python of ``rollout.environment_python``, which has
``verifiers``. As a program, this file writes the tasks of an environment as rows for ``data.train_files``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from recipe_gkd.conversations.adapters.completions_endpoint import Endpoint
    from recipe_gkd.conversations.adapters.inverted_rollout import (
        HistoryError,
        InvertedRollout,
        Message,
        Request,
        RolloutFailed,
        parse_json,
        plain,
    )
else:  # loaded by its path
    from completions_endpoint import Endpoint
    from inverted_rollout import HistoryError, InvertedRollout, Message, Request, RolloutFailed, parse_json, plain

TASK_COLUMN = "verifiers_task"
NO_KEY = "VERIFIERS_STUDENT_HAS_NO_KEY"
"""Variable for the API key of the endpoint. It is not set, so that no real key is sent."""
REAP_S = 0.5
"""Time in which an event loop receives the exit statuses of killed processes before it is closed."""


class Host:
    """An environment of ``verifiers``, and the endpoint that its rollouts use as their model.

    Attributes:
        env: The environment.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        import verifiers.v1 as vf

        self.env = vf.load_environment(vf.resolve_env_config(with_null_harness(config)))
        self._endpoint = Endpoint()
        self._url: str | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve rollouts in the body."""
        async with self.env.serving(), self._endpoint.serve() as self._url:
            yield

    def rollout(self, task_json: str) -> InvertedRollout:
        """Return a rollout of a task, which is not started."""
        task = type(self.env.taskset).task_type()
        data = task.data_type().model_validate_json(task_json)
        rollout = InvertedRollout(lambda: self._run(task(data, self.env.config.taskset.task), rollout))
        return rollout

    async def _run(self, task: Any, rollout: InvertedRollout) -> Any:
        import verifiers.v1 as vf

        assert self._url is not None
        client = vf.EvalClientConfig(base_url=self._url, api_key_var=NO_KEY)
        traces: list[str] = []

        def register(trace: Any) -> None:
            traces.append(trace.id)
            self._endpoint.rollouts[trace.id] = rollout

        try:
            return await self.env.run_episode(task, vf.ModelContext(model="student", client=client), on_trace=register)
        finally:
            for trace in traces:
                del self._endpoint.rollouts[trace]


def with_null_harness(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration in which ``harness.id=null`` is the harness ``null`` of verifiers, not a missing value."""
    found = {name: with_null_harness(value) if isinstance(value, Mapping) else value for name, value in config.items()}
    if isinstance(harness := found.get("harness"), dict) and harness.get("id", "") is None:
        harness["id"] = "null"
    return found


def step_of(episode: Any, trace_id: str | None) -> dict[str, Any]:
    """Return the last step of a conversation: reward, and rewards and metrics by their names.

    Args:
        episode: Result of ``verifiers``.
        trace_id: Trace of the student. None if no turn was requested.

    Raises:
        RolloutFailed: The episode has errors, or no trace of the student.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    trace = next((trace for trace in episode.traces if trace.id == trace_id), None)
    if not episode.ok or trace is None:
        reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise RolloutFailed(f"the rollout of verifiers failed: {reasons or 'it requested no turn of the student'}")
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    return {"done": True, "reward": trace.reward, "info": {**scores, **trace.metrics}}


class Verifiers:
    """Environment of the package ``verifiers``.

    ``rollout.environment_kwargs`` are the ``env`` block of ``verifiers``' configuration, such as
    ``{taskset: {id: my_env}, agent: {runtime: {type: subprocess}}}``.
    """

    tools: list[dict[str, Any]] = []  # noqa: RUF012 - setup_process sets it
    _host: Host | None = None
    _ready: asyncio.Future[None] | None = None
    _server: asyncio.Task[None] | None = None

    @classmethod
    def setup_process(cls, **config: Any) -> None:
        """Load the environment, and run its first task until it requests a turn, to find its tools."""
        cls._host = host = Host(config)
        first = next(iter(host.env.taskset), None)
        if first is None:
            raise RolloutFailed(f"the taskset {host.env.config.taskset.id} has no task")

        async def find_tools() -> list[dict[str, Any]]:
            async with host.serving():
                rollout = host.rollout(_json_of(first))
                try:
                    return (await _first_request(rollout)).tools
                finally:
                    await rollout.close()
                    await asyncio.sleep(REAP_S)

        cls.tools = asyncio.run(find_tools())

    def __init__(self, **config: Any) -> None:
        self._rollout: InvertedRollout | None = None

    async def reset(self, row: dict[str, Any]) -> list[Message] | None:
        """Start the rollout of the row's task, and return the messages of its first request."""
        if not isinstance(task := (row["extra"] or {}).get(TASK_COLUMN), str):
            raise ValueError(
                f"the row has no text in the column {TASK_COLUMN}. Write the rows with {Path(__file__).name}; see "
                "docs/verifiers.md"
            )
        host = await self._serving()
        self._rollout = host.rollout(task)
        request = await _first_request(self._rollout)
        self._check_tools(request)
        prompt = row["prompt"] if isinstance(row["prompt"], list) else []
        return None if request.messages == list(map(plain, prompt)) else request.messages

    @classmethod
    async def _serving(cls) -> Host:
        """Return the host, which the first conversation of the process starts."""
        host = cls._host
        assert host is not None, "setup_process has loaded it"
        if cls._ready is None:
            cls._ready = ready = asyncio.get_running_loop().create_future()

            async def serve() -> None:
                try:
                    async with host.serving():
                        ready.set_result(None)
                        await asyncio.Event().wait()
                except Exception as error:  # noqa: BLE001 - each conversation reports it
                    if not ready.done():
                        ready.set_exception(error)

            # Its context belongs to no conversation.
            cls._server = asyncio.get_running_loop().create_task(serve(), context=contextvars.Context())
        await asyncio.shield(cls._ready)
        return host

    def _check_tools(self, request: Request) -> None:
        if request.tools != self.tools:
            names = [[tool["function"]["name"] for tool in tools] for tools in (request.tools, self.tools)]
            raise HistoryError(
                f"the request has the tools {names[0]}, but the prompt describes the tools {names[1]} of the first "
                "task; all tasks of a run and all their turns must have the same tools"
            )

    async def step(self, message: Message, tool_calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Complete the waiting request with the student's message, and return the messages of the next one."""
        assert self._rollout is not None
        request = await self._rollout.reply(message)
        if request is None:
            return step_of(self._rollout.result, self._rollout.source)
        self._check_tools(request)
        return {"messages": request.messages, "done": False}

    async def close(self) -> None:
        """Cancel the rollout."""
        if self._rollout is not None:
            await self._rollout.close()


async def _first_request(rollout: InvertedRollout) -> Request:
    request = await rollout.start()
    if request is None:
        step_of(rollout.result, rollout.source)
        raise RolloutFailed("the rollout of verifiers ended without a turn of the student")
    return request


def _json_of(task: Any) -> str:
    return str(task.data.model_dump_json(exclude_none=True))


def row_of(task: Any, taskset_id: str) -> dict[str, Any]:
    """Return the row of a task."""
    data = task.data
    prompt = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt
    messages = [plain(each if isinstance(each, dict) else each.model_dump()) for each in prompt or []]
    if data.system_prompt:
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    # The environment opens such a conversation, so that reset replaces the prompt.
    messages = messages or [{"role": "user", "content": ""}]
    row = {"prompt": messages, "data_source": taskset_id, TASK_COLUMN: _json_of(task)}
    return row | ({"ground_truth": str(data.answer)} if getattr(data, "answer", None) is not None else {})


def parse_config(pairs: Sequence[str]) -> dict[str, Any]:
    """Return ``a.b=value`` pairs as a nested dict. Values are JSON, or text.

    Raises:
        ValueError: A pair has no ``=``.
    """
    config: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator:
            raise ValueError(f"got {pair!r}, expected KEY=VALUE, such as taskset.id=my_env")
        *groups, last = key.split(".")
        inner = config
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = parse_json(value)
    return config


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the program."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSONL file")
    parser.add_argument("--skip", type=int, default=0, help="number of tasks to leave out at the beginning")
    parser.add_argument("--limit", type=int, help="maximum number of tasks")
    parser.add_argument("config", nargs="+", help="keys of rollout.environment_kwargs, such as taskset.id=my_env")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the tasks of an environment of verifiers as rows, in JSON lines."""
    parser = make_parser()
    given = parser.parse_intermixed_args(arguments)
    try:
        env = Host(parse_config(given.config)).env
    except ValueError as error:  # pydantic's errors too
        parser.error(str(error))
    tasks = env.taskset.skip(given.skip) if given.skip else env.taskset
    if given.limit is not None:
        tasks = tasks.take(given.limit)
    elif not tasks.bounded:
        parser.error("the taskset is infinite: give --limit")
    rows = [json.dumps(row_of(task, env.config.taskset.id), ensure_ascii=False) for task in tasks]
    given.output.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    print(f"{given.output}: {len(rows)} rows", file=sys.stderr)


if __name__ == "__main__":
    main()
