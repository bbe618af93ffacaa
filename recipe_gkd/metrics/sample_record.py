"""Record of the samples that a run was trained on: ``training/samples.jsonl`` in the run folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipe_gkd.data.samples import Sample
from recipe_gkd.metrics.loggers.jsonl_logger import JsonlLogger

FILE = Path("training") / "samples.jsonl"


class SampleRecord:
    """Writer of one line per optimizer step, after the step.

    The lines after the step that a run resumes from are removed, because those steps are repeated. So the file shows
    that each sample was trained on once in the history of the present weights.

    A line has these fields:

    - ``training/global_step``: Number of the step, starting at 1.
    - ``uids``: Ranges ``[first, last]`` of the samples' uids, both inclusive.
    - ``rows``: Row of the data of each prompt, in the order of the uids.
    - ``staleness``: Lowest and highest policy lag, in steps.
    - ``resumed_from``: Step of the checkpoint that was loaded last before this step, at the start of the process or
      after the actor ranks were started again. 0 without one.

    Args:
        root: Run folder.
        completed_steps: Step that the run resumes from.
        responses_per_prompt: Number of consecutive uids that share a prompt.
    """

    def __init__(self, root: Path, completed_steps: int, responses_per_prompt: int) -> None:
        self._responses_per_prompt = responses_per_prompt
        self._lines, self._resumed_from = JsonlLogger(root / FILE, completed_steps), completed_steps

    def __enter__(self) -> SampleRecord:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def write(self, step: int, samples: Sequence[Sample]) -> None:
        """Append the line of a step.

        Args:
            step: Number of the step, starting at 1.
            samples: Its samples, in the order of their uids.
        """
        staleness = [step - 1 - sample.response.weights_version for sample in samples]
        record: dict[str, Any] = {
            "uids": list(_ranges([sample.prompt.uid for sample in samples])),
            "rows": list({s.prompt.uid // self._responses_per_prompt: s.prompt.row for s in samples}.values()),
            "staleness": [min(staleness), max(staleness)],
            "resumed_from": self._resumed_from,
        }
        self._lines.log(step, record)


def _ranges(uids: Sequence[int]) -> Iterator[list[int]]:
    """Yield the ranges of consecutive uids. The parts of a conversation have the same one."""
    first = last = uids[0]
    for uid in uids[1:]:
        if uid not in (last, last + 1):
            yield [first, last]
            first = uid
        last = uid
    yield [first, last]
