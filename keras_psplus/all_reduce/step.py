"""One replica's run of one function: its share of the batch, and what must be made global after.

A replica's gradients and means count by its share, `local_rows / global_rows`, so that their sum
over the replicas is that of the global batch, also when the batch is uneven. After the function
has run, everything that a replica changed by itself becomes one value on all of them: metric
states are totals over all replicas, and non-trainable floats such as BatchNormalization's moving
averages are means weighted by rows. All of it travels in one collective for each dtype.
"""

import contextlib
import threading

import tensorflow as tf
from tensorflow.python.framework import ops

from keras_psplus.all_reduce import batches
from keras_psplus.compression import products

_local = threading.local()


def current():
    """The step that this replica's thread is in, or None."""
    return getattr(_local, "step", None)


class Step:
    """Context of one replica's run of one function.

    Args:
        extended: `MultiWorkerMirroredExtended` whose replica this is.
        batch: `Batch` that the function gets, or None if its share is not known.

    Attributes:
        recording: Whether it notes which variables the replica changes by itself.
        alone: Whether gradients are the replica's own, to be applied as they are.
        has_pushed: Whether it has sent gradients to parameter servers since all replicas met.
        has_met: Whether all replicas have met in it.
    """

    def __init__(self, extended, batch=None):
        self._extended = extended
        self._graph = ops.get_default_graph()
        self.rank = extended.rank_in_context()
        self.replicas = extended._num_replicas_in_sync
        self._weight = None
        self._rows = None
        # Positive if the replica has rows; None if nobody has said how many.
        self._has_rows = None
        self._surely_has_rows = False
        self._changed = {}
        self._baselines = {}
        self.touched = set()
        self.recording = True
        self.alone = self.has_pushed = self.has_met = False
        if batch is not None:
            self.set_share(batch.local_rows, batch.global_rows)
            # A padded batch has one row.
            rows = batches.rows_of(batch.data)
            self._surely_has_rows = isinstance(rows, int) and rows > 1

    def __enter__(self):
        self._outer, _local.step = current(), self
        return self

    def __exit__(self, *exc):
        _local.step = self._outer

    @property
    def has_share(self):
        """Whether the step knows what part of the global batch the replica has."""
        return self._weight is not None

    def set_share(self, local_rows, global_rows):
        """Notes the replica's part of the global batch, in rows."""
        global_rows = tf.cast(global_rows, tf.float32)
        # Variables, not tensors: a nested tf.function that was traced in an earlier step's graph
        # reads this step's values.
        self._weight = self._extended.step_variable("share")
        self._weight.assign(
            tf.cast(local_rows, tf.float32) / tf.maximum(global_rows, 1.0), read_value=False
        )
        self._rows = self._extended.step_variable("global rows")
        self._rows.assign(global_rows, read_value=False)
        self._has_rows = self._weight

    def set_rows(self, local_rows):
        """Notes the replica's rows, where nothing depends on those of the others."""
        self._has_rows = self._extended.step_variable("local rows")
        self._has_rows.assign(tf.cast(local_rows, tf.float32), read_value=False)

    @property
    def may_be_empty(self):
        """Whether the replica may have no rows, as far as the graph knows."""
        # A tf.function inside may be called again where that is not so.
        knows = self._surely_has_rows and ops.get_default_graph() is self._graph
        return self._has_rows is not None and not knows

    def has_rows(self):
        """Scalar bool, whether the replica has rows of its own."""
        return tf.constant(True) if self._has_rows is None else self._has_rows.read_value() > 0

    @contextlib.contextmanager
    def applying_alone(self):
        """Context in which optimizers apply the replica's gradients as they are given them."""
        alone, recording = self.alone, self.recording
        self.alone, self.recording = True, False
        try:
            yield
        finally:
            self.alone, self.recording = alone, recording

    def rows(self):
        """Rows of the replica and of the global batch; as of one row if they are not known."""
        everything = tf.constant(1.0) if self._rows is None else self._rows.read_value()
        return self._share() * everything, everything

    def agree_on_share(self, rows):
        """Finds the replica's part of the global batch, of which it has `rows`, with the others."""
        rows = tf.cast(rows, tf.float32)
        self.set_share(rows, self._extended.sum_over_replicas([rows])[0])

    def by_share(self, value):
        """Multiplies by the replica's share of the global batch, `local_rows / global_rows`."""
        return value * tf.cast(self._share(), value.dtype)

    def over_share(self, value):
        """Divides by the replica's share; zero if it has no rows."""
        return tf.math.divide_no_nan(value, tf.cast(self._share(), value.dtype))

    def zero_if_empty(self, tensors):
        """Puts zeros in the place of what a replica without rows has computed, which may be NaN.

        Args:
            tensors: List of tensors, `tf.IndexedSlices` or None. Of slices, none are left.
        """
        if self._has_rows is None:
            return tensors
        # Also where the graph knows that there are rows: others may not, and all replicas have to
        # find the same products.
        none = _of_no_rows if self.may_be_empty else _zeros
        kept = [i for i, tensor in enumerate(tensors) if tensor is not None]
        parts = [self._parts_of(tensors[i]) for i in kept]
        # A cond passes tensors through without a copy, and each as soon as it is there.
        parts = tf.cond(
            self.has_rows(),
            lambda: tf.nest.map_structure(tf.identity, parts),
            lambda: [none(part) for part in parts],
        )
        tensors = list(tensors)
        for i, part in zip(kept, parts):
            if isinstance(part, products.Product):
                part = part.whole()
            elif isinstance(tensors[i], tf.IndexedSlices):
                (values,), old = part, tensors[i]
                indices = old.indices
                if self.may_be_empty:
                    indices = indices[: tf.shape(values)[0]]
                part = tf.IndexedSlices(values, indices, old.dense_shape)
            tensors[i] = part
        return tensors

    def rows_if_any(self, tensor):
        """The rows of a tensor that a replica has computed; none of a replica that has none."""
        if not self.may_be_empty:
            return tensor
        return tensor[: tf.where(self.has_rows(), tf.shape(tensor)[0], 0)]

    def _parts_of(self, gradient):
        """What a gradient is made of: the values of slices, the factors of a product."""
        if isinstance(gradient, tf.IndexedSlices):
            return [gradient.values]
        product = None
        if self._extended.reducers.compresses:
            # Perhaps nobody needs it whole.
            product = products.factors(gradient)
        return gradient if product is None or gradient.consumers() else product

    def sum_over_replicas(self, tensors):
        """Sums small tensors over all replicas; what those without rows have computed is 0."""
        tensors = self.zero_if_empty(list(tensors)) if self.may_be_empty else tensors
        return self._extended.sum_over_replicas(tensors)

    def _share(self):
        if self._weight is None:
            return tf.constant(1.0 / self.replicas)
        return self._weight.read_value()

    def note_baselines(self, variables):
        """Reads accumulated totals before the function adds this replica's part to them."""
        for variable in variables:
            if variable.ref() not in self._baselines:
                # In the step's own graph, also when the first assignment is inside a tf.cond.
                eager = tf.executing_eagerly()
                with contextlib.nullcontext() if eager else self._graph.as_default():
                    value = component(variable).read_value()
                self._baselines[variable.ref()] = (variable, value)

    def record_total(self, variable):
        """Notes that the replica is about to add its part to an accumulated total."""
        self.note_baselines([variable])
        self.touched.add(variable.ref())

    def record(self, variable):
        """Notes that the replica changed a variable by itself."""
        self._changed[variable.ref()] = variable

    @property
    def changed(self):
        """Variables that the replica changed by itself."""
        return list(self._changed.values())

    def synchronise(self, means=(), tensors=()):
        """Makes totals and means global.

        Args:
            means: Variables to set to their mean over all replicas, weighted by rows.
            tensors: Float tensors of static shape to average in the same way.

        Returns:
            The averaged `tensors`.
        """
        share = self._share()

        def unless_empty(value):
            # What an empty replica has computed may be NaN.
            return tf.where(share > 0, value, tf.zeros_like(value))

        def weighted(value):
            return unless_empty(value * tf.cast(share, value.dtype))

        totals = list(self._baselines.values())
        parts = [unless_empty(component(variable).read_value() - base) for variable, base in totals]
        parts += [weighted(component(variable).read_value()) for variable in means]
        parts += [weighted(tensor) for tensor in tensors]
        fence = self._extended.fence
        meets = fence is not None and bool(parts or self.has_pushed or not self.has_met)
        if meets:
            parts.append(fence.arrive())
        sums = self._extended.sum_over_replicas(parts)
        if meets:
            fence.leave(sums.pop())
            self.has_met, self.has_pushed = True, False
        for (variable, base), total in zip(totals, sums):
            component(variable).assign(base + total, read_value=False)
        averages = sums[len(totals) :]
        for variable, average in zip(means, averages):
            component(variable).assign(average, read_value=False)
        self._baselines.clear()
        self._changed.clear()
        return averages[len(means) :]


def component(variable):
    """This replica's copy of a mirrored variable."""
    if hasattr(variable, "_get_on_device_or_primary"):
        return variable._get_on_device_or_primary()
    return variable


def _of_no_rows(part):
    """What a part of a gradient is for a replica without rows."""
    if isinstance(part, (list, products.Product)):
        return tf.nest.map_structure(lambda tensor: tensor[:0], part)
    return _zeros(part)


def _zeros(part):
    return tf.nest.map_structure(tf.zeros_like, part)
