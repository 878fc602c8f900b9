"""Averages many tensors over workers in few collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from keras_psplus.compression.base import Compressor, Step


def exchange_means(
    compressors: Sequence[Compressor],
    tensors: Sequence[tf.Tensor],
    states: Sequence[Any],
    step: Step,
    all_mean: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]],
) -> tuple[list[Any], ...]:
    """Averages many tensors over workers, each by its own compressor, in few collectives.

    Args:
        compressors: List of reducible `Compressor`s.
        tensors: List of floating tensors of static shapes.
        states: List of the compressors' states.
        step: int64 scalar.
        all_mean: Function from a list of tensors to the list of their means over workers. It is
            called once for each round, and, with `start_step`s, inside a `tf.cond`.

    Returns:
        Lists of the means, of what error feedback has to subtract, and of the new states.

    Raises:
        ValueError: If a compressor is not reducible.
    """
    for compressor in compressors:
        if not compressor.reducible:
            raise ValueError(
                "only payloads of a reducible compressor can be averaged; gather and decode those "
                f"of others. Received: {compressor!r}"
            )
    results: list[Any] = [None] * len(tensors)
    for start in sorted({compressor.start_step for compressor in compressors}):
        at = [i for i, compressor in enumerate(compressors) if compressor.start_step == start]
        means = _mean_from(
            start,
            [compressors[i] for i in at],
            [tensors[i] for i in at],
            [states[i] for i in at],
            step,
            all_mean,
        )
        for i, *result in zip(at, *means):
            results[i] = result
    return tuple(map(list, zip(*results))) if results else ([], [], [])


def _mean_from(
    start: int,
    compressors: Sequence[Compressor],
    tensors: list[tf.Tensor],
    states: Sequence[Any],
    step: Step,
    all_mean: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]],
) -> tuple[list[Any], ...]:
    def whole() -> tuple[list[Any], ...]:
        return list(all_mean(tensors)), list(tensors), list(states)

    def compressed() -> tuple[list[Any], ...]:
        return _side_by_side(compressors, tensors, states, step, all_mean)

    if not start:
        return compressed()
    means: tuple[list[Any], ...] = tf.cond(tf.cast(step, tf.int64) < start, whole, compressed)
    return means


def _side_by_side(
    compressors: Sequence[Compressor],
    tensors: list[tf.Tensor],
    states: Sequence[Any],
    step: Step,
    all_mean: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]],
) -> tuple[list[Any], ...]:
    """Runs generators of `exchange` in step with each other, one `all_mean` for each round."""
    running = {
        i: c.exchange(t, s, step) for i, (c, t, s) in enumerate(zip(compressors, tensors, states))
    }
    # None starts a generator.
    replies: dict[int, Any] = dict.fromkeys(running)
    results = {}
    while running:
        asked = {}
        for i, generator in running.items():
            try:
                asked[i] = generator.send(replies[i])
            except StopIteration as stop:
                results[i] = stop.value
        running = {i: running[i] for i in asked}
        flat = [tensor for i in asked for tensor in asked[i]]
        means = iter(all_mean(flat) if flat else [])
        replies = {i: [next(means) for _ in asked[i]] for i in asked}
    return tuple([results[i][part] for i in sorted(results)] for part in range(3))
