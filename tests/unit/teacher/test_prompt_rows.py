"""Rows that the V1 model runner of a teacher computes, with a runner that has only what they read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from teacher.engines.vllm_prompt_rows import SCORED, SUPPORT_IDS, score_responses

N_IDS, HIDDEN = 11, 4
LENGTHS = {f"{number * 7919 % 1000}": 6 + number for number in range(12)}
"""Tokens of each request, by an id whose hash has another order."""


def scored(n_tokens: int) -> np.ndarray:
    """Return the scored positions of a request: after a prompt, and for odd lengths without two tokens in between."""
    positions_T = np.arange(n_tokens // 3, n_tokens)
    return np.delete(positions_T, [1, 2]) if n_tokens % 2 else positions_T


class Runner:
    """Requests of one step: each gets its next tokens, one request behind the other.

    Attributes:
        calls: Rows of each call of ``compute_logits``.
    """

    def __init__(self, lengths: dict[str, int], k: int) -> None:
        rng = np.random.default_rng(0)
        self.calls: list[int] = []
        self.weight_VD = torch.from_numpy(rng.normal(size=(N_IDS, HIDDEN)).astype(np.float32))
        self.hidden = {
            name: torch.from_numpy(rng.normal(size=(n, HIDDEN)).astype(np.float32)) for name, n in lengths.items()
        }
        self.requests = {
            name: SimpleNamespace(
                prompt_token_ids=rng.integers(0, N_IDS, n).tolist(),
                num_computed_tokens=0,
                in_progress_prompt_logprobs_cpu=None,
                sampling_params=SimpleNamespace(
                    extra_args={
                        SCORED: scored(n),
                        SUPPORT_IDS: np.array([[3, -1]] * len(scored(n)), np.int32),
                    }
                ),
            )
            for name, n in lengths.items()
        }
        self.num_prompt_logprobs = dict.fromkeys(lengths, k)
        self.sampler = SimpleNamespace(compute_logprobs=lambda logits: logits.log_softmax(-1))
        self.model = SimpleNamespace(compute_logits=self._compute_logits)
        self.input_batch = SimpleNamespace(req_id_to_index={name: i for i, name in enumerate(lengths)})
        self._get_prompt_logprobs_dict: Any = None

    def _compute_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(hidden_RD))
        return hidden_RD @ self.weight_VD.T

    def step(self, n_tokens: int) -> dict[str, Any]:
        """Compute up to ``n_tokens`` tokens of each unfinished request."""
        scheduled, parts, starts = {}, [], []
        for name, request in self.requests.items():
            first = request.num_computed_tokens
            part = self.hidden[name][first : first + n_tokens]
            starts.append(sum(map(len, parts)))
            if len(part):
                scheduled[name] = len(part)
            parts.append(part)
        self.query_start_loc = SimpleNamespace(np=np.array(starts))
        finished: dict[str, Any] = self._get_prompt_logprobs_dict(torch.cat(parts), dict(reversed(scheduled.items())))
        for name, n in scheduled.items():
            self.requests[name].num_computed_tokens += n
        return finished


class TestScoreResponses:
    def test_any_steps_give_the_rows_of_all_scored_tokens(self) -> None:
        for n_tokens in (1, 4, 100):
            runner = Runner(LENGTHS, k=3)
            score_responses(runner)
            found: dict[str, Any] = {}
            while len(found) < len(LENGTHS):
                found |= runner.step(n_tokens)
            for name, rows in found.items():
                request, positions_T = runner.requests[name], scored(LENGTHS[name])
                logps_TV = (runner.hidden[name][positions_T - 1] @ runner.weight_VD.T).log_softmax(-1)
                tokens_T1 = torch.tensor(request.prompt_token_ids)[positions_T, None]
                top = logps_TV.topk(3)
                assert torch.equal(rows.logprob_token_ids, torch.cat([tokens_T1, top.indices], 1).int())
                support = torch.stack([logps_TV[:, 3], torch.full((len(logps_TV),), -torch.inf)], 1)
                expected = torch.cat([logps_TV.gather(1, tokens_T1), top.values, support], 1)
                torch.testing.assert_close(rows.logprobs, expected)
            assert not runner.num_prompt_logprobs

    def test_requests_are_computed_in_the_order_of_the_runner(self) -> None:
        """All tensor-parallel ranks must compute the logits of the same request at the same time."""
        runner = Runner(LENGTHS, k=0)
        score_responses(runner)
        runner.step(100)
        assert runner.calls == [len(scored(n)) for n in LENGTHS.values()]
