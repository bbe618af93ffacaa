"""A teacher service with a real worker against transformers."""

from __future__ import annotations

import numpy as np
import torch

from recipe_gkd.commands.gpu_smoke.outcome import CheckFailed, Context
from recipe_gkd.commands.gpu_smoke.reference import response_logps
from recipe_gkd.commands.gpu_smoke.service import TOP_K, running_service
from recipe_gkd.commands.gpu_smoke.tiny_models import engine_dtype, read_model, write_model
from teacher import ScoredSequence, TeacherClient, TeacherSequence

# Largest accepted mean and maximum difference of log-probabilities. An engine in bfloat16 rounds its layers' outputs.
_LIMITS = {"float32": (1e-5, 1e-4), "bfloat16": (0.05, 1.0)}
_LENGTHS = (2, 3, 17, 40, 63, 64)
_PROMPT_TOKENS = 1


def check_teacher(context: Context) -> str:
    """Score random sequences, and compare the top-k and the given tokens; score them again after a sleep."""
    folder = write_model(context.folder / "model", seed=0, with_tokenizer=True)
    model = read_model(folder, torch.float64)
    rng = np.random.default_rng(0)
    sequences = [
        TeacherSequence(rng.integers(0, model.config.vocab_size, length, dtype=np.int32), _PROMPT_TOKENS)
        for length in _LENGTHS
    ]
    run_dir, timeout_s = context.folder / "service", 0.8 * context.deadline_s
    with (
        running_service(folder, run_dir, device=context.device, timeout_s=timeout_s, SLEEP_MODE=1) as port,
        TeacherClient(server_port=port, timeout_s=60) as client,
    ):
        context.figures["engine"] = client.hello().engine
        scored = client.submit(sequences).result(timeout=60)
        client.sleep(timeout_s=60)
        client.wake(timeout_s=60)
        after_sleep = client.submit(sequences).result(timeout=60)
    errors = np.concatenate([_errors(model, *pair) for pair in zip(sequences, scored, strict=True)])
    mean_limit, limit = _LIMITS[engine_dtype(context.device)]
    context.compare("log-probabilities (mean)", float(errors.mean()), mean_limit)
    context.compare("log-probabilities (maximum)", float(errors.max()), limit)
    changes = [
        float(np.abs(after.sampled_logps_T - before.sampled_logps_T).max())
        for before, after in zip(scored, after_sleep, strict=True)
    ]
    context.compare("log-probabilities after a sleep", max(changes), mean_limit)
    return f"{sum(_LENGTHS)} tokens, k = {TOP_K}, {context.figures['engine']}"


def _errors(model: torch.nn.Module, sequence: TeacherSequence, scored: ScoredSequence) -> np.ndarray:
    logps_TV = response_logps(model, sequence.token_ids, sequence.prompt_len)
    if scored.topk_ids_TK.shape != (len(logps_TV), TOP_K):
        raise CheckFailed(f"the service returned ids {scored.topk_ids_TK.shape}, expected {len(logps_TV), TOP_K}")
    return score_errors(logps_TV, sequence, scored)


def score_errors(logps_TV: np.ndarray, sequence: TeacherSequence, scored: ScoredSequence) -> np.ndarray:
    """Return the errors of all log-probabilities of a sequence, flat.

    The top-k is compared by id, and by rank: the largest log-probabilities must be equal, whichever ids tie.
    """
    k, tokens_T1 = scored.topk_ids_TK.shape[1], sequence.scored_ids_T[:, None]
    by_id = scored.topk_logps_TK - np.take_along_axis(logps_TV, scored.topk_ids_TK.astype(np.int64), 1)
    by_rank = scored.topk_logps_TK + np.sort(-logps_TV, axis=1)[:, :k]
    sampled = scored.sampled_logps_T - np.take_along_axis(logps_TV, tokens_T1, 1)[:, 0]
    return np.abs(np.concatenate([by_id.ravel(), by_rank.ravel(), sampled]))
