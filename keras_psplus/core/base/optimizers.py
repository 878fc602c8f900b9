"""Optimizers of a model, and the variables that a strategy needs of them."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.base import checks
from keras_psplus.keras_internals.keras_parts import backend

if TYPE_CHECKING:
    from keras_psplus.updates import Updates


# Optimizers, metrics and variables that a model reaches, whether they are attributes or not.
#
# Keras saves the attributes of layers. A train_step may use more: what is in objects of the
# script's own, in closures, or in global names that its functions read.


# Objects and functions of these packages hold nothing of a script's.
_LIBRARIES = frozenset(
    "keras tensorflow keras_psplus numpy keras_hub keras_rs pandas scipy sklearn torch jax grain "
    "h5py PIL absl google".split()
) | set(sys.stdlib_module_names)
# Attributes of layers that only lead back to other ones.
_INTERNAL = ("_self_", "_tracker", "_distribute_strategy", "_inbound", "_outbound", "_parent_path")
# Of objects that are looked at; more are no optimizers, but data.
_MOST_OBJECTS, _MOST_ELEMENTS, _MOST_DEPTH = 20_000, 1_000, 12
_FOUND = (keras.optimizers.Optimizer, keras.metrics.Metric, keras.Variable, tf.Variable)
_Finds: TypeAlias = Iterator[tuple[str, Any, bool]]


def objects_of(model: keras.Model) -> Iterator[tuple[str, Any, bool]]:
    """Finds optimizers, metrics and variables by their names.

    Args:
        model: The model. Layers that it does not have, but reaches, count as their variables.

    Yields:
        Triples of a name, which is the same in each process that runs the script, an object, and
        whether Keras finds it, too: it is an attribute of a layer, or in a list or dict that is.
    """
    yield from _Search().in_layers("", model)


class _Search:
    """One walk through the objects that a model reaches; each of them is seen once."""

    def __init__(self) -> None:
        # Objects by id, as an id may be another's once an object is gone.
        self._seen: dict[int, Any] = {}

    def in_layers(self, prefix: str, model: keras.Layer) -> _Finds:
        """Looks through a model and the layers that it has."""
        layers = list(model._flatten_layers())
        self._seen.update((id(layer), layer) for layer in layers)
        for number, layer in enumerate(layers):
            of_layer = f"_of_layer_{number}" if number else ""
            for attribute, value in list(vars(layer).items()):
                if attribute.startswith(_INTERNAL):
                    continue
                name = f"{prefix}{attribute}{of_layer}"
                if isinstance(value, dict):
                    value = list(value.values())
                for i, one in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                    yield from self._look(f"{name}_{i}" if i else name, one, 0, not prefix)
        for number, layer in enumerate(layers):
            yield from self._look_at_class(f"{prefix}layer_{number}", layer, 0)

    def _look(self, name: str, value: Any, depth: int, is_attribute: bool = False) -> _Finds:
        if id(value) in self._seen or _is_plain(value) or depth > _MOST_DEPTH:
            return
        if len(self._seen) > _MOST_OBJECTS:
            return
        self._seen[id(value)] = value
        if isinstance(value, _FOUND):
            yield name, value, is_attribute
        elif isinstance(value, keras.random.SeedGenerator):
            yield f"{name}/state", value.state, False
        elif isinstance(value, keras.Layer):
            for i, variable in enumerate(value.variables):
                yield from self._look(f"{name}/{i}", variable, depth + 1)
            yield from self.in_layers(f"{name}/", value)
        elif isinstance(value, dict):
            yield from self._look_at(name, list(value.values())[:_MOST_ELEMENTS], depth)
        elif isinstance(value, (list, tuple)):
            yield from self._look_at(name, value[:_MOST_ELEMENTS], depth)
        else:
            yield from self._look_into(name, value, depth)

    def _look_at(self, name: str, values: Iterable[Any], depth: int) -> _Finds:
        for i, value in enumerate(values):
            yield from self._look(f"{name}/{i}", value, depth + 1)

    def _look_into(self, name: str, value: Any, depth: int) -> _Finds:
        """Looks at what a function uses, or at an object's attributes and methods."""
        if isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords.values()]
            yield from self._look_at(name, parts, depth)
        elif isinstance(value, types.MethodType):
            yield from self._look_at(name, [value.__self__, value.__func__], depth)
        elif isinstance(function := _function(value), types.FunctionType):
            if not _is_of_library(function.__module__):
                for used, one in _used_by(function):
                    yield from self._look(f"{name}/{used}", one, depth + 1)
        elif not _is_of_library(type(value).__module__):
            for attribute, one in list(getattr(value, "__dict__", {}).items()):
                yield from self._look(f"{name}/{attribute}", one, depth + 1)
            yield from self._look_at_class(name, value, depth)

    def _look_at_class(self, name: str, value: object, depth: int) -> _Finds:
        """Looks at what the methods of an object's class use."""
        for cls in type(value).__mro__:
            if _is_of_library(cls.__module__):
                continue
            for attribute, member in list(vars(cls).items()):
                for one in _functions(member):
                    yield from self._look(f"{name}/{attribute}", one, depth + 1)


def _functions(member: Any) -> list[Any]:
    """Functions of a class's member; other members, such as optimizers, are returned unchanged."""
    if isinstance(member, property):
        return [one for one in (member.fget, member.fset) if one is not None]
    if isinstance(member, (staticmethod, classmethod)):
        return [member.__func__]
    return [member]


def _function(value: Any) -> Any:
    """The Python function of what wraps one, as `tf.function` does."""
    value = getattr(value, "python_function", value)
    return getattr(value, "__wrapped__", value) if callable(value) else value


def _used_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # It is empty up to now.
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for i, value in enumerate(function.__defaults__ or ()):
        yield f"default_{i}", value


@functools.lru_cache(4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    names = {
        one.argval
        for one in dis.get_instructions(code)
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names.update(_global_names(inner))
    return tuple(sorted(names))


def _is_plain(value: object) -> bool:
    return value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, type, types.ModuleType, tf.Tensor, set)
    )


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


_NO_NUMBERS = tf.string, tf.resource, tf.variant


def variables_of_apply(
    optimizer: keras.optimizers.Optimizer,
    updates: Updates | None,
    grads: Sequence[tf.Tensor | tf.IndexedSlices | None],
    trainable_variables: Iterable[keras.Variable] | None,
) -> list[keras.Variable] | None:
    """The variables of a call of `optimizer.apply`, which is built and fit for `updates`.

    Returns:
        List of variables, or None if the call has no gradients, or too little to build by.
    """
    if trainable_variables is None:
        if not optimizer.built:
            return None
        trainable_variables = optimizer._trainable_variables
    variables = list(trainable_variables)
    if not optimizer.built:
        # Before any branch of the graph: variables are made outside of them.
        with backend.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
    if all(gradient is None for gradient in grads):
        return None
    # Of optimizers that compile() was not given.
    checks.check_accumulation(updates, optimizer)
    checks.check_accumulation(updates, unwrapped(optimizer))
    return variables


def optimizers_of(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """All optimizers that a model and its methods reach, by names; without their wrappers."""
    found: dict[str, keras.optimizers.Optimizer] = {}
    for name, one in reached_optimizers(model).items():
        inner = unwrapped(one)
        if all(inner is not other for other in found.values()):
            found[name] = inner
    return found


def steps_of(model: keras.Model) -> int:
    """Sum of the steps that a model's optimizers have made."""
    return sum(int(one.iterations.numpy()) for one in optimizers_of(model).values())


def reached_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """All optimizers that a model and its methods reach, by names; wrappers as they are."""
    return {name: one for name, one, _ in objects_of(model) if _is_optimizer(one)}


def variables_of_optimizers(model: keras.Model) -> list[keras.Variable]:
    """All variables of a model's optimizers and of what wraps them, each of them once."""
    every = (v for one in reached_optimizers(model).values() for v in one.variables)
    return list({id(v): v for v in every}.values())


def unwrapped(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer that a `LossScaleOptimizer` wraps, or the same."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def is_wrapper(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether others update in an optimizer's place, as in `MultiOptimizer`."""
    return hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers")


def loss_scale(optimizer: keras.optimizers.Optimizer | None) -> tf.Tensor | None:
    """Factor of the gradients that an optimizer is given now; None without one."""
    scale = getattr(optimizer, "dynamic_scale", None)
    if scale is None:
        scale = getattr(optimizer, "loss_scale_factor", None)
    return None if scale is None else tf.identity(tf.cast(scale, tf.float32))


def iterations_of(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """Number of an optimizer's updates, an int64 scalar."""
    return tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.int64)


def other_variables(model: keras.Model) -> dict[str, keras.Variable | tf.Variable]:
    """Variables that a model reaches, by names, but which Keras does not save with it."""
    found, known = {}, [*model.variables, *model.metrics_variables]
    for name, one, is_attribute in objects_of(model):
        if _is_optimizer(one):
            if is_attribute:
                known += [*one.variables, *unwrapped(one).variables]
                continue
            of_one = [*one.variables, *unwrapped(one).variables]
        else:
            of_one = one.variables if isinstance(one, keras.metrics.Metric) else [one]
        found.update({f"{name}/{i}": variable for i, variable in enumerate(of_one)})
    seen, others = {id(v) for v in known}, {}
    for name, variable in found.items():
        if id(variable) not in seen and tf.as_dtype(variable.dtype) not in _NO_NUMBERS:
            seen.add(id(variable))
            others[name] = variable
    return others


def _is_optimizer(one: object) -> bool:
    return isinstance(one, keras.optimizers.Optimizer)


def averaged_with_weights(
    optimizer: keras.optimizers.Optimizer, policy: Any, variables: Sequence[keras.Variable]
) -> list[keras.Variable]:
    """Optimizer variables that are averaged with the weights of workers that step alone."""
    if not policy.local:
        return []
    averaged = list(optimizer._model_variables_moving_average) if optimizer.use_ema else []
    if policy.average_slots:
        shapes = {tuple(variable.shape) for variable in variables}
        # Neither counters nor the learning rate, which are the same everywhere.
        averaged += [
            v
            for v in optimizer.variables
            if v.value.dtype.is_floating
            and tuple(v.shape) in shapes
            and v.name != "learning_rate"
            and all(v is not one for one in averaged)
        ]
    return averaged


# Optimizers of a model in a backup: their kinds, and their trained variables.
#
# Keras reads an optimizer's variables from a file if the optimizer has them, and only the one that
# `compile()` was given is built before the first step. Those of a train_step's own are built here,
# by what the backup says of them.

_KIND, _TRAINS, _VARIABLES = "class", "trains", "variables"


def describe(model: keras.Model) -> dict[str, Any]:
    """Describes all optimizers that a model reaches, as a dict for JSON."""
    places = _places(model)
    found: dict[str, Any] = {}
    for name, one in reached_optimizers(model).items():
        inner = unwrapped(one)
        found[name] = {_KIND: type(inner).__name__, _TRAINS: None, _VARIABLES: None}
        if one.built:
            trained = [places.get(id(v)) for v in inner._trainable_variables]
            found[name].update({_TRAINS: trained, _VARIABLES: forms(one.variables)})
    return found


def build(strategy: tf.distribute.Strategy, model: keras.Model, described: dict[str, Any]) -> None:
    """Builds optimizers that were built when the backup was made; in each process alike."""
    own = reached_optimizers(model)
    places = None
    for name, of_backup in described.items():
        one = own.get(name)
        if one is None or one.built or of_backup[_TRAINS] is None:
            continue
        if places is None:
            places = by_place(model)
        trained = [places.get(place) for place in of_backup[_TRAINS]]
        if all(variable is not None for variable in trained):
            with strategy.scope():
                one.build(trained)


def difference(model: keras.Model, described: dict[str, Any]) -> tuple[str, str] | None:
    """Finds what differs between a model's optimizers and those of a backup."""
    own = describe(model)
    for name in sorted({*own, *described}):
        ours, theirs = own.get(name), described.get(name)
        if ours is None or theirs is None or ours[_KIND] != theirs[_KIND]:
            return _named(name, ours), _named(name, theirs)
        if theirs[_VARIABLES] is not None and ours[_VARIABLES] != theirs[_VARIABLES]:
            first, second = first_difference(ours[_VARIABLES] or (), theirs[_VARIABLES])
            return f"{first} in {_named(name, ours)}", f"{second} in {_named(name, theirs)}"
    return None


def check_reached(model: keras.Model, used: Iterable[keras.optimizers.Optimizer]) -> None:
    """Sees that all optimizers of a step can be restored in another process."""
    reached = {id(unwrapped(one)) for one in optimizers_of(model).values()}
    places, lost = _places(model), []
    for one in map(unwrapped, used):
        if id(one) not in reached:
            lost.append(f"optimizer '{one.name}' ({type(one).__name__})")
        lost += [v.path for v in one._trainable_variables if id(v) not in places]
    if lost:
        raise ValueError(
            "A backup would lack what a step of this model changes, and a job that resumes from it "
            "would go on with other numbers. Make it an attribute of the model: "
            f"`model.optimizer_2 = ...`. Received: {', '.join(dict.fromkeys(lost))}"
        )


def first_difference(own: Sequence[Any], saved: Sequence[Any]) -> tuple[Any, Any]:
    """The first pair of elements that differ, or else the lengths."""
    differing = ((a, b) for a, b in zip(own, saved) if a != b)
    return next(differing, (len(own), len(saved)))


def forms(variables: Iterable[Any]) -> list[list[Any]]:
    """The shapes and types of variables."""
    return [[list(variable.shape), tf.as_dtype(variable.dtype).name] for variable in variables]


def by_place(model: keras.Model) -> dict[Any, Any]:
    """Variables by their number in the model, or by their name within it."""
    return dict([*other_variables(model).items(), *enumerate(model.variables)])


def _places(model: keras.Model) -> dict[int, int | str]:
    return {id(variable): place for place, variable in by_place(model).items()}


def _named(name: str, of_one: Mapping[str, Any] | None) -> str:
    return "no" if of_one is None else f"{of_one[_KIND]} '{name}'"


# Tensors of single numbers.


def scalar_tensor(number: int | float, dtype: tf.DType) -> tf.Tensor:
    """A scalar tensor of a number that is another one in each step.

    `tf.constant` would do, but eagerly TensorFlow keeps the tensor of each Python number, and of
    each `np.float64`, until the process ends, should the same number be asked for again
    (`TFE_TensorHandleCache`): 0.8 kB for each step. It keeps none that is made of an array.
    """
    return tf.constant(np.array(number, dtype.as_numpy_dtype))
