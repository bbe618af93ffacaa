from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from recipe_gkd.config.schema.reward import RewardFunctionEntry
from recipe_gkd.data.samples import Reward
from recipe_gkd.errors import ConfigError, RewardError
from recipe_gkd.rewards import RewardItem, RewardScorer, process
from tests._support.errors import raises
from tests._support.reward_files import item, reward_file, settings
from tests._support.waiting import FOREVER_S, PATIENCE_S, wait_until


def score(path: Path | None, items: Sequence[RewardItem], **values: Any) -> list[float]:
    return [reward.score for reward in rewards_of(path, items, **values)]


def rewards_of(path: Path | None, items: Sequence[RewardItem], **values: Any) -> list[Reward]:
    with RewardScorer(settings(path, **values)) as scorer:
        return [reward for reward in asyncio.run(scorer.score(items)) if reward is not None]


def has_ended(pid: int) -> bool:
    """Wait for the end of a process. Return False if it still runs after the limit of every wait."""
    try:
        psutil.Process(pid).wait(PATIENCE_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


class TestScore:
    @pytest.mark.parametrize(("n_items", "num_workers"), [(0, 1), (1, 3), (100, 3)])
    def test_rewards_are_in_the_order_of_items(self, tmp_path: Path, n_items: int, num_workers: int) -> None:
        path = reward_file(
            tmp_path, "return float(response) + ground_truth[0] + extra['more'] + (prompt[0]['role'] == 'user')"
        )
        items = [
            item(uid, str(uid), prompt=[{"role": "user", "content": "?"}], ground_truth=[1000], extra={"more": 10_000})
            for uid in range(n_items)
        ]
        assert score(path, items, num_workers=num_workers) == [11_001.0 + uid for uid in range(n_items)]

    def test_concurrent_requests_share_the_processes(self, tmp_path: Path) -> None:
        path = reward_file(tmp_path, "return int(response)")

        async def score_groups(scorer: RewardScorer) -> list[list[Reward]]:
            groups = [[item(uid, str(uid)) for uid in range(start, start + 50)] for start in (0, 50, 100)]
            return await asyncio.gather(*(scorer.score(group) for group in groups))

        with RewardScorer(settings(path, num_workers=2)) as scorer:
            rewards = asyncio.run(score_groups(scorer))
        scores = [[reward.score for reward in group] for group in rewards]
        assert scores == [[float(uid) for uid in range(start, start + 50)] for start in (0, 50, 100)]

    def test_calls_run_in_parallel(self, tmp_path: Path) -> None:
        """Each call waits until the other one has started."""
        body = """\
            folder = pathlib.Path(ground_truth)
            (folder / f"started-{response}").touch()
            while len(list(folder.glob("started-*"))) < 2:
                time.sleep(0.01)
            return 1
        """
        path = reward_file(tmp_path, body, before="import pathlib, time")
        items = [item(uid, str(uid), ground_truth=str(tmp_path)) for uid in range(2)]
        assert score(path, items, num_workers=2) == [1.0, 1.0]

    def test_items_are_sent_in_chunks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes: list[int] = []
        send = Connection.send

        def count_and_send(connection: Connection, message: Any) -> None:
            if isinstance(message, list):
                sizes.append(len(message))
            send(connection, message)

        monkeypatch.setattr(Connection, "send", count_and_send)
        path = reward_file(tmp_path, "return float(response == ground_truth)")
        score(path, [item(uid) for uid in range(512)], num_workers=2)
        assert sizes == [16] * 32

    def test_any_number_is_a_reward(self, tmp_path: Path) -> None:
        texts = ["True", "np.bool_(True)", "np.array(0.5)", "np.float32(0.5)", "Decimal('0.25')", "Fraction(1, 4)", "3"]
        before = "import numpy as np\nfrom decimal import Decimal\nfrom fractions import Fraction"
        path = reward_file(tmp_path, "return eval(response)", before=before)
        rewards = score(path, [item(uid, text) for uid, text in enumerate(texts)])
        assert rewards == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 3.0] and all(type(reward) is float for reward in rewards)

    def test_output_of_the_process_is_not_lost(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "sitecustomize.py").write_text("import sys; print('from its start', file=sys.stderr)")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
        path = reward_file(
            tmp_path, "print('to stdout'); print('to stderr', file=sys.stderr); return 1", before="import sys"
        )
        score(path, [item()])
        printed = capfd.readouterr()
        assert "to stdout" in printed.out and "to stderr" in printed.err and "from its start" in printed.err

    def test_file_imports_its_siblings_and_the_packages_of_the_driver(self, tmp_path: Path) -> None:
        (tmp_path / "sibling.py").write_text("ONE = 1")
        path = reward_file(tmp_path, "return sibling.ONE", before="import sibling\nimport recipe_gkd.errors")
        assert score(path, [item()]) == [1.0]

    @pytest.mark.parametrize(
        "text",
        [
            pytest.param(
                "def compute_score(data_source, solution_str, ground_truth, extra_info=None, method='strict'):\n"
                "    right = (data_source, ground_truth, extra_info) == ('math', 'a truth', {'index': 3})\n"
                "    return {'score': float(solution_str) * right, 'acc': True}",
                id="verl",
            ),
            pytest.param(
                "def compute_score(*, ground_truth, response, **other):\n"
                "    return float(response) * (set(other) == {'prompt', 'extra'} and other['prompt'] == 'a prompt')",
                id="keywords",
            ),
        ],
    )
    def test_values_reach_parameters_by_name(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "my_reward.py"
        path.write_text(text)
        extra = {"extra_info": {"index": 3}, "level": 1}
        assert score(path, [item(uid, str(uid), extra=extra, data_source="math") for uid in (1, 2)]) == [1.0, 2.0]


class TestAsyncFunction:
    def test_calls_are_concurrent_up_to_the_limit_and_in_order(self, tmp_path: Path) -> None:
        """Each call waits until three calls are open; later items end first."""
        body = """\
            global n_open, most
            n_open += 1
            most = max(most, n_open)
            while most < 3:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02 / (1 + int(response)))
            n_open -= 1
            return {"score": int(response), "most": most}
        """
        path = reward_file(tmp_path, body, before="import asyncio\nn_open = most = 0\nasync \\")
        found = rewards_of(path, [item(uid, str(uid)) for uid in range(20)], max_concurrency=3)
        assert [reward.score for reward in found] == list(range(20))
        assert {reward.numbers["most"] for reward in found} == {3.0}

    @pytest.mark.parametrize(
        ("body", "kind", "trace"),
        [
            ("return 1 / 0", "exception", ("my_reward.py", "ZeroDivisionError")),
            ("raise asyncio.CancelledError", "exception", ("CancelledError",)),
            ("await asyncio.sleep(3600)", "timeout", ('my_reward.py", line 5',)),
            ("import time; time.sleep(3600)", "timeout", ("my_reward.py",)),
            ("return None", "result", ()),
        ],
    )
    def test_failing_call_names_its_sample(self, tmp_path: Path, body: str, kind: str, trace: tuple[str, ...]) -> None:
        body = f"if response == 'no. 0':\n    {body}\nawait asyncio.sleep(3600 if response == 'no. 1' else 0)\nreturn 1"
        path = reward_file(tmp_path, body, before="import asyncio\nasync \\")
        with raises(RewardError, uid=0, kind=kind) as caught:
            score(path, [item(uid, f"no. {uid}") for uid in range(4)], timeout_s=1.5)
        assert all(part in caught.value.details[0] for part in trace)


class TestSeveralFunctions:
    def test_reward_is_the_weighted_sum_of_ordinary_and_async_functions(self, tmp_path: Path) -> None:
        first, second = tmp_path / "first.py", tmp_path / "second.py"
        first.write_text("def compute_score(response): return {'score': float(response), 'even': response in '02'}")
        second.write_text("async def grader(response, *, bonus): return bonus")
        functions = {
            "exact": RewardFunctionEntry(path=str(first)),
            "grader": RewardFunctionEntry(path=str(second), name="grader", weight=0.5, kwargs={"bonus": 3}),
        }
        found = rewards_of(None, [item(uid, str(uid)) for uid in range(3)], functions=functions)
        assert [reward.score for reward in found] == [1.5, 2.5, 3.5]
        assert found[1].numbers == {"exact": 1.0, "exact/even": 0.0, "grader": 3.0}

    def test_blocking_calls_delay_no_deadline_of_others(self, tmp_path: Path) -> None:
        """All calls together take longer than the time limit of one; an asynchronous call waits several times."""
        first, second = tmp_path / "first.py", tmp_path / "second.py"
        first.write_text("import time\ndef compute_score(response): time.sleep(0.25); return 1")
        waits = "for _ in range(8): await asyncio.sleep(0.01)"
        second.write_text(f"import asyncio\nasync def grader(response):\n    {waits}\n    return 2")
        functions = {
            "exact": RewardFunctionEntry(path=str(first)),
            "grader": RewardFunctionEntry(path=str(second), name="grader"),
        }
        found = rewards_of(None, [item(uid) for uid in range(16)], functions=functions, timeout_s=1.5)
        assert [reward.score for reward in found] == [3.0] * 16

    def test_turns_have_scores(self, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        path = reward_file(tmp_path, "return {'turn_scores': [0.5] * int(response)}")
        functions = {
            "turns": RewardFunctionEntry(path=str(path)),
            "whole": RewardFunctionEntry(path=str(reward_file(tmp_path / "other", "return 3")), weight=2.0),
        }
        items = [item(n, str(n), n_turns=n) for n in (1, 3)]
        found = rewards_of(None, items, functions=functions)
        assert [reward.turn_scores for reward in found] == [(6.5,), (0.5, 0.5, 6.5)]
        assert [reward.score for reward in found] == [6.5, 7.5]
        with raises(RewardError, uid=2, kind="result"):
            score(path, [item(2, "2", n_turns=3)])

    def test_errors_name_the_function(self, tmp_path: Path) -> None:
        path = reward_file(tmp_path, "return 1")
        broken = tmp_path / "broken.py"
        broken.write_text("def compute_score(response): return [][0]")
        functions = {"good": RewardFunctionEntry(path=str(path)), "bad": RewardFunctionEntry(path=str(broken))}
        with raises(RewardError, function=f"bad (compute_score of {broken})"):
            score(None, [item()], functions=functions)
        functions["bad"] = RewardFunctionEntry(path=str(broken), name="other")
        keys = tuple(f"custom_reward_function.functions.bad.{name}" for name in ("path", "name"))
        with raises(ConfigError, keys=keys):
            RewardScorer(settings(None, functions=functions))


class TestTruth:
    @pytest.mark.parametrize(
        ("body", "expected"),
        [("response, ground_truth", "required"), ("response, **rest", "optional"), ("response", "unused")],
    )
    def test_use_of_the_ground_truth_depends_on_the_parameters(self, tmp_path: Path, body: str, expected: str) -> None:
        path = tmp_path / "my_reward.py"
        path.write_text(f"def compute_score({body}): return 1")
        with RewardScorer(settings(path)) as scorer:
            assert scorer.truth_use == expected


class TestFailingCall:
    @pytest.mark.parametrize(
        ("body", "kind", "exit_status", "trace"),
        [
            ("return {'acc': 1}", "result", None, ()),
            ("return {'score': None, 'acc': 1}", "result", None, ()),
            ("return None", "result", None, ()),
            ("return float('nan')", "result", None, ()),
            ("return 1 / 0", "exception", None, ('my_reward.py", line 4, in compute_score\n', "ZeroDivisionError")),
            ("import sys; sys.exit('enough')", "exception", None, ("SystemExit: enough",)),
            ("return '1'", "result", None, ()),
            ("return 10 ** 400", "exception", None, ("OverflowError",)),
            ("return 10 ** 5000", "exception", None, ("OverflowError",)),
            ("import os; os._exit(3)", "exit", 3, ()),
            ("import os; os.kill(os.getpid(), 9)", "exit", -9, ()),
            ("import os; os.kill(os.getpid(), 11)", "exit", -11, ("in compute_score",)),
        ],
    )
    def test_error_names_sample_and_shows_the_users_frames(
        self, tmp_path: Path, body: str, kind: str, exit_status: int | None, trace: tuple[str, ...]
    ) -> None:
        path = reward_file(tmp_path, f"if response == 'no. 5':\n    {body}\nreturn 1")
        items = [item(uid, f"no. {uid}", prompt=f"prompt {uid} " + "x" * 1000) for uid in range(40)]
        with raises(RewardError, uid=5, kind=kind, exit_status=exit_status) as caught:
            score(path, items)
        *traces, prompt, response, truth = caught.value.details
        assert all(part in traces[0] for part in trace)
        assert prompt.startswith("prompt: 'prompt 5 xxx")
        assert (response, truth) == ("response: 'no. 5'", "ground truth: 'a truth'")
        text = str(caught.value)
        assert len(text) < 1500
        assert "child.py" not in text or "SIGSEGV" in text
        assert "end_with_driver" not in text

    def test_long_error_text_is_cut(self, tmp_path: Path) -> None:
        path = reward_file(tmp_path, "raise ValueError('begin' + 'x' * 10**6 + 'end')")
        with raises(RewardError, kind="exception") as caught:
            score(path, [item()])
        beginning, _, end = caught.value.details[0].partition("... cut ...")
        assert "ValueError: beginxxx" in beginning and end.endswith("xxxend")
        assert 4000 < len(str(caught.value)) < 5000

    def test_dead_process_is_detected_although_its_fork_lives(self, tmp_path: Path) -> None:
        forked = tmp_path / "pid"
        body = f"""\
            pid = os.fork()
            if pid:
                open({str(forked)!r}, 'w').write(str(pid))
                os._exit(3)
            time.sleep(3600)
        """
        path = reward_file(tmp_path, body, before="import os, time")
        with raises(RewardError, kind="exit", exit_status=3):
            score(path, [item()])
        assert has_ended(int(forked.read_text()))

    @pytest.mark.parametrize(
        "hang",
        [
            pytest.param("import re; re.match('(a+)+b', 'a' * 64)", id="in C with the GIL"),
            pytest.param("time.sleep(3600)", id="in a system call"),
        ],
    )
    def test_missed_deadline_kills_the_process_group_and_shows_the_stack(self, tmp_path: Path, hang: str) -> None:
        """The deadline is that of each call: all calls together take longer."""
        started = tmp_path / "pid"
        body = f"""\
            if response == "no. 6":
                helper = subprocess.Popen(["sleep", "3600"])
                pathlib.Path({str(started)!r}).write_text(str(helper.pid))
                {hang}
            time.sleep(0.1)
            return 1
        """
        path = reward_file(tmp_path, body, before="import pathlib, subprocess, time")
        with raises(RewardError, uid=6, kind="timeout") as caught:
            score(path, [item(uid, f"no. {uid}") for uid in range(12)], timeout_s=0.5)
        stack = caught.value.details[0]
        assert "my_reward" in stack and "end_with_driver" not in stack
        assert has_ended(int(started.read_text()))

    def test_stopped_process_is_killed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process, "KILL_MARGIN_S", 0.2)
        path = reward_file(tmp_path, "import os; os.kill(os.getpid(), 19)")
        with raises(RewardError, uid=0, kind="timeout"):
            score(path, [item()], timeout_s=0.2)


class TestOnFailure:
    """``custom_reward_function.on_failure`` other than ``fail``: failures are counted, and all other items scored."""

    FAILURES = (
        "raise ConnectionError('no answer')",
        "return None",
        "os._exit(3)",
        "time.sleep(3600)",
    )
    ITEMS = tuple(item(uid, f"no. {uid}") for uid in range(20))

    @pytest.mark.parametrize(
        ("body", "is_async"), [*((body, False) for body in FAILURES), (FAILURES[0], True), (FAILURES[2], True)]
    )
    def test_skip_leaves_out_the_failing_item_only(
        self, tmp_path: Path, body: str, is_async: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = reward_file(
            tmp_path,
            f"if response == 'no. 6':\n    {body}\nreturn float(response[4:])",
            before="import os, time",
        )
        if is_async:
            path.write_text(path.read_text().replace("def compute_score", "async def compute_score"))
        options = {"on_failure": "skip", "num_workers": 2, "timeout_s": 2.0}
        with RewardScorer(settings(path, **options)) as scorer:
            for n_failures in (1,) if is_async else (1, 2):  # the processes remain usable
                rewards = asyncio.run(scorer.score(self.ITEMS))
                scores = [None if reward is None else reward.score for reward in rewards]
                assert scores == [None if uid == 6 else float(uid) for uid in range(20)]
                assert scorer.failures == n_failures
        assert "gave no reward to sample 6 (row 6 of the tests)" in caplog.text
        assert "custom_reward_function.on_failure=skip: the run continues" in caplog.text

    def test_end_of_an_async_process_repeats_few_calls(self, tmp_path: Path) -> None:
        """All calls wait when one of them ends the process."""
        calls = tmp_path / "calls"
        body = f"""\
            with open({str(calls)!r}, "a") as file:
                file.write(response + "\\n")
            await asyncio.sleep(0.05 if response == "no. 11" else 0.2)
            if response == "no. 11":
                os._exit(3)
            return float(response[4:])
        """
        path = reward_file(tmp_path, body, before="import asyncio, os")
        path.write_text(path.read_text().replace("def compute_score", "async def compute_score"))
        with RewardScorer(settings(path, on_failure="skip", max_concurrency=16)) as scorer:
            rewards = asyncio.run(scorer.score([item(uid, f"no. {uid}") for uid in range(16)]))
            assert scorer.failures == 1
        scores = [None if reward is None else reward.score for reward in rewards]
        assert scores == [None if uid == 11 else float(uid) for uid in range(16)]
        assert len(calls.read_text().splitlines()) <= 3 * 16

    def test_value_replaces_the_reward(self, tmp_path: Path) -> None:
        path = reward_file(tmp_path, "return 1 / (response != 'no. 6')")
        scores = score(path, self.ITEMS, on_failure="value", failure_value=-2.0)
        assert scores == [-2.0 if uid == 6 else 1.0 for uid in range(20)]

    def test_more_failures_than_allowed_raise(self, tmp_path: Path) -> None:
        path = reward_file(tmp_path, "return 1 / (response not in ('no. 6', 'no. 7'))")
        options = {"on_failure": "skip", "max_failures": 3}
        with RewardScorer(settings(path, **options)) as scorer:
            asyncio.run(scorer.score(self.ITEMS))
            with raises(RewardError, uid=7, failures=4):
                asyncio.run(scorer.score(self.ITEMS))

    def test_process_that_cannot_start_again_fails_the_items_only(self, tmp_path: Path) -> None:
        """The file is changed meanwhile."""
        path = reward_file(tmp_path, "os._exit(3)", before="import os")
        with RewardScorer(settings(path, on_failure="skip")) as scorer:
            path.write_text("x = ")
            assert asyncio.run(scorer.score(self.ITEMS)) == [None] * 20
            assert scorer.failures == 20

    def test_close_ends_a_process_that_is_started_again(self, tmp_path: Path) -> None:
        pids = tmp_path / "pids"
        before = f"import os, time\nprint(os.getpid(), file=open({str(pids)!r}, 'a'))\n"
        path = reward_file(tmp_path, "os._exit(3)", before=before)
        with RewardScorer(settings(path, on_failure="skip")) as scorer:
            path.write_text(path.read_text().replace(before, f"{before}time.sleep(3600)\n"))

            async def score_and_leave() -> None:
                scoring = asyncio.ensure_future(scorer.score(self.ITEMS[:2]))
                while len(pids.read_text().split()) < 2:
                    await asyncio.sleep(0.05)
                scoring.cancel()

            asyncio.run(asyncio.wait_for(score_and_leave(), PATIENCE_S))
        assert all(has_ended(int(pid)) for pid in pids.read_text().split())


LOAD_KEYS = ("custom_reward_function.path", "custom_reward_function.name")


class TestLoad:
    @pytest.mark.parametrize(
        "text",
        [
            "",
            "def reward(): ...",
            "compute_score = 3",
            "import nowhere",
            "def compute_score(:",
            "import sys; sys.exit(1)",
            "import os; os._exit(1)",
            "import os; os.kill(os.getpid(), 9)",
            "def compute_score(p, response, *, t): ...",
            "def compute_score(data_source, response): ...",
        ],
    )
    def test_unusable_function_raises(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "my_reward.py"
        path.write_text(text)
        with raises(ConfigError, keys=LOAD_KEYS):
            RewardScorer(settings(path, num_workers=2))

    def test_broken_interpreter_raises_with_its_output(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\necho 'no memory for it' >&2\nexit 3\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        send = Connection.send

        def send_late(connection: Connection, settings: Any) -> None:
            time.sleep(0.2)  # The process has ended by then.
            send(connection, settings)

        monkeypatch.setattr(Connection, "send", send_late)
        with raises(ConfigError, keys=LOAD_KEYS) as caught:
            RewardScorer(settings(reward_file(tmp_path, "return 1")))
        assert "no memory for it" in str(caught.value)

    def test_missing_file_is_named(self, tmp_path: Path) -> None:
        with raises(ConfigError, keys=("custom_reward_function.path",)):
            RewardScorer(settings(tmp_path / "nowhere.py"))


class TestEnd:
    def test_cancel_and_close_do_not_wait_for_calls(self, tmp_path: Path) -> None:
        path = reward_file(tmp_path, "import time; time.sleep(3600); return 1")

        async def cancel(scorer: RewardScorer) -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await scorer.score([item(uid) for uid in range(8)])
            scorer.close()

        with RewardScorer(settings(path, num_workers=2, timeout_s=FOREVER_S)) as scorer:
            asyncio.run(cancel(scorer))

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_end_of_the_driver_ends_processes_and_their_children(self, tmp_path: Path, number: signal.Signals) -> None:
        pids = tmp_path / "pids"
        body = f"""\
            helper = subprocess.Popen(["sleep", "3600"])
            open({str(pids)!r}, "a").write(f"{{os.getpid()}} {{helper.pid}}\\n")
            if extra:
                time.sleep(3600)
            return 1
        """
        path = reward_file(tmp_path, body, before="import os, subprocess, time")
        driver = tmp_path / "driver.py"
        driver.write_text(
            f"import asyncio, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
            f"from tests._support.reward_files import item, settings\nfrom recipe_gkd.rewards import RewardScorer\n"
            f"with RewardScorer(settings({str(path)!r}, timeout_s=3600.0)) as busy:\n"
            f"  with RewardScorer(settings({str(path)!r})) as idle:\n"
            f"    asyncio.run(idle.score([item()]))\n"
            f"    asyncio.run(busy.score([item(extra={{'busy': 1}})]))\n"
        )
        started = subprocess.Popen([sys.executable, str(driver)], stderr=subprocess.PIPE, text=True)

        def both_wrote_pids() -> bool:
            assert started.poll() is None, started.stderr
            return pids.exists() and pids.read_text().count("\n") == 2

        wait_until(both_wrote_pids)
        started.send_signal(number)
        started.communicate(timeout=PATIENCE_S)
        assert all(has_ended(int(pid)) for pid in pids.read_text().split())
