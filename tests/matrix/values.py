"""Recipes of initializers, activations, regularizers, constraints and random numbers."""

import keras

from tests.matrix.training import ROWS, bundle, numbers, trained_branches

L = keras.layers


def _branches(layer):
    """A program of one branch for each name: a layer of a trained input."""

    def run(names):
        x = keras.Input((12,))
        h = L.Dense(8, "tanh", name="before")(x)
        branches = [L.Flatten()(layer(name)(h)) for name in names]
        return trained_branches(x, branches, 0.02, numbers(ROWS, 12))

    return run


INITIALIZERS = {
    "Constant": lambda: keras.initializers.Constant(0.1),
    "Identity": lambda: keras.initializers.Identity(0.5),
    "Ones": lambda: keras.initializers.Ones(),
    "Zeros": lambda: keras.initializers.Zeros(),
    "Initializer": lambda: Counted(),
}


@keras.saving.register_keras_serializable("matrix")
class Counted(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None):
        size = 1
        for length in shape:
            size *= length
        return keras.ops.reshape(keras.ops.arange(size, dtype="float32") / (10.0 * size), shape)

    def get_config(self):
        return {}


def _initializer(name):
    make = INITIALIZERS.get(name, getattr(keras.initializers, name))
    return L.Dense(8, kernel_initializer=make())


bundle(
    "initializers",
    "initializers",
    (
        *("Constant", "GlorotNormal", "GlorotUniform", "HeNormal", "HeUniform", "Identity"),
        *("IdentityInitializer", "Initializer", "LecunNormal", "LecunUniform", "Ones"),
        *("Orthogonal", "OrthogonalInitializer", "RandomNormal", "RandomUniform"),
        *("TruncatedNormal", "VarianceScaling", "Zeros"),
    ),
    _branches(_initializer),
)
ACTIVATIONS = (
    *("celu", "elu", "exponential", "gelu", "glu", "hard_shrink", "hard_sigmoid", "hard_silu"),
    *("hard_tanh", "leaky_relu", "linear", "log_sigmoid", "log_softmax", "mish", "relu", "relu6"),
    *("selu", "sigmoid", "silu", "soft_shrink", "softmax", "softplus", "softsign", "sparse_plus"),
    *("sparse_sigmoid", "sparsemax", "squareplus", "tanh", "tanh_shrink", "threshold"),
)
for _number, _names in enumerate((ACTIVATIONS[:15], ACTIVATIONS[15:]), 1):
    bundle(
        "activations",
        f"activations {_number}",
        _names,
        _branches(lambda name: _activated(name)),
    )


def _activated(name):
    if name in ("glu", "threshold"):
        return keras.Sequential([L.Dense(4), Called(name)])
    return L.Dense(4, getattr(keras.activations, name))


@keras.saving.register_keras_serializable("matrix")
class Called(L.Layer):
    """An activation that is no argument of a layer: of another shape, or with numbers."""

    def __init__(self, name_of_activation, **kwargs):
        super().__init__(**kwargs)
        self.called = name_of_activation

    def call(self, x):
        arguments = {"threshold": (0.1, 0.0)}.get(self.called, ())
        return getattr(keras.activations, self.called)(x, *arguments)

    def get_config(self):
        return {**super().get_config(), "name_of_activation": self.called}


REGULARIZERS = {
    "L1": lambda: keras.regularizers.L1(0.01),
    "L1L2": lambda: keras.regularizers.L1L2(0.01, 0.02),
    "L2": lambda: keras.regularizers.L2(0.01),
    "OrthogonalRegularizer": lambda: keras.regularizers.OrthogonalRegularizer(0.01),
    "Regularizer": lambda: Fourth(),
}


@keras.saving.register_keras_serializable("matrix")
class Fourth(keras.regularizers.Regularizer):
    def __call__(self, x):
        return 0.01 * keras.ops.sum(keras.ops.power(x, 4))

    def get_config(self):
        return {}


bundle(
    "regularizers",
    "regularizers",
    REGULARIZERS,
    _branches(
        lambda name: L.Dense(
            4,
            kernel_regularizer=REGULARIZERS[name](),
            activity_regularizer="l2" if name == "L2" else None,
        )
    ),
)
CONSTRAINTS = {
    "Constraint": lambda: Halved(),
    "MaxNorm": lambda: keras.constraints.MaxNorm(0.5),
    "MinMaxNorm": lambda: keras.constraints.MinMaxNorm(0.3, 0.5, rate=0.5),
    "NonNeg": lambda: keras.constraints.NonNeg(),
    "UnitNorm": lambda: keras.constraints.UnitNorm(),
}


@keras.saving.register_keras_serializable("matrix")
class Halved(keras.constraints.Constraint):
    def __call__(self, w):
        return w - 0.5 * keras.ops.mean(w)


bundle(
    "constraints",
    "constraints",
    CONSTRAINTS,
    _branches(lambda name: L.Dense(4, kernel_constraint=CONSTRAINTS[name]())),
)
R = keras.random
# With a seed that is a number, each draws the same at every call, for any rows.
RANDOM = {
    "beta": lambda seed: R.beta((8,), 2.0, 3.0, seed=seed),
    "binomial": lambda seed: R.binomial((8,), 5.0, 0.4, seed=seed),
    "categorical": lambda seed: R.categorical(R.normal((8, 3), seed=5), 1, seed=seed)[:, 0],
    "dropout": lambda seed: R.dropout(keras.ops.ones((8,)), 0.3, seed=seed),
    "gamma": lambda seed: R.gamma((8,), 2.0, seed=seed),
    "normal": lambda seed: R.normal((8,), seed=seed),
    "randint": lambda seed: R.randint((8,), 0, 5, seed=seed),
    "shuffle": lambda seed: R.shuffle(keras.ops.arange(8.0), seed=seed),
    "truncated_normal": lambda seed: R.truncated_normal((8,), seed=seed),
    "uniform": lambda seed: R.uniform((8,), seed=seed),
}


@keras.saving.register_keras_serializable("matrix")
class Noisy(L.Layer):
    """Multiplies by random numbers, which a number or a generator seeds."""

    def __init__(self, draw, generated=False, **kwargs):
        super().__init__(**kwargs)
        self.draw, self.generated = draw, generated
        self.seeds = R.SeedGenerator(3) if generated else 3

    def call(self, x):
        drawn = RANDOM[self.draw](self.seeds)
        return x * (1.0 + 0.1 * keras.ops.cast(drawn, "float32"))

    def get_config(self):
        return {**super().get_config(), "draw": self.draw, "generated": self.generated}


bundle("random", "random, seeded by a number", RANDOM, _branches(Noisy))
bundle(
    "random",
    "random, seeded by a generator",
    ("SeedGenerator",),
    _branches(lambda name: Noisy("normal", generated=True)),
)
