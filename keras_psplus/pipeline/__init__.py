"""Pipelines: a model in stages, each on a worker of its own."""

from keras_psplus.pipeline.plan import Plan
from keras_psplus.pipeline.stages import stage
from keras_psplus.pipeline.strategy import PipelineStrategy

__all__ = ["PipelineStrategy", "Plan", "stage"]
