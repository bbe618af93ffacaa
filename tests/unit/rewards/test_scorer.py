"""The reward function in its processes: what it is given, how it may fail, and that nothing of it stays."""

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

from recipe_gkd.errors import ConfigError, RewardError
from recipe_gkd.rewards import RewardItem, RewardScorer, process
from tests.unit.rewards.reward_files import item, reward_file, settings


def score(path: Path, items: Sequence[RewardItem], **values: Any) -> list[float]:
    with RewardScorer(settings(path, **values)) as scorer:
        return asyncio.run(scorer.score(items))


def gone(pid: int, timeout_s: float = 10.0) -> bool:
    try:
        psutil.Process(pid).wait(timeout_s)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize(("n_items", "num_workers"), [(0, 1), (1, 3), (100, 3)])
def test_each_item_gets_its_own_reward_in_order(tmp_path: Path, n_items: int, num_workers: int) -> None:
    path = reward_file(
        tmp_path, "return float(answer) + ground_truth[0] + extra['more'] + (prompt[0]['role'] == 'user')"
    )
    items = [
        item(uid, str(uid), prompt=[{"role": "user", "content": "?"}], ground_truth=[1000], extra={"more": 10_000})
        for uid in range(n_items)
    ]
    assert score(path, items, num_workers=num_workers) == [11_001.0 + uid for uid in range(n_items)]


def test_requests_at_the_same_time_share_the_processes(tmp_path: Path) -> None:
    path = reward_file(tmp_path, "return int(answer)")

    async def two(scorer: RewardScorer) -> list[list[float]]:
        groups = [[item(uid, str(uid)) for uid in range(start, start + 50)] for start in (0, 50, 100)]
        return await asyncio.gather(*(scorer.score(group) for group in groups))

    with RewardScorer(settings(path, num_workers=2)) as scorer:
        assert asyncio.run(two(scorer)) == [[float(uid) for uid in range(start, start + 50)] for start in (0, 50, 100)]


def test_calls_run_beside_each_other(tmp_path: Path) -> None:
    path = reward_file(tmp_path, "import time; began = time.monotonic(); time.sleep(0.3); return began")
    began = score(path, [item(uid) for uid in range(2)], num_workers=2)
    assert abs(began[0] - began[1]) < 0.3


def test_trivial_calls_cost_little(tmp_path: Path) -> None:
    path = reward_file(tmp_path, "return float(answer == ground_truth)")
    items = [item(uid, "a" * 2000, prompt=[{"role": "user", "content": "p" * 1000}]) for uid in range(512)]
    seconds = []
    with RewardScorer(settings(path, num_workers=2)) as scorer:
        for _ in range(4):
            began = time.monotonic()
            asyncio.run(scorer.score(items))
            seconds.append(time.monotonic() - began)
    assert min(seconds) < 0.2  # 0.04 on two cores


def test_whatever_float_takes_is_a_reward_but_for_text(tmp_path: Path) -> None:
    texts = ["True", "np.bool_(True)", "np.array(0.5)", "np.float32(0.5)", "Decimal('0.25')", "Fraction(1, 4)", "3"]
    before = "import numpy as np\nfrom decimal import Decimal\nfrom fractions import Fraction"
    path = reward_file(tmp_path, "return eval(answer)", before=before)
    rewards = score(path, [item(uid, text) for uid, text in enumerate(texts)])
    assert rewards == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 3.0] and all(type(reward) is float for reward in rewards)


def test_what_is_printed_is_seen_though_the_process_is_killed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
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


def test_a_file_may_import_what_lies_beside_it_and_what_the_driver_can(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("ONE = 1")
    path = reward_file(tmp_path, "return beside.ONE", before="import beside\nimport recipe_gkd.errors")
    assert score(path, [item()]) == [1.0]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "return {'acc': 1}",
            r"returned \{'acc': 1\} \(dict\), expected a finite number, or a dict with one as 'score'",
        ),
        ("return {'score': None, 'acc': 1}", r"returned \{'score': None, 'acc': 1\} \(dict\), expected a finite"),
        ("return None", r"returned None \(NoneType\), expected a finite number"),
        ("return float('nan')", "returned nan .* expected a finite number"),
        (
            "return 1 / 0",
            r"File .*my_reward.py\", line 4, in compute_score\n(.|\n)*ZeroDivisionError: division by zero",
        ),
        ("import sys; sys.exit('enough')", "SystemExit: enough"),
        ("return '1'", r"returned '1' \(str\), expected a finite number"),
        ("return 10 ** 400", "it raised\nOverflowError: int too large to convert to float"),
        ("return 10 ** 5000", "it raised\nOverflowError"),
        ("import os; os._exit(3)", r"ended its process \(exit status 3\)"),
        ("import os; os.kill(os.getpid(), 9)", r"was killed \(SIGKILL\): the kernel's log tells if it wanted memory"),
        ("import os; os.kill(os.getpid(), 11)", r"ended its process \(SIGSEGV\)\n(.|\n)*in compute_score"),
    ],
)
def test_a_failing_call_is_told_with_its_sample_and_the_functions_own_words(
    tmp_path: Path, body: str, says: str
) -> None:
    path = reward_file(tmp_path, f"if answer == 'no. 5':\n    {body}\nreturn 1")
    items = [item(uid, f"no. {uid}", prompt=f"prompt {uid} " + "x" * 1000) for uid in range(40)]
    with pytest.raises(RewardError, match=says) as caught:
        score(path, items)
    message = str(caught.value)
    assert "gave no reward to sample 5 (row 5 of the tests): " in message
    assert "prompt: 'prompt 5 xxx" in message and len(message) < 1500
    assert "answer: 'no. 5'\nground truth: 'a truth'" in message
    assert "child.py" not in message or "SIGSEGV" in message
    assert "end_with_driver" not in message


def test_an_error_with_a_long_text_is_cut(tmp_path: Path) -> None:
    path = reward_file(tmp_path, "raise ValueError('begin' + 'x' * 10**6 + 'end')")
    with pytest.raises(RewardError, match=r"ValueError: beginxxx(.|\n)*cut(.|\n)*xxxend\n") as caught:
        score(path, [item()])
    assert 4000 < len(str(caught.value)) < 5000


def test_a_process_that_dies_is_told_at_once_though_a_fork_of_it_lives_on(tmp_path: Path) -> None:
    forked = tmp_path / "pid"
    body = f"pid = os.fork()\nif pid:\n    open({str(forked)!r}, 'w').write(str(pid))\n    os._exit(3)\ntime.sleep(600)"
    path = reward_file(tmp_path, body, before="import os, time")
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"ended its process \(exit status 3\)"):
        score(path, [item()])
    assert time.monotonic() - began < 5
    assert gone(int(forked.read_text()))


@pytest.mark.parametrize("hang", ["import re; re.match('(a+)+b', 'a' * 64)", "time.sleep(600)"])
def test_a_call_that_passes_its_deadline_is_ended_where_it_is_with_what_it_started(tmp_path: Path, hang: str) -> None:
    started = tmp_path / "pid"
    body = f"""\
        if answer == "no. 3":
            helper = subprocess.Popen(["sleep", "600"])
            pathlib.Path({str(started)!r}).write_text(str(helper.pid))
            {hang}
        time.sleep(0.05)
        return 1
    """
    path = reward_file(tmp_path, body, before="import pathlib, subprocess, time")
    began = time.monotonic()
    with pytest.raises(
        RewardError, match=r"sample 3 .*: it took longer than 1 s and was ended, here:(.|\n)*my_reward"
    ) as caught:
        score(
            path, [item(uid, f"no. {uid}") for uid in range(12)], timeout_s=1.0
        )  # each call has a deadline of its own
    assert time.monotonic() - began < 5
    assert "end_with_driver" not in str(caught.value)
    assert gone(int(started.read_text()))


def test_a_process_that_is_stopped_cannot_hold_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MARGIN_S", 0.2)
    path = reward_file(tmp_path, "import os; os.kill(os.getpid(), 19)")
    with pytest.raises(RewardError, match=r"sample 0 .*: it took longer than 0\.2 s"):
        score(path, [item()], timeout_s=0.2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"it has no compute_score; it defines: nothing that can be called\nExpected a Python file that defines"),
        ("def reward(): ...", "it has no compute_score; it defines: reward"),
        ("compute_score = 3", "its compute_score is 3, which cannot be called"),
        ("import nowhere", r"cannot be imported:\n(.|\n)*my_reward.py(.|\n)*No module named 'nowhere'"),
        ("def compute_score(:", "cannot be imported:\n(.|\n)*SyntaxError"),
        ("import sys; sys.exit(1)", "cannot be imported:\n(.|\n)*SystemExit: 1"),
        ("import os; os._exit(1)", r"its import ended its process \(exit status 1\)"),
        ("import os; os.kill(os.getpid(), 9)", r"its import was killed \(SIGKILL\)"),
        ("async def compute_score(answer): ...", "its compute_score is async; make it an ordinary function"),
        (
            "def compute_score(p, answer, *, t): ...",
            r"compute_score\(p, answer, \*, t\) has parameters .*: p, t; expected",
        ),
        ("def compute_score(data_source, answer): ...", r"mixes answer \(of .*\) and data_source \(of verl's names\)"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_told_at_once(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        RewardScorer(settings(path, num_workers=2))


@pytest.mark.parametrize(
    "text",
    [
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, method='strict'):\n"
        "    right = (data_source, ground_truth, extra_info) == ('math', 'a truth', {'index': 3})\n"
        "    return {'score': float(solution_str) * right, 'acc': True}",
        "def compute_score(*, ground_truth, answer, **other):\n"
        "    return float(answer) * (set(other) == {'prompt', 'extra'} and other['prompt'] == 'a prompt')",
    ],
)
def test_values_reach_the_parameters_of_their_names(tmp_path: Path, text: str) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(text)
    extra = {"extra_info": {"index": 3}, "level": 1}
    assert score(path, [item(uid, str(uid), extra=extra, data_source="math") for uid in (1, 2)]) == [1.0, 2.0]


def test_an_interpreter_that_does_not_start_is_told_with_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no memory for it' >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    send = Connection.send

    def send_late(connection: Connection, settings: Any) -> None:
        time.sleep(0.2)  # it is dead by then
        send(connection, settings)

    monkeypatch.setattr(Connection, "send", send_late)
    with pytest.raises(ConfigError, match=r"ended its process \(exit status 3\)\nno memory for it"):
        RewardScorer(settings(reward_file(tmp_path, "return 1")))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"custom_reward_function.path=.*nowhere.py: .* is no file"):
        RewardScorer(settings(tmp_path / "nowhere.py"))


def test_a_run_that_is_cancelled_or_closed_does_not_wait_for_calls(tmp_path: Path) -> None:
    path = reward_file(tmp_path, "import time; time.sleep(600); return 1")

    async def cancelled(scorer: RewardScorer) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await scorer.score([item(uid) for uid in range(8)])
        scorer.close()

    began = time.monotonic()
    with RewardScorer(settings(path, num_workers=2)) as scorer:
        asyncio.run(cancelled(scorer))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_processes_and_what_they_started_end_with_the_driver_however_it_ends(
    tmp_path: Path, sent: signal.Signals
) -> None:
    pids = tmp_path / "pids"
    body = f"""\
        helper = subprocess.Popen(["sleep", "600"])
        open({str(pids)!r}, "a").write(f"{{os.getpid()}} {{helper.pid}}\\n")
        if extra:
            time.sleep(600)
        return 1
    """
    path = reward_file(tmp_path, body, before="import os, subprocess, time")
    driver = tmp_path / "driver.py"
    driver.write_text(
        f"import asyncio, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"from tests.unit.rewards.reward_files import item, settings\nfrom recipe_gkd.rewards import RewardScorer\n"
        f"with RewardScorer(settings({str(path)!r}, timeout_s=600.0)) as busy:\n"
        f"  with RewardScorer(settings({str(path)!r})) as idle:\n"
        f"    asyncio.run(idle.score([item()]))\n"
        f"    asyncio.run(busy.score([item(extra={{'busy': 1}})]))\n"
    )
    started = subprocess.Popen([sys.executable, str(driver)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not (pids.exists() and pids.read_text().count("\n") == 2):
        assert started.poll() is None and time.monotonic() < deadline, started.stderr
        time.sleep(0.02)
    started.send_signal(sent)
    began = time.monotonic()
    started.communicate(timeout=20)
    assert all(gone(int(pid)) for pid in pids.read_text().split())
    assert time.monotonic() - began < 6
