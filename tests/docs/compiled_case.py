"""Training of one model with different options of a strategy, compiled by XLA and not."""

import contextlib

import keras
import numpy as np

from tests.parameter_server.options import options as served
from tests.support.cluster import makes_scope, strategy_of
from tests.support.parts import swapped

layers = keras.layers


@makes_scope
def beside(scope, options):
    """Weights after training with each of some options, by number, whether compiled, and place."""
    found = {}
    for i, option in enumerate(options):
        for is_compiled in (True, False):
            keras.utils.set_random_seed(1)
            with made_with(scope, option):
                # Rows of tables on servers, and kernels that are large enough to be compressed.
                stack = [layers.Embedding(24, 8), layers.Flatten(), layers.Dense(64, "tanh")]
                stack += [layers.Dense(64, "tanh"), layers.Dense(3)]
                model = keras.Sequential([keras.Input((8,), dtype="int32"), *stack])
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=is_compiled)
                x = np.arange(8 * 32).reshape(32, 8) * 5 % 24
                model.fit(x, np.arange(32) % 3, 8, shuffle=False, verbose=0)
                for j, value in enumerate(model.get_weights()):
                    found[f"{i}/{is_compiled}/{j}"] = value
    return found


@contextlib.contextmanager
def made_with(scope, option):
    """The scope of a strategy with an option that it has not been made with."""
    import keras_psplus as psp

    strategy = strategy_of(scope)
    if isinstance(strategy, psp.PipelineStrategy):
        strategy = psp.PipelineStrategy(microbatches=2, pipelines=2, **option)
        with strategy.scope():
            yield
    elif isinstance(strategy, psp.ParameterServerStrategy):
        given = {name: psp.updates.get(v) if name == "updates" else v for name, v in option.items()}
        with served(strategy, **given), strategy.scope():
            yield
    else:
        with scope(), swapped(**option):
            yield
