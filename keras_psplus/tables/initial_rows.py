"""Initial rows of keys: functions of the key and the seed alone."""

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.arguments import shown
from keras_psplus.tables import keys as keys_module

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

    Raises:
        ValueError: If rows of single keys cannot be made by it.
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
    return None if spec["default"] == ZEROS else maker(spec["initializer"], spec["dim"])


def maker(initializer: dict[str, Any], dim: int) -> _Maker:
    """Function that makes the rows of an int64 vector of keys.

    Args:
        initializer: What `check_initializer` has returned.
        dim: Numbers in a row.
    """
    make, config, seed = _MAKERS[initializer["kind"]], initializer["config"], initializer["seed"]

    def rows(keys: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(make(keys, dim, seed, config), [None, dim])

    return rows


def _uniform(keys: tf.Tensor, dim: int, seed: int) -> tf.Tensor:
    # Each of 64 bits makes two numbers.
    bits = keys_module.streams(keys, seed, (dim + 1) // 2)
    halves = tf.reshape(tf.bitcast(bits, tf.uint32), [-1, 2 * ((dim + 1) // 2)])
    return keys_module.uniform(halves[:, :dim])


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
