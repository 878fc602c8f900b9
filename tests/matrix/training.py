"""Programs that the matrix runs train models by this, so that all of them record the same."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable

import keras
import numpy as np

from tests.matrix.columns import COLUMNS

ROWS, BATCH = 25, 8  # The last batch has one row, and a replica none.
_compile = {}
_bundles = {}


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Names that ride together in one program.

    Attributes:
        family: The family of names.
        title: What the bundle is called.
        names: The names.
        program: Function of some of the names that trains, and returns a model (or None) and a dict
            of arrays.
        tolerance: Of the differences from one process.
        columns: The columns in which it is run.
        counts: Whether the steps that the optimizer has counted are compared.
        makes_scope: Whether the program is also given what makes the scope, and is not in it.
        saves: Whether plain Keras reads the files that its models have.
    """

    family: str
    title: str
    names: tuple
    program: Callable
    tolerance: float = 2e-5
    columns: tuple = tuple(name for name, one in COLUMNS.items() if not one.only_programs)
    counts: bool = True
    makes_scope: bool = False
    saves: bool = True


def bundles():
    """Returns all bundles by title; the modules of recipes have to be imported."""
    return dict(_bundles)


def bundle(family, title, names, program, **options):
    """Adds a bundle."""
    assert title not in _bundles, title
    _bundles[title] = Bundle(family, title, tuple(names), program, **options)


def script(family, *names, makes_scope=False, **options):
    """Decorates a program of no names but its own, which may be given what makes the scope."""

    def add(function):
        called = names or (function.__name__.replace("_", " "),)
        title = f"{family}: {called[0]}"

        def program(names, *scope):
            return function(*scope)

        bundle(family, title, called, program, makes_scope=makes_scope, **options)
        return function

    return add


def compiled(model, optimizer, loss, **options):
    """Compiles a model, as the column asks for, and returns it."""
    model.compile(optimizer, loss, **options | _compile)
    return model


def fitted(model, x, y=None, *, validation=None, **options):
    """Fits a model and returns it with its logs, evaluation and predictions."""
    options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0} | options
    if validation is not None:
        options["validation_data"] = validation
    history = model.fit(x, y, **options).history
    found = {f"history/{name}": np.asarray(values) for name, values in history.items()}
    return model, found


def trained(model, x, y, **options):
    """Fits a model, and records what it evaluates and predicts."""
    few = keras.tree.map_structure(lambda rows: rows[:9], (x, y))
    model, found = fitted(model, x, y, validation=few, **options)
    evaluated = model.evaluate(*few, batch_size=BATCH, verbose=0, return_dict=True)
    found |= {f"evaluate/{name}": np.asarray(value) for name, value in evaluated.items()}
    predicted = model.predict(few[0], batch_size=BATCH, verbose=0)
    for place, value in enumerate(keras.tree.flatten(predicted)):
        found[f"predict/{place}"] = np.asarray(value)
    return model, found


def trained_branches(x, branches, rate, rows):
    """Trains a model of branches of one input, which a head joins; as `trained`."""
    layers = keras.layers
    joined = layers.Concatenate()(branches) if len(branches) > 1 else branches[0]
    model = keras.Model(x, layers.Dense(2, name="head")(joined))
    compiled(model, keras.optimizers.SGD(rate, momentum=0.5), "mse")
    return trained(model, rows, numbers(ROWS, 2, seed=1))


def run(scope, title, names, file=None, reads=False, **compile_options):
    """A case: the program of a bundle for some of its names, and a file of the model.

    Args:
        scope: Function that makes the strategy's scope.
        title: Title of the bundle.
        names: The names.
        file: Path of the file.
        reads: Whether to add, as `read/...`, what Keras reads of the model's file, if it can.
        **compile_options: Further arguments of `compile`.
    """
    from tests.matrix import recipes

    recipes.import_all()
    one, names = _bundles[title], tuple(names)
    with _compiling(compile_options):
        if one.makes_scope:
            model, found = one.program(names, scope)
        else:
            with scope():
                model, found = one.program(names)
    if model is None:
        return found
    found = {name: _numbers(value) for name, value in found.items()}
    found |= weights_and_slots(model)
    if not one.counts:
        found = {name: value for name, value in found.items() if name != "slot/0"}
    if reads and one.saves:
        found |= {f"read/{name}": value for name, value in _read_again(model).items()}
    if file:
        model.save(file)
    return found


run.makes_scope = True


def _read_again(model):
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/model.keras"
        try:
            model.save(file)
            return read(file)
        except Exception:
            return {}


def read(file):
    """A case: the weights and slots of a saved file."""
    from tests.matrix import recipes

    recipes.import_all()
    keras.config.enable_unsafe_deserialization()
    return weights_and_slots(keras.models.load_model(file))


def weights_and_slots(model):
    found = {f"weight/{i}": _numbers(value) for i, value in enumerate(model.get_weights())}
    optimizer = getattr(model, "optimizer", None)
    for place, variable in enumerate(optimizer.variables if optimizer else []):
        if variable.path.rpartition("/")[2] != "seed_generator_state":
            found[f"slot/{place}"] = _numbers(variable)
    return found


def _numbers(value):
    if isinstance(value, keras.Variable):
        value = keras.ops.convert_to_numpy(value)
    value = np.asarray(value)
    return value.astype("float32") if value.dtype.name in ("bfloat16", "float16") else value


@contextlib.contextmanager
def _compiling(options):
    _compile.update(options)
    try:
        yield
    finally:
        _compile.clear()


def numbers(*shape, seed=0, low=-1.0, high=1.0):
    """Float32 numbers of a shape, uniform."""
    return np.random.default_rng(seed).uniform(low, high, shape).astype("float32")


def integers(*shape, below, seed=0):
    """Int32 numbers of a shape, uniform."""
    return np.random.default_rng(seed).integers(0, below, shape).astype("int32")
