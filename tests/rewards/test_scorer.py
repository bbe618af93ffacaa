"""The reward function in its processes: what it is given, how it may fail, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from reward_files import item, reward_file, settings

from recipe_gkd.errors import ConfigError, RewardError
from recipe_gkd.rewards import RewardItem, RewardScorer, process


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


def test_a_file_may_import_what_lies_beside_it_and_what_the_driver_can(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("ONE = 1")
    path = reward_file(tmp_path, "return beside.ONE", before="import beside\nimport recipe_gkd.errors")
    assert score(path, [item()]) == [1.0]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return {'score': 1}", r"returned \{'score': 1\} \(dict\), expected a finite number"),
        ("return None", r"returned None \(NoneType\), expected a finite number"),
        ("return float('nan')", "returned nan .* expected a finite number"),
        (
            "return 1 / 0",
            r"File .*my_reward.py\", line 4, in compute_score\n(.|\n)*ZeroDivisionError: division by zero",
        ),
        ("import sys; sys.exit('enough')", "SystemExit: enough"),
        ("import os; os._exit(3)", r"ended its process \(exit status 3\)"),
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
    assert "gave no reward to sample 5: " in message
    assert "prompt: 'prompt 5 xxx" in message and len(message) < 1500
    assert "answer: 'no. 5'\nground truth: 'a truth'" in message
    assert "child.py" not in message or "SIGSEGV" in message


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
    with pytest.raises(RewardError, match=r"sample 3: it took longer than 1 s and was ended, here:(.|\n)*my_reward"):
        score(
            path, [item(uid, f"no. {uid}") for uid in range(12)], timeout_s=1.0
        )  # each call has a deadline of its own
    assert time.monotonic() - began < 5
    assert gone(int(started.read_text()))


def test_a_process_that_is_stopped_cannot_hold_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MARGIN_S", 0.2)
    path = reward_file(tmp_path, "import os; os.kill(os.getpid(), 19)")
    with pytest.raises(RewardError, match=r"sample 0: it took longer than 0\.2 s"):
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
    ],
)
def test_a_function_that_cannot_be_loaded_is_told_at_once(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        RewardScorer(settings(path, num_workers=2))


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
def test_processes_end_with_the_driver_however_it_ends(tmp_path: Path, sent: signal.Signals) -> None:
    pids = tmp_path / "pids"
    body = f"open({str(pids)!r}, 'a').write(str(os.getpid()) + '\\n')\nif extra: time.sleep(600)\nreturn 1"
    path = reward_file(tmp_path, body, before="import os, time")
    driver = tmp_path / "driver.py"
    driver.write_text(
        f"import asyncio, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path[:0] = {[str(Path(__file__).parent)]!r}\n"
        f"from reward_files import item, settings\nfrom recipe_gkd.rewards import RewardScorer\n"
        f"with RewardScorer(settings({str(path)!r}, timeout_s=2.0)) as busy:\n"
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
    idle, busy = map(int, pids.read_text().split())
    assert gone(idle) and gone(busy)  # a busy one whose driver was killed ends at its deadline
    assert time.monotonic() - began < 6
