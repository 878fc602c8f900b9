"""What is found in walks of steps, where in the library, and what of it is known."""

import collections
import typing

import numpy as np
import tensorflow as tf

import keras_psplus

NO_KERNEL, INT32, COPY, REDUCE = "no kernel", "int32", "copy", "reduce"
WAIT, EDGES, BATCH = "wait", "edges", "batch"
# Bytes that may cross between host and GPU.
MOST_COPIED = 1 << 16
# An int32 tensor on the host has fewer elements than one in so many of the largest gradient.
_PART_OF_GRADIENT = 128
# All-reduces of other types are refused on GPUs; int32 and bfloat16 among them (TF 2.21, H200).
_REDUCED = (tf.float16, tf.float32, tf.float64, tf.int64)
_LIBRARY = f"{next(iter(keras_psplus.__path__))}/"
# Frames that say nothing: all operations pass through them.
_WRAPPERS = ("keras_hooks/", "tf_internals/")


class Finding(typing.NamedTuple):
    """A loss or a failure on GPUs.

    Attributes:
        kind: NO_KERNEL: an operation runs on the host, for want of a kernel. INT32: a tensor of a
            gradient's size is in host memory, as operations on GPUs have it for int32. COPY: more
            than `MOST_COPIED` bytes, or an unknown number, cross between host and GPU. REDUCE: an
            all-reduce of a type that is refused on GPUs. WAIT: the host reads something of a GPU
            that a GPU's own work then waits for. EDGES: an operation of the host waits for several
            of a GPU's, each of which costs a message. BATCH: the step copies what it is given to
            the GPU, instead of an iterator before it.
        op: Type of the operation.
        dtypes: Names of types: the operation's, or the tensor's.
        where: File and function of the library that has made the operation.
        size: Bytes of the tensor, or None.
        to_host: Of COPY: whether it is from GPU to host.
        times: Of WAIT: how many there are.
    """

    kind: str
    op: str
    dtypes: str
    where: str
    size: int | None = None
    to_host: bool | None = None
    times: int | None = None


def find(walk, gradient):
    """Lists what is wrong in a `Walk`, each once.

    Args:
        walk: The walk.
        gradient: How many elements the largest gradient has.
    """
    found = []
    for op in walk.without_kernel:
        names = {t.dtype.base_dtype.name for t in [*op.inputs, *op.outputs]}
        found.append(Finding(NO_KERNEL, op.type, " ".join(sorted(names)), where(op)))
    for tensor, op in walk.host_int32:
        elements = tensor.shape.num_elements()
        if elements is None or elements * _PART_OF_GRADIENT >= gradient:
            found.append(_of_tensor(INT32, tensor, op))
    for copy in walk.copies:
        size = _bytes(copy.tensor)
        if size is None or size > MOST_COPIED:
            found.append(_of_tensor(COPY, copy.tensor, copy.op)._replace(to_host=copy.to_host))
    for op in walk.collectives:
        if op.type.startswith("CollectiveReduce") and op.inputs[0].dtype not in _REDUCED:
            found.append(_of_tensor(REDUCE, op.inputs[0], op))
    found += [_of_tensor(BATCH, t, t.op)._replace(size=None) for t in walk.batches]
    found += [Finding(EDGES, op.type, "", where(op)) for op in walk.fans]
    waits = collections.Counter(
        Finding(WAIT, one.op.type, one.dtype, where(one.op)) for one in walk.waits
    )
    return _largest(found) + [f._replace(times=times) for f, times in waits.items()]


def _of_tensor(kind, tensor, op):
    return Finding(kind, op.type, tensor.dtype.base_dtype.name, where(op), _bytes(tensor))


def _bytes(tensor):
    elements = tensor.shape.num_elements()
    return None if elements is None else elements * tensor.dtype.size


def _largest(found):
    largest = {}
    for finding in found:
        size = np.inf if finding.size is None else finding.size
        key = finding._replace(size=None)
        if key not in largest or size > largest[key][0]:
            largest[key] = size, finding
    return [finding for _, finding in largest.values()]


def where(op):
    """File and function of the library nearest to an operation; Keras's own if there is none."""
    for frame in reversed(op.traceback):
        path = frame.filename.removeprefix(_LIBRARY)
        if path != frame.filename and not path.startswith(_WRAPPERS):
            return f"{path} {frame.name}"
    return "keras"
