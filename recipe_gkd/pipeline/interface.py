"""Former import path of :class:`PipelineConfig` and :class:`ReadyBatch`."""

from recipe_gkd.data.batches import ReadyBatch
from recipe_gkd.pipeline.config import PipelineConfig

__all__ = ["PipelineConfig", "ReadyBatch"]
