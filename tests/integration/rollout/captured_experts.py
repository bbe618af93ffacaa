"""Jobs of a rollout engine on a CPU. Its routers are observed, because vLLM returns experts of tokens on GPUs only."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from recipe_gkd.commands.gpu_smoke.tiny_engine import generate, running_engine
from recipe_gkd.commands.gpu_smoke.tiny_models import make_prompts
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Response
from recipe_gkd.errors import GkdError
from recipe_gkd.rollout.engine_factory import build_engine
from recipe_gkd.rollout.engine_options import EngineOptions
from recipe_gkd.rollout.engine_requests import to_response
from recipe_gkd.rollout.environment import worker_environment
from tests._support.waiting import PATIENCE_S


def sample_with_experts(rank: int, world_size: int, port: int, config: Config, vocabulary: int) -> list[Response]:
    """Return responses to 8 prompts of a model with 4 experts of a token, with the experts that computed their tokens.

    The prompts are generated one after the other, so that the rows of a router are the tokens of one sequence.
    """
    os.environ.update(worker_environment("cpu"))
    chosen: dict[int, list[torch.Tensor]] = defaultdict(list)

    def observe(engine: Any) -> int:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        model = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
        for runner in (module for module in model.modules() if isinstance(module, MoERunner)):
            runner.router.set_capture_fn(lambda ids, layer=runner.layer_id: chosen[layer].append(ids.clone()))
        return int(engine.model_config.get_total_num_hidden_layers())

    found = []
    with running_engine(config, timeout_s=PATIENCE_S) as (engine, _):
        n_layers = engine.run(observe).result()
        for prompt in make_prompts(8, vocabulary=vocabulary):
            chosen.clear()
            params = {"max_tokens": 40, "temperature": 1.0, "seed": prompt.uid}
            [response] = generate(engine, [prompt], [params]).values()
            routed = {layer: torch.cat(ids) for layer, ids in chosen.items()}
            experts_PX = np.zeros((len(prompt.ids) + len(response.ids) - 1, n_layers, 4), np.int16)
            for layer, ids_PX in routed.items():
                experts_PX[:, layer] = ids_PX.numpy()
            found.append(replace(response, routed_experts_PX=experts_PX))
    return found


def start_with_error(rank: int, world_size: int, port: int, config: Config) -> str:
    """Return the error of the start of an engine."""
    os.environ.update(worker_environment("cpu"))
    try:
        build_engine(EngineOptions.from_config(config, "cpu"))
    except GkdError as error:
        return str(error)
    raise AssertionError("the engine started")


def convert_output(rank: int, world_size: int, port: int, experts_PX: np.ndarray) -> Response:
    """Return the response for an output of vLLM with experts, and without tokens."""
    os.environ.update(worker_environment("cpu"))
    from recipe_gkd.rollout.vllm.compat import CompletionOutput, FlatLogprobs, RequestOutput

    completion = CompletionOutput(0, "", [], None, FlatLogprobs(), routed_experts=experts_PX)
    output = RequestOutput("0", None, [1, 2, 3, 4], None, [completion], True)
    return to_response(0, output, 0)
