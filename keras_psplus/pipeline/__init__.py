"""Pipelines: a model in stages, each on another worker."""

from keras_psplus.pipeline.base.stages import stage
from keras_psplus.pipeline.split.plan import Plan
from keras_psplus.pipeline.strategy import PipelineStrategy

__all__ = ["PipelineStrategy", "Plan", "stage"]
