"""Reading of stored rows in an actor rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ray
from ray.exceptions import GetTimeoutError, RayError

from recipe_gkd.data.samples import Sample, StoredTopK
from recipe_gkd.errors import DeadlineError, WorkerError


def with_top_k(samples: Sequence[Sample], timeout_s: float) -> list[Sample]:
    """Return the samples with the top-k of their teachers in this process.

    Blocks in the store of this node are mapped into memory, not copied. Others are transferred first.

    Args:
        samples: Shard of a data-parallel rank.
        timeout_s: Time limit of the transfers, in seconds.

    Raises:
        DeadlineError: A transfer did not end in time.
        WorkerError: Rows are lost, because a node died.
    """
    stored = [sample.teacher for sample in samples if isinstance(sample.teacher, StoredTopK)]
    references = list({teacher.block: None for teacher in stored})
    try:
        blocks = dict(zip(references, ray.get(references, timeout=timeout_s), strict=True))
    except GetTimeoutError as error:
        raise DeadlineError(
            f"the teacher's rows did not arrive from the object stores of other nodes within {timeout_s:g} s, for "
            f"{len(samples)} samples",
            waited_s=timeout_s,
            remedy="check the network between the nodes of the actor pool",
        ) from error
    except RayError as error:
        raise WorkerError(
            f"the teacher's rows are lost ({type(error).__name__}: {str(error).splitlines()[0]}): the node that had "
            "them died",
            remedy="resume from the last checkpoint",
        ) from error
    return [
        replace(sample, teacher=sample.teacher.fetched(*blocks[sample.teacher.block][sample.teacher.index]))
        if isinstance(sample.teacher, StoredTopK)
        else sample
        for sample in samples
    ]
