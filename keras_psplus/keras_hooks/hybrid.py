"""Keras under `HybridStrategy`: embeddings whose tables lie on parameter servers."""

import threading

import keras
import tensorflow as tf
from keras.src import backend, layers
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import core, trainer
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.optimizers import base_optimizer

from keras_psplus.hybrid.strategy import HybridStrategy
from keras_psplus.hybrid.variable import TableVariable
from keras_psplus.keras_hooks import optimizer as optimizer_hooks
from keras_psplus.keras_hooks.ownership import ours
from keras_psplus.keras_hooks.patching import replace

_local = threading.local()

# KerasRS's embedding, which sums what Keras's own has looked up.
_EMBED_REDUCE = "keras_rs.src.layers.embedding.embed_reduce.EmbedReduce.call"


def install():
    """Installs this module's hooks."""
    replace(core.Variable, "__init__", ["self", "initializer"])(_note_layer)
    replace(core.Variable, "_initialize_with_initializer", ["self", "initializer"])(_initialize)
    replace(layers.Layer, "add_weight", ["self"])(_add_weight)
    replace(trainer.TensorFlowTrainer, "_maybe_symbolic_build", ["self"])(_build)
    base = base_optimizer.BaseOptimizer
    replace(base, "build", ["self", "variables"])(_build_optimizer)
    replace(
        tf_optimizer.TFOptimizer,
        "add_variable_from_reference",
        ["self", "reference_variable", "name", "initializer"],
    )(_add_slot)
    replace(base, "_clip_gradients", ["self", "grads"])(_clip)
    replace(tf_optimizer.TFOptimizer, "_apply_weight_decay", ["self", "variables"])(_decay)
    replace(
        tf_optimizer.TFOptimizer,
        "_backend_update_step",
        ["self", "grads", "trainable_variables", "learning_rate"],
    )(_update_step)


def table_of(variable):
    """The table that a Keras variable, or one of TensorFlow's, is, or None."""
    value = getattr(variable, "_value", variable)
    return value.table if isinstance(value, TableVariable) and not value.slot else None


def _scope():
    strategy = tf.distribute.get_strategy()
    is_hybrid = isinstance(strategy, HybridStrategy) and strategy.tables is not None
    return strategy if is_hybrid else None


def _note_layer(original, self, initializer, shape=None, *args, **kwargs):
    strategy, self._decision = _scope(), None
    if strategy is not None and getattr(_local, "layer", None) is not None:
        scopes = global_state.get_global_attribute("name_scope_stack")
        of_layer = bool(scopes) and scopes[-1].caller is _local.layer
        if of_layer and _is_table(_local.layer, kwargs.get("name"), shape, kwargs.get("dtype")):
            path = f"{backend.common.name_scope.current_path()}/{kwargs['name']}"
            wish = getattr(_local.layer, "_placement_wish", None)
            self._decision = strategy.placement.decide(path, *shape, wish)
    original(self, initializer, shape, *args, **kwargs)


def _is_table(layer, name, shape, dtype):
    return (
        isinstance(layer, layers.Embedding)
        and _reads_by_rows(type(layer).call)
        and name == "embeddings"
        and len(shape) == 2
        and backend.standardize_dtype(dtype) == "float32"
    )


def _reads_by_rows(call):
    return (
        call is layers.Embedding.call or f"{call.__module__}.{call.__qualname__}" == _EMBED_REDUCE
    )


def _add_weight(original, self, *args, **kwargs):
    outer, _local.layer = getattr(_local, "layer", None), self
    try:
        variable = original(self, *args, **kwargs)
    finally:
        _local.layer = outer
    decision = getattr(variable, "_decision", None)
    if decision is not None and decision.on_servers:
        # The servers apply them, to the rows that a step has touched.
        variable._of_rows = variable.regularizer, variable.constraint
        variable.regularizer = variable.constraint = None
        _tell(variable)
    return variable


def _initialize(original, self, initializer):
    if getattr(_local, "slot", None) is not None:
        value, number = _local.slot
        self._value = TableVariable(value.table, self.name, False, value._strategy, number)
        return None
    decision = getattr(self, "_decision", None)
    strategy = _scope()
    if strategy is None or decision is None or not decision.on_servers:
        return original(self, initializer)
    config = _serialized(initializer)
    table = strategy.tables.make(decision.path, (decision.rows, decision.dim), config)
    self._value = TableVariable(table, self.name, self.trainable, strategy)
    if config is None:
        self._value.assign(initializer(self._shape, dtype=self._dtype))
    _tell(self)
    return None


def _tell(variable):
    """Gives a table what its layer wants done to rows; either of the two may come first."""
    if variable._value is not None and hasattr(variable, "_of_rows"):
        table_of(variable).regularizer, table_of(variable).constraint = variable._of_rows


def _serialized(initializer):
    """An initializer that the servers can make again, or None if they cannot."""
    if not isinstance(initializer, keras.initializers.Initializer):
        return None
    config = keras.initializers.serialize(initializer)
    if not isinstance(config, dict) or not (config.get("module") or "").startswith("keras."):
        return None
    seed = getattr(initializer, "seed", None)
    if isinstance(seed, int):
        # What it has drawn is not in its own configuration.
        config["config"]["seed"] = seed
    elif seed is not None:
        return None
    return config


def _build(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    strategy = ours(self._distribute_strategy)
    if isinstance(strategy, HybridStrategy):
        strategy.announce()


def _build_optimizer(original, self, variables):
    original(self, variables)
    if hasattr(self, "inner_optimizer"):
        return
    for variable in variables:
        if table_of(variable) is not None:
            decays = self.weight_decay and self._use_weight_decay(variable)
            tables = variable._value._strategy.tables
            tables.set_optimizer(table_of(variable), self, self.weight_decay if decays else None)


def _add_slot(original, self, reference_variable, name=None, initializer="zeros"):
    table = table_of(reference_variable)
    if table is None:
        return original(self, reference_variable, name, initializer)
    # Made on the servers already, with all others, in this order.
    slot = getattr(reference_variable, "_value", reference_variable), table.new_slot(self)
    outer, _local.slot = getattr(_local, "slot", None), slot
    try:
        return base_optimizer.BaseOptimizer.add_variable_from_reference(
            self, reference_variable, name=name, initializer=initializer
        )
    finally:
        _local.slot = outer


def _tables_among(optimizer, variables):
    strategy = ours(optimizer._distribution_strategy)
    if not isinstance(strategy, HybridStrategy) or not tf.distribute.get_replica_context():
        return None, []
    return strategy.extended, [i for i, v in enumerate(variables) if table_of(v) is not None]


def _clip(original, self, grads):
    variables = optimizer_hooks.variables_of_update()
    extended, places = _tables_among(self, variables)
    if not places:
        return original(self, grads)
    dense = [i for i in range(len(grads)) if i not in places]
    by_norm = [name for name in ("clipnorm", "global_clipnorm") if getattr(self, name)]
    if by_norm and extended.fence is None:
        limit = getattr(self, by_norm[0])
        raise ValueError(
            f"`{by_norm[0]}` needs the sum of all workers' gradients, which `sync=False` does not "
            f"make: use `clipvalue`, or `sync=True`. Received: {by_norm[0]}={limit}"
        )
    for i in places if by_norm else ():
        extended.send(table_of(variables[i]), grads[i], self, 0.0, waits=True)
    norm, self.global_clipnorm = self.global_clipnorm, None
    try:
        with optimizer_hooks.updating([variables[i] for i in dense]):
            clipped = original(self, [grads[i] for i in dense])
    finally:
        self.global_clipnorm = norm
    _local.scales = {}
    if by_norm:
        squares = extended.square_of([table_of(variables[i]) for i in places])
        if norm:
            own = [tf.reduce_sum(tf.square(tf.cast(g, tf.float32))) for g in map(_values, clipped)]
            scale = _scale_of_norm(tf.sqrt(tf.add_n([*own, *squares])), norm)
            clipped = [g * tf.cast(scale, g.dtype) for g in clipped]
            scales = [scale] * len(places)
        else:
            scales = [_scale_of_norm(tf.sqrt(square), self.clipnorm) for square in squares]
        _local.scales = {table_of(variables[i]).key: s for i, s in zip(places, scales)}
    merged = list(grads)
    for i, gradient in zip(dense, clipped):
        merged[i] = gradient
    return merged


def _values(gradient):
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _scale_of_norm(norm, limit):
    # A norm that is not finite makes all gradients so, as in Keras.
    return limit / tf.maximum(norm, limit) + (norm - norm)


def _decay(original, self, variables):
    return original(self, [v for v in variables if table_of(v) is None])


def _update_step(original, self, grads, trainable_variables, learning_rate):
    extended, places = _tables_among(self, trainable_variables)
    if not places:
        return original(self, grads, trainable_variables, learning_rate)
    scales = getattr(_local, "scales", {})
    for i in places:
        table = table_of(trainable_variables[i])
        if not isinstance(grads[i], tf.IndexedSlices):
            raise ValueError(
                f"The gradient of the table '{table.name}' must be one of rows. "
                f"Received: {grads[i]}"
            )
        if table.optimizer is not self:
            raise ValueError(
                f"The table '{table.name}' on parameter servers is updated by another optimizer. "
                f"Received: {self.name} beside {table.optimizer and table.optimizer.name}"
            )
        if table.key in scales:
            extended.commit(table, self, learning_rate, scales[table.key])
        else:
            extended.send(table, grads[i], self, learning_rate)
    _local.scales = {}
    dense = [i for i in range(len(grads)) if i not in places]
    return original(
        self, [grads[i] for i in dense], [trainable_variables[i] for i in dense], learning_rate
    )
