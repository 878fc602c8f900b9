"""Recipes of optimizers, their arguments and schedules: a model with a table and layers.

Each batch has every row of the table once: servers update the rows of a batch only, and sum those
of one id before they square them.
"""

import keras
import numpy as np

from tests.matrix.training import bundle, compiled, fitted, numbers

L, opt, S = keras.layers, keras.optimizers, keras.optimizers.schedules
ROWS = 32


def _ids():
    rng = np.random.default_rng(0)
    return np.concatenate([rng.permutation(16).reshape(8, 2) for _ in range(4)]).astype("int32")


def _program(make, has_table=True):
    def run(names):
        name = names[0]
        table = L.Embedding(16, 4, name="table") if has_table else L.Rescaling(0.1)
        layers = [
            keras.Input((2,), dtype="int32"),
            table,
            L.Flatten(),
            L.Dense(6, "tanh", name="first"),
            L.LayerNormalization(name="norm"),
            L.Dense(2, name="last"),
        ]
        model = keras.Sequential(layers)
        compiled(model, make(name, model), "mse")
        return fitted(model, _ids(), numbers(ROWS, 2, seed=1), batch_size=8)

    return run


def _multi():
    rules = opt.OptimizerMap(opt.SGD(0.05), {".*kernel": opt.Adam(0.01)})
    return opt.MultiOptimizer(rules)


OPTIMIZERS = {
    "Adadelta": lambda: opt.Adadelta(1.0),
    "Adafactor": lambda: opt.Adafactor(0.01),
    "Adagrad": lambda: opt.Adagrad(0.05),
    "Adam": lambda: opt.Adam(0.01),
    "AdamW": lambda: opt.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: opt.Adamax(0.01),
    "Ftrl": lambda: opt.Ftrl(0.05),
    "Lamb": lambda: opt.Lamb(0.01),
    "Lion": lambda: opt.Lion(0.01),
    "LossScaleOptimizer": lambda: opt.LossScaleOptimizer(opt.SGD(0.05), initial_scale=2.0**10),
    "MultiOptimizer": _multi,
    "Muon": lambda: opt.Muon(0.01),
    "Nadam": lambda: opt.Nadam(0.01),
    "Optimizer": lambda: Warmed(0.05),
    "RMSprop": lambda: opt.RMSprop(0.01),
    "SGD": lambda: opt.SGD(0.05),
    "ScheduleFreeAdamW": lambda: opt.ScheduleFreeAdamW(0.01),
}


@keras.saving.register_keras_serializable("matrix")
class Warmed(opt.SGD):
    """A formula of one's own, with a vector that is read and a number that each step changes."""

    def build(self, variables):
        super().build(variables)
        self.rates = keras.Variable([0.5, 1.0, 2.0], name="rates")
        self.steps = keras.Variable(0.0, name="steps")

    def update_step(self, gradient, variable, learning_rate):
        rate = keras.ops.sum(self.rates.value) / 3.0
        self.assign_add(self.steps, 0.25)
        super().update_step(gradient, variable, learning_rate * rate * (1.0 + self.steps.value))


# Names that a program of another has as well.
_WITH = {"MultiOptimizer": ("OptimizerMap",)}
for _name in OPTIMIZERS:
    if hasattr(opt, _name):
        _names = (_name, *_WITH.get(_name, ()))
        _make = OPTIMIZERS[_name]
        bundle(
            "optimizers",
            f"optimizers: {_name}",
            _names,
            _program(lambda name, model, make=_make: make()),
        )


# By bundle: the class, its arguments that ride together, and the others.
ARGUMENTS = {
    "Adam": ("Adam", {"beta_1": 0.7, "beta_2": 0.8, "epsilon": 1e-3, "amsgrad": True}),
    "Adam, clipped and decayed": ("Adam", {"clipnorm": 0.05, "weight_decay": 0.1}),
    "Adam, averaged": ("Adam", {"use_ema": True, "ema_momentum": 0.7, "global_clipnorm": 0.1}),
    "Adam, overwritten": ("Adam", {"ema_overwrite_frequency": 3, "use_ema": True}),
    "Adam, accumulated": ("Adam", {"gradient_accumulation_steps": 3}),
    "SGD": ("SGD", {"momentum": 0.8, "nesterov": True, "clipvalue": 0.01}),
    # Not of gradients of tables.
    "SGD, scaled": ("SGD", {"loss_scale_factor": 8.0}),
    "RMSprop": ("RMSprop", {"centered": True, "momentum": 0.5, "rho": 0.8}),
    "Adafactor": (
        "Adafactor",
        {
            **{"beta_2_decay": -0.5, "clip_threshold": 0.5, "epsilon_1": 1e-3, "epsilon_2": 0.1},
            "relative_step": False,
        },
    ),
    "Adagrad": ("Adagrad", {"initial_accumulator_value": 0.5}),
    "Ftrl": (
        "Ftrl",
        {
            **{"beta": 0.2, "learning_rate_power": -0.7, "l1_regularization_strength": 0.01},
            **{"l2_regularization_strength": 0.1, "l2_shrinkage_regularization_strength": 0.1},
        },
    ),
    "Muon": (
        "Muon",
        {
            **{"adam_beta_1": 0.7, "adam_beta_2": 0.8, "adam_weight_decay": 0.3, "muon_a": 3.0},
            **{"adam_lr_ratio": 0.5, "muon_b": -4.0, "muon_c": 2.0, "ns_steps": 3},
            **{"rms_rate": 0.4, "exclude_layers": ["first"], "exclude_embeddings": False},
        },
    ),
    "ScheduleFreeAdamW": ("ScheduleFreeAdamW", {"warmup_steps": 3}),
    "LossScaleOptimizer": (
        "LossScaleOptimizer",
        {"inner_optimizer": "RMSprop", "initial_scale": 4.0, "dynamic_growth_steps": 2},
    ),
    "MultiOptimizer": ("MultiOptimizer", {"optimizer_map": None}),
    # Not an argument, but of the same kind.
    "AdamW without decay of names": ("AdamW", {"exclude_from_weight_decay by names": 0}),
    "AdamW without decay of variables": ("AdamW", {"exclude_from_weight_decay by variables": 0}),
}
_EXCLUDED = {
    "exclude_from_weight_decay by names": lambda model: {
        "var_names": ["first", "^sequential/table/embeddings:0$"]
    },
    "exclude_from_weight_decay by variables": lambda model: {
        "var_list": [model.get_layer("first").kernel]
    },
}


def _with_arguments(kind, arguments):
    def run(names):
        def make(_, model):
            some = {name: arguments[name] for name in names}
            if kind == "MultiOptimizer":
                return _multi()
            if kind == "LossScaleOptimizer":
                some.pop("inner_optimizer", None)
                return opt.LossScaleOptimizer(opt.RMSprop(0.01), **some)
            [*excluded] = [name for name in some if name in _EXCLUDED]
            if excluded:
                optimizer = opt.AdamW(0.02, weight_decay=0.5)
                optimizer.exclude_from_weight_decay(**_EXCLUDED[excluded[0]](model))
                return optimizer
            if "ema_momentum" in some or "ema_overwrite_frequency" in some:
                some["use_ema"] = True
            if kind == "SGD":
                some.setdefault("momentum", 0.5)
            return getattr(opt, kind)(0.02, **some)

        return _program(make, "loss_scale_factor" not in names)(names[:1])

    return run


for _title, (_kind, _arguments) in ARGUMENTS.items():
    if hasattr(opt, _kind):
        bundle(
            "arguments of optimizers",
            f"optimizers with arguments: {_title}",
            _arguments,
            _with_arguments(_kind, _arguments),
        )
SCHEDULES = {
    "CosineDecay": lambda: S.CosineDecay(0.1, 6, warmup_target=0.2, warmup_steps=2),
    "CosineDecayRestarts": lambda: S.CosineDecayRestarts(0.1, 3),
    "ExponentialDecay": lambda: S.ExponentialDecay(0.1, 3, 0.5, staircase=True),
    "InverseTimeDecay": lambda: S.InverseTimeDecay(0.1, 2, 0.5),
    "LearningRateSchedule": lambda: Sawtooth(),
    "PiecewiseConstantDecay": lambda: S.PiecewiseConstantDecay([2, 5], [0.1, 0.05, 0.01]),
    "PolynomialDecay": lambda: S.PolynomialDecay(0.1, 6, power=2.0),
}


@keras.saving.register_keras_serializable("matrix")
class Sawtooth(S.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / (1.0 + keras.ops.cast(step, "float32") % 3.0)

    def get_config(self):
        return {}


for _name in SCHEDULES:
    bundle(
        "schedules",
        f"schedules: {_name}",
        (_name,),
        _program(lambda name, model: opt.SGD(SCHEDULES[name](), momentum=0.5)),
    )
