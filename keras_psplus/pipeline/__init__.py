"""Pipelines: a model in stages, each on another worker."""

from keras_psplus.pipeline.plan import Plan
from keras_psplus.pipeline.stages import stage
from keras_psplus.pipeline.strategy import PipelineStrategy

__all__ = ["PipelineStrategy", "Plan", "stage"]
