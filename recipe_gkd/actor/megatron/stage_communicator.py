"""Exchange of hidden states between pipeline stages, whose shapes are known from the plan of the micro-batches."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from recipe_gkd.actor.batch.micro_batch_plan import MicroBatchPlan
from recipe_gkd.actor.megatron.megatron_model import MegatronModel

Shape = tuple[int, int, int]


def communicator_options(model: MegatronModel, plan: MicroBatchPlan) -> dict[str, Any]:
    """Return the arguments of Megatron's schedule that replace its communicator; none without pipeline stages.

    Args:
        plan: Micro-batches of the schedule's run.
    """
    if model.layout.pp_size == 1:
        return {}
    # The schedules require the groups with a communicator. These are the groups that they would use without it.
    # Megatron 0.19 needs `tp_dp_cp` for routers with a correction of the scores.
    names = ["tp", "cp", "pp", "dp_cp", "tp_dp_cp", "embd", "pos_embd"]
    groups = ProcessGroupCollection.use_mpu_process_groups(names)
    return {"p2p_communicator": StageCommunicator(model.chunks[0].config, plan), "pg_collection": groups}


class StageCommunicator(P2PCommunicator):
    """Communicator of one run of a pipeline schedule. Each stage computes the shapes that it receives from the plan.

    Megatron's communicator sends the shape of each hidden state and gradient before the tensor itself
    (``_communicate_shapes``). To read the shape, the host waits until the GPU has completed all previous work, so it
    cannot launch a micro-batch before the GPU is idle.

    Args:
        config: Megatron's configuration.
        plan: Micro-batches of the run, equal on all stages of a model.
    """

    def __init__(self, config: TransformerConfig, plan: MicroBatchPlan) -> None:
        super().__init__(mpu.get_pipeline_model_parallel_group(), config)
        layout, n_chunks = plan.layout, config.virtual_pipeline_model_parallel_size or 1
        sequence_ranks = layout.tp_size if config.sequence_parallel else 1
        shapes = [(plan.row_length(index) // sequence_ranks, 1, config.hidden_size) for index in range(plan.count)]
        table = get_schedule_table(plan.count, n_chunks, config.microbatch_group_size_per_vp_stage)
        self._shapes_from_prev = iter(_received(shapes, table, wraps_around=layout.pp_rank == 0))
        self._shapes_from_next = iter(_received(shapes, table, wraps_around=layout.is_last_stage))

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        """Return the shapes of the next tensors from the previous and from the next stage, if they are received."""
        from_prev = next(self._shapes_from_prev) if recv_prev else None
        return from_prev, next(self._shapes_from_next) if recv_next else None


def _received(shapes: list[Shape], table: list[tuple[int, int]], *, wraps_around: bool) -> list[Shape]:
    """Return the shapes of the tensors that a rank receives from one neighbor, in order.

    Every rank runs the forward passes in the order of Megatron's schedule table, and the backward passes in the same
    order of micro-batches with the chunks reversed. So the same function is valid for both directions.

    Args:
        shapes: Shape of the hidden state of each micro-batch.
        table: Micro-batch and chunk of each pass.
        wraps_around: True if the tensors go from the last pipeline rank to the first one, or in the backward passes
            from the first to the last. The results of the neighbor's last chunk are then not sent.
    """
    last_chunk = table[-1][1]
    return [shapes[index] for index, chunk in table if not (wraps_around and chunk == last_chunk)]
