"""Keys of tables: any int64, and fingerprints of strings."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.arguments import shown

_INTEGERS = tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32
# Divisible by all numbers of servers up to 8, so that these have as many keys each.
BLOCKS = 840
_GOLDEN = 0x9E3779B97F4A7C15


def to_keys(ids: tf.Tensor, name: str) -> tf.Tensor:
    """Keys of ids: themselves, or 64-bit fingerprints of strings.

    Two of `n` strings have one fingerprint with a probability of about `n * n / 2**65`: 3 in a
    million for 10 million strings.

    Args:
        ids: Tensor of integers or strings.

    Returns:
        int64 tensor of the same shape.
    """
    if ids.dtype == tf.string:
        flat = tf.reshape(ids, [-1])
        return tf.reshape(tf.bitcast(tf.fingerprint(flat), tf.int64), tf.shape(ids))
    if ids.dtype == tf.uint64:
        # A key has the same 64 bits.
        ids = tf.bitcast(ids, tf.int64)
    if ids.dtype not in _INTEGERS:
        raise ValueError(
            f"The keys of the layer '{name}' must be integers of up to 64 bits or strings. Cast "
            f'them, or declare the input with `dtype="int64"`. Received: dtype={ids.dtype.name}'
        )
    return ids if ids.dtype == tf.int64 else tf.cast(ids, tf.int64)


def mixed(keys: tf.Tensor) -> tf.Tensor:
    """Bijection of int64 keys to uint64 of which all bits look random (splitmix64's)."""
    return mix(tf.bitcast(keys, tf.uint64))


def mix(bits: tf.Tensor) -> tf.Tensor:
    """The same of uint64."""
    bits = _shift_xor(bits, 30) * _u64(0xBF58476D1CE4E5B9)
    bits = _shift_xor(bits, 27) * _u64(0x94D049BB133111EB)
    return _shift_xor(bits, 31)


def mix_number(number: int) -> int:
    mask = 2**64 - 1
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & mask
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & mask
    return number ^ (number >> 31)


def streams(keys: tf.Tensor, seed: int, count: int) -> tf.Tensor:
    """Random uint64 that are functions of a key and a seed.

    Args:
        keys: int64 vector.

    Returns:
        uint64 tensor of shape `(len(keys), count)`.
    """
    return _streams(keys, _u64(mix_number(seed % 2**64)), count)


def _streams(keys: tf.Tensor, mixed_seed: tf.Tensor, count: int) -> tf.Tensor:
    start = mix(mixed(keys) + mixed_seed)
    # In graphs, TensorFlow would round numbers that are no array's.
    steps = np.array([(_GOLDEN * i) % 2**64 for i in range(1, count + 1)], np.uint64)
    return mix(start[:, tf.newaxis] + tf.constant(steps))


def random_16_bits(keys: tf.Tensor, update: tf.Tensor, column: int, count: int) -> tf.Tensor:
    """Random uint16 that are functions of a key, an update and a column.

    Args:
        keys: int64 vector.
        update: int64 scalar.
        column: Below 256.

    Returns:
        uint16 tensor of shape `(len(keys), count)`.
    """
    # No seed of initial rows is as large.
    seed = mix(tf.cast(update, tf.uint64) * _u64(256) + _u64(2**63 + column))
    words = _streams(keys, seed, (count + 3) // 4)
    return tf.reshape(tf.bitcast(words, tf.uint16), [-1, 4 * ((count + 3) // 4)])[:, :count]


def blocks_of(hashes: tf.Tensor) -> tf.Tensor:
    """Block of each key, of `BLOCKS`: block `b` lies on server `b % servers`."""
    return tf.cast(_shift(hashes, 32) % _u64(BLOCKS), tf.int32)


def owners_of(keys: tf.Tensor, servers: int) -> tf.Tensor:
    return blocks_of(mixed(keys)) % servers


def _shift(bits: tf.Tensor, by: int) -> tf.Tensor:
    return tf.bitwise.right_shift(bits, _u64(by))


def _shift_xor(bits: tf.Tensor, by: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(bits, _shift(bits, by))


def _u64(value: Any) -> tf.Tensor:
    return tf.constant(value, tf.uint64)


def part_of(hashes: tf.Tensor, parts: int) -> tf.Tensor:
    """Index of a key's part of `parts`, a power of two."""
    return tf.cast(_shift(hashes, 65 - parts.bit_length()), tf.int32)


def uniform(bits: tf.Tensor) -> tf.Tensor:
    """Uniform float32 between 0 and 1, of random bits.

    Args:
        bits: uint32 tensor.
    """
    upper = tf.cast(tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32)), tf.float32)
    return (upper + 0.5) * 2.0**-24


# Initial rows of keys: functions of the key and the seed alone.


# As a table's `default`.
ZEROS = "zeros"
_Maker = Callable[[tf.Tensor], tf.Tensor]
_MakerOfAny = Callable[[tf.Tensor, int, int, dict[str, Any]], tf.Tensor]
# Standard normal distribution up to 2, where Keras truncates it.
_BELOW_TWO = 0.5 * (1 + math.erf(2 / math.sqrt(2)))


def check_initializer(initializer: Any) -> dict[str, Any]:
    """Configuration of an initializer, for `maker`.

    Args:
        initializer: Keras initializer, or its name.
    """
    found = keras.initializers.get(initializer)
    name = type(found).__name__
    config = found.get_config() if isinstance(found, keras.initializers.Initializer) else {}
    seed = getattr(found, "seed", None)
    if name not in _MAKERS or type(found).__module__.split(".")[0] != "keras":
        raise ValueError(
            "`initializer` must be one of Keras's whose rows do not depend on a table's size: "
            f"{', '.join(_MAKERS)}. Received: initializer={shown(initializer)}"
        )
    if seed is not None and not isinstance(seed, int):
        raise ValueError(f"The initializer's seed must be an int. Received: seed={shown(seed)}")
    return {"kind": name, "seed": seed or 0, "config": {**config, "seed": None}}


def maker_of_missing(spec: dict[str, Any]) -> _Maker | None:
    """Function that makes rows of keys which a table lacks, or None for zeros."""
    return None if spec["default"] == ZEROS else maker(spec)


def maker(spec: dict[str, Any]) -> _Maker:
    """Function that makes the first rows of an int64 vector of keys.

    Args:
        spec: Of the table.
    """
    initializer, dim = spec["initializer"], spec["dim"]
    make, config, seed = _MAKERS[initializer["kind"]], initializer["config"], initializer["seed"]
    constraint = keras.constraints.get(spec.get("constraint"))
    stored = spec.get("rows_dtype") or "float32"

    def rows(keys: tf.Tensor) -> tf.Tensor:
        made = tf.ensure_shape(make(keys, dim, seed, config), [None, dim])
        made = made if constraint is None else constraint(made)
        return tf.cast(tf.cast(made, stored), tf.float32)

    return rows


def _uniform(keys: tf.Tensor, dim: int, seed: int) -> tf.Tensor:
    # Each of 64 bits makes two numbers.
    bits = streams(keys, seed, (dim + 1) // 2)
    halves = tf.reshape(tf.bitcast(bits, tf.uint32), [-1, 2 * ((dim + 1) // 2)])
    return uniform(halves[:, :dim])


def _constant(value: float) -> _MakerOfAny:
    def make(keys: tf.Tensor, dim: int, seed: int, config: dict[str, Any]) -> tf.Tensor:
        return tf.fill([tf.size(keys), dim], tf.constant(config.get("value", value), tf.float32))

    return make


def _random_uniform(keys: tf.Tensor, dim: int, seed: int, config: dict[str, Any]) -> tf.Tensor:
    low, high = config["minval"], config["maxval"]
    return low + (high - low) * _uniform(keys, dim, seed)


def _random_normal(keys: tf.Tensor, dim: int, seed: int, config: dict[str, Any]) -> tf.Tensor:
    return config["mean"] + config["stddev"] * tf.math.ndtri(_uniform(keys, dim, seed))


def _truncated_normal(keys: tf.Tensor, dim: int, seed: int, config: dict[str, Any]) -> tf.Tensor:
    inside = (1 - _BELOW_TWO) + (2 * _BELOW_TWO - 1) * _uniform(keys, dim, seed)
    return config["mean"] + config["stddev"] * tf.math.ndtri(inside)


_MAKERS: dict[str, _MakerOfAny] = {
    "Zeros": _constant(0.0),
    "Ones": _constant(1.0),
    "Constant": _constant(0.0),
    "RandomUniform": _random_uniform,
    "RandomNormal": _random_normal,
    "TruncatedNormal": _truncated_normal,
}
