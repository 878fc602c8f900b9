"""The objects of a strategy that its steps are made with."""

import dataclasses

from keras_psplus.pipeline.base.stages import Stages
from keras_psplus.pipeline.replicas.copies import Copies
from keras_psplus.pipeline.replicas.residuals import Residuals
from keras_psplus.pipeline.split.splitter import Splitter
from keras_psplus.pipeline.split.variables import Variables
from keras_psplus.pipeline.wire.traffic import PipelineTraffic


@dataclasses.dataclass(eq=False)
class PipelineContext:
    """The objects of a `PipelineStrategy` that its steps are made with.

    Parts take this, or what they use of it, instead of the strategy, which makes all of them.

    Attributes:
        stages: Stages of layers, and the workers' devices.
        splitter: Splits models into stages.
        variables: Makes and moves variables of layers.
        copies: Copies of weights, with several pipelines.
        residuals: State of the compressors of gradients.
        traffic: Totals of what steps send.
    """

    stages: Stages
    splitter: Splitter
    variables: Variables
    copies: Copies
    residuals: Residuals
    traffic: PipelineTraffic
