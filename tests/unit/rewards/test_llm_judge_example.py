"""``docs/examples/llm_judge.py`` with a local server."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from recipe_gkd.rewards import RewardScorer
from tests._support.base_config import base_config
from tests._support.repository import REPO
from tests._support.reward_files import item, settings

EXAMPLE = REPO / "docs" / "examples" / "llm_judge.py"


class Judge(BaseHTTPRequestHandler):
    """Grades an answer with 0.75 if it contains the reference, and otherwise replies with a text."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question, reference = body["messages"][0]["content"].split("\nReference: ")
        content = "Grade: 0.75" if reference in question else "I cannot tell"
        reply = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture
def judge_url() -> Iterator[str]:
    """Address of a local judge."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_judge_scores_each_response(judge_url: str) -> None:
    items = [item(0, "it is 12", ground_truth="12"), item(1, "it is 13", ground_truth="12")]
    with RewardScorer(settings(EXAMPLE, kwargs={"url": judge_url, "model": "judge"})) as scorer:
        graded, refused = asyncio.run(scorer.score(items))
    assert (graded.score, dict(graded.numbers)) == (0.75, {"judge_replied": 1.0})
    assert (refused.score, dict(refused.numbers)) == (0.0, {"judge_replied": 0.0})


def test_keys_in_the_example_are_a_valid_configuration() -> None:
    overrides = re.findall(r"[\w.]+=\S+", ast.get_docstring(ast.parse(EXAMPLE.read_text())) or "")
    assert base_config(*overrides).custom_reward_function.kwargs["model"] == "judge" and len(overrides) == 4
