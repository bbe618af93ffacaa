"""The report of a run, from files in the form that a run writes them."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shlex
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from recipe_gkd.checkpoints.state import Best
from recipe_gkd.checkpoints.store import keep_best
from recipe_gkd.commands.report import main
from recipe_gkd.commands.report.advice import advice_section
from recipe_gkd.commands.report.command import write_report
from recipe_gkd.commands.report.page import render_page
from recipe_gkd.commands.report.run_files import read_checkpoint, read_run
from recipe_gkd.commands.report.samples import KL_STEPS, choose_prompts
from recipe_gkd.commands.report.series import Series, duration, number, reduce_points, smooth
from recipe_gkd.commands.report.settings import HIDDEN, hide_secrets
from recipe_gkd.commands.report.stages import stage_times
from recipe_gkd.commands.report.trace_spans import find_trace, last_updates, read_spans, read_timeline
from recipe_gkd.config.key_types import known_keys
from recipe_gkd.errors import ConfigError
from recipe_gkd.metrics.run_events import RunEvents
from recipe_gkd.metrics.trace import TraceFile
from recipe_gkd.runtime.run_log import FROM_MODEL_FOLDER, RESUMED
from tests._support.browser import CHROMIUM, browser_page
from tests._support.errors import raises
from tests._support.repository import REPO
from tests._support.waiting import wait_until

REFERENCE = re.compile(r"""\b(?:src|href)\s*=(?!["']?(?:#|data:))|url\(|@import|https?://""")
"""Anything in the page that a browser could load."""


def metrics_of(step: int, **more: float) -> dict[str, float]:
    waits = {"timing/wait_prev_gen": 0.1, "timing/wait_prev_teacher": 0.5, "timing/update_actor": 0.3}
    return {
        "training/global_step": step, "actor/kl_loss": 1 / step, "reward/mean": 0.5, "actor/grad_norm": 1.0,
        "response_seq_len/average": 30.0, "timing/step": 1.0, **waits, "timing/other": 0.1,
        "perf/idle_actor": 0.6, "perf/idle_rollout": 0.2, "perf/idle_teacher": 0.1, "timing/generate_sequences": 0.4,
        "timing/generate_sequences_mean": 0.4, "timing/get_teacher_knowledge": 0.6, "timing/teacher_tail": 0.5,
        "timing/sync_rollout_weights": 0.01, **more,
    }  # fmt: skip


def make_run(folder: Path, n_steps: int = 60, **more: float) -> Path:
    """Write a run folder with metrics, configuration, validation responses and a checkpoint."""
    lines = [json.dumps(metrics_of(step, **more)) for step in range(1, n_steps + 1)]
    lines[-1] = json.dumps(metrics_of(n_steps, **more) | {"val/sums/score": 0.75, "val/sums/response_len": 9.0})
    (folder / "validation").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    config = {"trainer": {"experiment_name": "first & best", "total_training_steps": n_steps, "trace_file": None}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    for step, reward in ((0, 0.0), (n_steps, 1.0)):
        record = {
            "data_source": "sums", "row": 0, "prompt": [{"role": "user", "content": "1+1=<script>alert(1)</script>"}],
            "answer": f"answer {reward:g}", "ground_truth": "2", "reward": reward, "finish_reason": "stop",
        }  # fmt: skip
        (folder / "validation" / f"step_{step}.jsonl").write_text(json.dumps(record) + "\n")
    checkpoint = folder / f"global_step_{n_steps}"
    (checkpoint / "actor").mkdir(parents=True)
    (checkpoint / "trainer.json").write_text("{}")
    (checkpoint / "actor" / "metadata.json").write_text("{}")
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{n_steps}\n")
    with RunEvents(folder):
        pass
    return folder


def own_page(folder: Path) -> str:
    """Return the page of a run without the script of plotly, which has addresses and markup in its strings."""
    page = render_page(read_run(folder))
    assert page.count(get_plotlyjs()) == 1
    return page.replace(get_plotlyjs(), "")


class TestPage:
    def test_page_has_all_sections_and_loads_nothing(self, tmp_path: Path) -> None:
        page = own_page(make_run(tmp_path / "run"))
        for anchor in ("advice", "curves", "time", "responses", "checkpoints", "events", "configuration"):
            assert f'<section id="{anchor}">' in page
        assert "Starts of the run: 1." in page and "default-src 'none'" in html.unescape(page)
        assert not REFERENCE.search(page), REFERENCE.findall(page)

    def test_text_of_the_run_is_escaped(self, tmp_path: Path) -> None:
        page = own_page(make_run(tmp_path / "run", **{"val/</script><script>alert(1)</script>/score": 1.0}))
        assert "<title>first &amp; best" in page and "<script>alert" not in page and page.count("<script>") == 2
        assert "1+1=&lt;script&gt;alert(1)&lt;/script&gt;" in page and "answer 0" in page and "answer 1" in page

    def test_control_characters_and_surrogates_are_visible(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run", **{"val/\ud83d/score": 1.0})
        records = [json.loads(path.read_text()) for path in sorted((run / "validation").iterdir())]
        text = "a\x00\x1b[31m\u202e\ud83d\nحب"
        for path, record in zip(sorted((run / "validation").iterdir()), records, strict=True):
            path.write_text(json.dumps(record | {"answer": "a", "raw_answer": text + "<|im_end|>"}) + "\n")
        write_report(run, tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text(encoding="utf-8")
        shown = '<pre dir="auto">a\\x00\\x1b[31m\\u202e\\ud83d\nحب&lt;|im_end|&gt;</pre>'
        assert page.count(shown) == len(records)

    def test_messages_of_a_conversation_are_shown_with_roles_and_calls(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1<2"}}}
        messages = [
            {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
            {"role": "tool", "content": "True"},
            {"role": "assistant", "content": "It is."},
        ]
        path, *others = sorted((run / "validation").iterdir())
        record = json.loads(path.read_text()) | {"raw_answer": "raw text"}
        path.write_text(json.dumps(record | {"conversation": {"messages": messages}}) + "\n")
        for other, broken in zip(others, ([], {"messages": 3}), strict=False):
            other.write_text(json.dumps(record | {"conversation": broken}) + "\n")
        page = own_page(run)
        assert page.count("raw text</pre>") == len(others) > 0
        text = re.sub(r"\s*<[^>]+>\s*", "|", page[page.index("Let me see.") - 80 : page.index("It is.") + 10])
        expected = (
            "assistant||Let me see.\n-&gt; calculator {&#34;expression&#34;: &#34;1&lt;2&#34;}"
            "||tool||True||assistant||It is."
        )
        assert expected in text

    def test_tokens_have_the_color_of_their_divergence(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        first, last = sorted((run / "validation").iterdir())
        texts, kl = ["Let", " <me>", "12", "", "."], [0.05, 0.1, 0.3, 1.0, None]
        record = json.loads(first.read_text()) | {
            "raw_answer": "plain",
            "tokens": {"texts": texts, "kl": kl, "turns": [0]},
        }
        first.write_text(json.dumps(record) + "\n")
        messages = [{"role": role, "content": role} for role in ("assistant", "tool", "assistant")]
        turns = {"tokens": {"texts": texts, "kl": kl, "turns": [0, 2]}, "conversation": {"messages": messages}}
        last.write_text(json.dumps(record | turns) + "\n")
        page = own_page(run)
        start = 'Let<span class="kl1" title="0.1"> &lt;me&gt;</span>'
        end = '<span class="kl2" title="0.3">12</span><span class="kl3" title="1"></span>.</pre>'
        assert f'<pre dir="auto">{start}{end}' in page and "plain" not in page
        assert f'class="sampled">{start}</pre>' in page and f'class="sampled">{end}' in page
        assert ">tool</pre>" in page and ">assistant</pre>" not in page
        assert page.count("KL to the teacher &ge;") == len(KL_STEPS)

    def test_tokens_that_do_not_fit_the_messages_are_left_out(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        first, last = sorted((run / "validation").iterdir())
        for path, broken in (
            (first, {"texts": ["a"], "kl": [], "turns": [0]}),
            (last, {"texts": ["a"], "kl": [1.0], "turns": [0, 1]}),
        ):
            path.write_text(json.dumps(json.loads(path.read_text()) | {"raw_answer": "plain", "tokens": broken}) + "\n")
        assert own_page(run).count("plain</pre>") == 2

    def test_long_run_gives_a_small_page(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        with (run / "metrics.jsonl").open("w") as file:
            for step in range(1, 100_001):
                file.write(f'{{"training/global_step": {step}, "actor/kl_loss": {1 / step}, "timing/step": 1.5}}\n')
        page = own_page(run)
        assert len(page) < 400_000 and "41 h 40 min" in page and "100,000" in page

    def test_figures_have_only_properties_of_plotly(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run", n_steps=400)
        trace = TraceFile(run / "trace.json")
        trace.record("actor", "update", 10.0, 10.5, {"step": 1})
        figures = re.findall(r'<script type="application/json">(.*?)</script>', own_page(run))
        assert len(figures) > 10
        for figure in figures:
            Figure(json.loads(re.sub(r'"--[cs]\d"', '"red"', figure)))  # raises ValueError otherwise

    def test_metrics_alone_suffice(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"training/global_step": 1, "actor/kl_loss": 0.5}\n')
        page = render_page(read_run(tmp_path))
        assert "no checkpoint yet" in page and "config.yaml" in page

    def test_page_names_the_loss_and_the_best_checkpoint(self, tmp_path: Path) -> None:
        """With the files that a run writes: the loss is not a key ``gkd.loss``, and ``best.json`` is a list."""
        run = make_run(tmp_path / "lr=1e-3 (second)")
        config = {"gkd": {"distill_loss_type": "jsd", "custom_loss": {"name": None}}}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        shutil.copytree(run / "global_step_60", run / "global_step_20")
        for step, value in ((20, 0.5), (40, 0.25)):
            keep_best(run, Best("val/sums/score", value, step, has_checkpoint=True))
        keep_best(run, Best("val/sums/score", 0.75, 20, has_checkpoint=True))
        page = own_page(run)
        assert "loss <b>jsd</b>" in page and "Loss: jsd" in page and "KL(" not in page
        assert "Best: step 20, val/sums/score = 0.75." in page
        assert '<span class="tag">best</span>' in page
        command = html.unescape(page).partition("recipe_gkd export ")[2].partition("\n")[0].partition("<")[0]
        assert shlex.split(command) == [str(run / "global_step_20"), "OUT"]

    def test_page_notes_unreadable_best_record(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        (run / "best.json").write_text("{")
        assert any("best.json cannot be read" in note for note in read_run(run).notes)

    def test_keys_that_the_report_reads_exist(self) -> None:
        """A key in a string that no schema has is silently absent from every report."""
        source = "".join(path.read_text() for path in (REPO / "recipe_gkd/commands/report").glob("*.py"))
        read = set(re.findall(r'setting\(\s*"([\w.]+)"', source))
        assert len(read) > 5 and not read - known_keys().keys()


class TestCommand:
    def test_writes_page_into_the_run_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = make_run(tmp_path / "run")
        assert main([str(run)]) == 0
        assert (run / "report.html").read_text().startswith("<!doctype html>")
        assert str(run / "report.html") in capsys.readouterr().out

    def test_folder_without_metrics_names_the_logger(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([str(tmp_path)]) == 1
        assert "metrics.jsonl cannot be read" in (message := capsys.readouterr().err) and "trainer.logger" in message

    def test_run_without_a_step_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "metrics.jsonl").write_text("")
        assert main([str(tmp_path)]) == 1
        assert "has no complete step" in capsys.readouterr().err

    @pytest.mark.parametrize("out", [".", "folder"])
    def test_folder_as_output_is_refused(
        self, out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = make_run(tmp_path / "run")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder").mkdir()
        assert main([str(run), "--out", out]) == 1
        assert f"--out {out} is a folder, expected a file" in capsys.readouterr().err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run"]

    def test_home_folder_is_expanded_in_both_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = make_run(tmp_path / "home" / "run")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.chdir(run)
        before = {path.name for path in run.iterdir()}
        assert main(["~/run"]) == main(["~/run", "--out", "~/page.html"]) == 0
        assert {path.name for path in run.iterdir()} == before | {"report.html"}
        assert (tmp_path / "home" / "page.html").is_file()

    def test_failed_write_leaves_no_draft(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run, out = make_run(tmp_path / "run"), tmp_path / "report.html"

        def full_disk(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", full_disk)
        with raises(ConfigError, keys=("--out",)):
            write_report(run, out)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]

    def test_output_in_a_file_as_folder_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = make_run(tmp_path / "run")
        assert main([str(run), "--out", str(run / "config.yaml" / "report.html")]) == 1
        assert "cannot be written" in capsys.readouterr().err


class TestFiles:
    def test_truncated_line_and_nan_are_noted(self, tmp_path: Path) -> None:
        good = json.dumps(metrics_of(1) | {"actor/loss": math.nan})
        (tmp_path / "metrics.jsonl").write_text(good + '\n{"training/global_st')
        run = read_run(tmp_path)
        assert run.last_step == 1 and "actor/loss" not in run.series
        assert any("1 line(s)" in note for note in run.notes) and any("actor/loss" in note for note in run.notes)

    def test_files_after_the_last_step_are_left_out_or_marked(self, tmp_path: Path) -> None:
        """A run that was started again from its beginning leaves validations and checkpoints of later steps."""
        run = make_run(tmp_path / "run")
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(metrics_of(step))}\n" for step in range(1, 21)))
        shutil.copytree(run / "global_step_60", run / "global_step_20")
        read = read_run(run)
        assert list(read.validations) == [0] and [record.step for record in read.checkpoints] == [20, 60]
        cells = re.findall(r"<td>global_step_(\d+)(.*?)</td>", own_page(run), re.DOTALL)
        assert [(step, "after the last step" in tags) for step, tags in cells] == [("60", True), ("20", False)]

    def test_checkpoint_that_is_being_removed_is_described(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = make_run(tmp_path / "run")
        folder, scandir = run / "global_step_60", os.scandir

        def scan(path: Any) -> Any:
            if isinstance(path, str | Path) and Path(path) == folder / "actor":
                folder.rename(run / ".removing_global_step_60.0")
            return scandir(path)

        monkeypatch.setattr(os, "scandir", scan)
        record = read_checkpoint(run, 60)
        assert record.n_bytes == 0 and record.damage == "it does not exist"
        assert read_checkpoint(run, 60).parts == ()

    def test_repeated_step_counts_once_with_its_last_value(self) -> None:
        series = Series.from_columns("x", [1, 2, 3, 2, 3], [1.0, 2.0, 3.0, 20.0, 30.0])
        assert series.steps.tolist() == [1, 2, 3] and series.values.tolist() == [1, 20, 30]

    def test_environment_and_secrets_are_hidden(self) -> None:
        config: dict[str, Any] = {
            "ray_init": {"env_vars": {"WANDB_API_KEY": "123", "PATH": "/bin"}},
            "reward": {"api_key": "abc", "max_token": 5, "password": None},
        }
        hidden = hide_secrets(config)
        assert hidden["ray_init"]["env_vars"] == {"WANDB_API_KEY": HIDDEN, "PATH": HIDDEN}
        assert hidden["reward"] == {"api_key": HIDDEN, "max_token": 5, "password": None}

    def test_secrets_in_lists_are_hidden(self) -> None:
        config = {"endpoints": [{"url": "u", "api_key": "abc"}], "api_keys": ["a", "b"], "n": [1, 2]}
        hidden = {"endpoints": [{"url": "u", "api_key": HIDDEN}], "api_keys": [HIDDEN, HIDDEN], "n": [1, 2]}
        assert hide_secrets(config) == hidden


class TestAdvice:
    def test_truncated_validation_is_reported(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run", **{"val/sums/truncated_fraction": 1.0})
        assert "100% of the last validation responses of sums are truncated" in render_page(read_run(run))

    def test_latest_advice_of_the_log_is_shown(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        lines = [f"10:00:0{n} I recipe_gkd.metrics.steps: the trainer waits {n} s of a step of 9 s, 50%, for rewards "
                 "(idle: actor 1%); more processes" for n in (1, 2)]  # fmt: skip
        (run / "run.log").write_text("\n".join(lines) + "\n")
        section = advice_section(read_run(run))
        assert section.count("<li") == 1 and "waits 2 s" in section and "<p>more processes</p>" in section

    @pytest.mark.parametrize("start", [f"{RESUMED} /run/global_step_40", FROM_MODEL_FOLDER])
    def test_advice_of_an_earlier_start_is_not_shown(self, start: str, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        advice = "10:00:01 I recipe_gkd.metrics.steps: the trainer waits 1 s, 90%, for rewards (idle: actor 1%); more"
        (run / "run.log").write_text(f"{advice}\n10:09:00 I recipe_gkd: {start}\n")
        section = advice_section(read_run(run))
        assert "for rewards" not in section and "50%, for the teacher" in section

    def test_without_a_log_the_bottleneck_is_computed(self, tmp_path: Path) -> None:
        assert "50%, for the teacher" in advice_section(read_run(make_run(tmp_path / "run")))

    @pytest.mark.parametrize(("looping", "is_truncated", "is_looping"), [(0, 1, 0), (0.08, 1, 1), (0.19, 0, 1)])
    def test_longer_limit_is_not_advised_for_responses_that_loop(
        self, looping: float, is_truncated: bool, is_looping: bool, tmp_path: Path
    ) -> None:
        """In training and in validation, 20 % of the responses are truncated."""
        more = {"response_seq_len/truncated_fraction": 0.2, "response/looping_fraction": looping}
        more |= {"val/sums/truncated_fraction": 0.2, "val/sums/looping_fraction": looping}
        section = advice_section(read_run(make_run(tmp_path / "run", **more)))
        for responses in ("the responses", "the last validation responses of sums"):
            assert (f"20% of {responses} are truncated" in section) == is_truncated
            assert (f"{looping:.0%} of {responses} repeat themselves" in section) == is_looping
        assert ("Raise data.max_response_length" in section) == is_truncated

    def test_unusual_metrics_are_reported(self, tmp_path: Path) -> None:
        more: dict[str, Any] = {
            "response_seq_len/truncated_fraction": 0.2,
            "checkpoint/failed_saves": 2.0,
            "weights/retries": 0.0,
        }
        section = advice_section(read_run(make_run(tmp_path / "run", **more)))
        assert "20% of the responses are truncated" in section and "Saves of checkpoints failed" in section
        assert "syncs were repeated" not in section

    @pytest.mark.parametrize(
        ("gkd", "is_advised"),
        [
            ({"distill_loss_type": "forward_kl", "baseline": "expected"}, True),
            ({"distill_loss_type": "k1", "baseline": "expected"}, True),
            ({"distill_loss_type": "k1", "baseline": "group"}, False),
            ({"distill_loss_type": "k2", "baseline": "expected"}, False),
            ({"distill_loss_type": "k3", "baseline": "expected"}, False),
            ({"distill_loss_type": "k3", "baseline": "expected", "custom_loss": {"path": "loss.py"}}, True),
        ],
    )
    def test_more_ids_are_advised_for_losses_that_compare_ids(
        self, gkd: dict[str, Any], is_advised: bool, tmp_path: Path
    ) -> None:
        run = make_run(tmp_path / "run", **{"actor/teacher_topk_mass": 0.5})
        (run / "config.yaml").write_text(yaml.safe_dump({"gkd": gkd}))
        assert ("N_LOGPROBS" in advice_section(read_run(run))) == is_advised


class TestNumbers:
    def test_reduced_points_keep_means_and_extremes(self) -> None:
        values = np.random.default_rng(0).normal(size=10_007)
        points = reduce_points(Series("x", np.arange(10_007, dtype=np.float64), values), 300)
        assert len(points.means) <= 300 and points.lows.min() == values.min() and points.highs.max() == values.max()
        assert np.all(points.lows <= points.means) and np.all(points.means <= points.highs)

    def test_smooth_of_a_line_keeps_its_inside(self) -> None:
        values = np.arange(50, dtype=np.float64)
        assert np.allclose(smooth(values, 9)[4:-4], values[4:-4])

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (0, "0"),
            (1234.4, "1234"),
            (12_345, "12.3k"),
            (2e6, "2M"),
            (-0.5, "\N{MINUS SIGN}0.5"),
            (1e-5, "1e\N{MINUS SIGN}5"),
        ],
    )
    def test_number_is_short(self, value: float, expected: str) -> None:
        assert number(value) == expected

    @pytest.mark.parametrize(
        ("seconds", "expected"),
        [(0.25, "250 ms"), (12, "12 s"), (76, "1 min 16 s"), (3720, "1 h 2 min"), (200_000, "2 d 7 h")],
    )
    def test_duration_has_two_units(self, seconds: float, expected: str) -> None:
        assert duration(seconds) == expected


class TestTime:
    def test_stages_add_up_to_the_steps(self, tmp_path: Path) -> None:
        times = stage_times(read_run(make_run(tmp_path / "run")).series)
        assert times is not None and sum(times.totals.values()) == pytest.approx(60.0)
        assert times.seconds["waiting for the teacher"].sum() == pytest.approx(30.0)

    def test_spans_of_a_killed_run_are_read(self, tmp_path: Path) -> None:
        trace = TraceFile(tmp_path / "trace.json")
        for step in range(12):
            trace.record("actor", "update", 10.0 + step, 10.5 + step, {"step": step})
        trace.record("trainer", "validate", 21.6, 21.9, {})
        trace.begin("rollout 0", "generate", 22.0, {"step": 12})
        names, spans = read_spans(tmp_path / "trace.json")
        assert set(names.values()) == {"actor", "trainer", "rollout 0"} and len(spans) == 13
        assert last_updates(spans) == pytest.approx((3.5, 11.5))


class TestTraceFile:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        """Folder of a run from 12:00 to 13:00, whose trace file is ``trace.json`` in another folder."""
        folder = make_run(tmp_path / "run")
        TraceFile(tmp_path / "trace.json").record("actor", "update", 10.0, 10.5, {"step": 1})
        (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": {"trace_file": f"{tmp_path}/trace.json"}}))
        lines = [{"event": "start", "time": "2026-05-01T12:00:00+00:00"}]
        lines += [{"event": "end", "time": "2026-05-01T13:00:00+00:00", "status": "complete"}]
        (folder / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return folder

    @pytest.mark.parametrize(("hour", "is_shown"), [(11, False), (12, True), (14, False)])
    def test_file_is_shown_if_the_run_has_written_it(
        self, run: Path, tmp_path: Path, hour: int, is_shown: bool
    ) -> None:
        changed = datetime(2026, 5, 1, hour, 30, tzinfo=UTC).timestamp()
        os.utime(tmp_path / "trace.json", (changed, changed))
        assert find_trace(read_run(run)) == (tmp_path / "trace.json" if is_shown else None)

    def test_relative_path_is_not_one_of_the_working_folder(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (run / "config.yaml").write_text(yaml.safe_dump({"trainer": {"trace_file": "trace.json"}}))
        assert find_trace(read_run(run)) is None
        shutil.copy(tmp_path / "trace.json", run)
        assert find_trace(read_run(run)) == run / "trace.json"

    def test_file_that_is_renamed_meanwhile_is_left_out(self, tmp_path: Path) -> None:
        assert read_timeline(tmp_path / "trace.json") is None


class TestSamples:
    def test_lowest_rewards_are_first_and_then_the_largest_gains(self) -> None:
        first = {key: {"reward": reward} for key, reward in enumerate([0.5, 0.0, 1.0, 0.2, 1.0])}
        last = {key: {"reward": reward} for key, reward in enumerate([0.1, 1.0, 1.0, 0.3, 1.0])}
        chosen, order = choose_prompts(list(last), last, first)
        assert chosen == [0, 3, 1, 2, 4]
        assert order == "the prompts with the lowest reward at the end, then those whose reward rose most"

    def test_highest_divergences_are_first_without_rewards(self) -> None:
        first = {key: {"kl": kl} for key, kl in enumerate([0.5, 0.9, 0.1, 0.3, 0.2])}
        last = {key: {"kl": kl} for key, kl in enumerate([0.4, 0.1, 0.0, 0.3, 0.1])} | {5: {}}
        chosen, order = choose_prompts(list(last), last, first)
        assert chosen == [0, 3, 1, 2, 4]
        assert order == "the prompts with the highest KL to the teacher at the end, then those whose KL fell most"

    def test_one_validation_has_no_improvement(self) -> None:
        last = {key: {"reward": reward} for key, reward in enumerate([0.5, 0.2, 1.0, 0.1])}
        assert choose_prompts(list(last), last, None) == ([3, 1, 0, 2], "the prompts with the lowest reward")

    def test_first_prompts_are_shown_without_scores(self) -> None:
        last: dict[int, dict[str, Any]] = {key: {} for key in range(9)}
        assert choose_prompts(list(last), last, last) == ([0, 1, 2, 3, 4, 5], "the first prompts")

    @pytest.mark.parametrize(
        ("scores", "order"),
        [
            ({"reward": 0.5, "kl": 0.25}, "the prompts with the lowest reward."),
            ({"reward": None, "kl": 0.25}, "the prompts with the highest KL to the teacher."),
            ({"reward": None}, "the first prompts."),
        ],
    )
    def test_page_describes_the_chosen_prompts(self, scores: dict[str, Any], order: str, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        for path in (run / "validation").iterdir():
            path.write_text(json.dumps(json.loads(path.read_text()) | scores) + "\n")
        page = own_page(run)
        assert order in page and page.count(">KL 0.25</span>") == 2 * ("kl" in scores)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")
class TestBrowser:
    @pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (400, True)])
    def test_page_works_without_errors_and_requests(self, width: int, is_dark: bool, tmp_path: Path) -> None:
        run, out = make_run(tmp_path / "run"), tmp_path / "report.html"
        TraceFile(run / "trace.json").record("actor", "update", 10.0, 10.5, {"step": 1})
        write_report(run, out)
        with browser_page(tmp_path / "profile") as page:
            page.open(out.as_uri(), width, is_dark=is_dark)
            titles = page.evaluate("[...document.querySelectorAll('.chart h3')].map(title => title.textContent)")
            assert {"Distillation loss", "Validation", "Reward", "Seconds per step"} <= set(titles)
            assert page.evaluate("document.documentElement.scrollWidth") == width
            tip = "document.querySelector('%s .hoverlayer')?.textContent ?? ''"
            expected_tips = {".chart": "step 3", ".bars": "waiting for the teacher", ".gantt": "update 1: 500 ms"}
            for chart, expected in expected_tips.items():
                wait_until(lambda drag=f"{chart} .nsewdrag": page.evaluate(f"!!document.querySelector('{drag}')"), 20)
                page.hover(f"{chart} .nsewdrag", 0.5)
                wait_until(lambda tip=tip % chart: page.evaluate(tip), 20)
                assert expected in page.evaluate(tip % chart)
            faint = page.evaluate("getComputedStyle(document.querySelector('.plot .xtick text')).fill")
            assert faint == ("rgb(114, 124, 138)" if is_dark else "rgb(138, 146, 160)")
            assert page.problems == [] and page.requests == [out.as_uri()]

    def test_keys_read_the_points_of_a_chart(self, tmp_path: Path) -> None:
        out = tmp_path / "report.html"
        write_report(make_run(tmp_path / "run"), out)
        with browser_page(tmp_path / "profile") as page:
            page.open(out.as_uri())
            wait_until(lambda: page.evaluate("!!document.querySelector('.chart .nsewdrag')"), 20)
            key = "new KeyboardEvent('keydown', {key: 'ArrowLeft'})"
            for _ in range(2):
                page.evaluate(f"document.querySelector('.chart .plot').dispatchEvent({key})")
            wait_until(lambda: page.evaluate("document.querySelector('.chart .hoverlayer').textContent"), 20)
            assert page.evaluate("document.querySelector('.chart .hoverlayer').textContent").startswith("step 59")
            assert page.problems == []
