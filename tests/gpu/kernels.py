"""Kernels that this TensorFlow has registered for GPUs; a wheel for CPUs lists them, too."""

import collections
import functools

from tensorflow.python.framework import kernels, op_def_registry

# Kernels of the second serve all devices.
_DEVICES = ("GPU", "DEFAULT")


@functools.cache
def _registered():
    found = collections.defaultdict(list)
    for kernel in kernels.get_all_registered_kernels().kernel:
        if kernel.device_type in _DEVICES and not kernel.label:
            found[kernel.op].append(kernel)
    for of_op in found.values():
        of_op.sort(key=lambda kernel: _DEVICES.index(kernel.device_type))
    return found


def are_registered():
    """Whether TensorFlow was built with kernels for GPUs."""
    return any(kernel.device_type == "GPU" for kernel in _registered()["MatMul"])


def kernel_for(op):
    """Finds the kernel that an operation of a graph would have on a GPU; None if there is none."""
    attributes = op.node_def.attr
    types = [(name, _types(attributes[name])) for name in _constrained(op.type)]
    return _kernel_for(op.type, tuple(types))


@functools.cache
def _constrained(op_type):
    """Names of the attributes that kernels of an operation make conditions of."""
    return sorted({each.name for kernel in _registered()[op_type] for each in kernel.constraint})


def _types(attribute):
    return frozenset(attribute.list.type) or frozenset([attribute.type])


@functools.cache
def _kernel_for(op_type, types):
    for kernel in _registered()[op_type]:
        conditions = ((each.name, each.allowed_values.list.type) for each in kernel.constraint)
        if all(dict(types)[name] <= {*allowed} for name, allowed in conditions):
            return kernel
    return None


def arguments(op):
    """Pairs of tensor and name in the op's definition: of the inputs, and of the outputs."""
    definition = op_def_registry.get(op.type) or op.op_def
    return tuple(
        list(zip(tensors, _names(op, declared)))
        for tensors, declared in (
            (op.inputs, definition.input_arg),
            (op.outputs, definition.output_arg),
        )
    )


def _names(op, declared):
    attributes = op.node_def.attr
    for argument in declared:
        times = 1
        if argument.number_attr:
            times = attributes[argument.number_attr].i
        elif argument.type_list_attr:
            times = len(attributes[argument.type_list_attr].list.type)
        yield from [argument.name] * times
