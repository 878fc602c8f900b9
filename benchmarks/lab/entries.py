"""Strategies that the lab measures: the catalogue's, and further ones."""

import dataclasses
import json
import os

import keras_psplus
from keras_psplus import catalogue

_RACKS = {"topology": "racks"}  # those of the lab
_ROWS_INT8 = {"row_compression": "int8", "pull_compression": "int8"}
# Arguments by class and name.
_FURTHER = {
    "MultiWorkerMirroredStrategy": {
        "all_reduce_auto_topology": {"topology": "auto"},
        "all_reduce_compiled": {},
        "all_reduce_factors_fp16": {"compression": "factors:fp16"},
        "all_reduce_fp16": {"compression": "fp16"},
        "all_reduce_powersgd_1": {"compression": "powersgd:1"},
        "all_reduce_randomk": {"compression": "randomk:0.01"},
        "all_reduce_sign": {"compression": "sign"},
        "all_reduce_two_levels": _RACKS,
        "all_reduce_two_levels_bf16_int8": {
            **_RACKS,
            "compression": {"within": "bf16", "between": "int8"},
        },
        "all_reduce_two_levels_int8": {**_RACKS, "compression": "int8"},
        "all_reduce_two_levels_powersgd": {**_RACKS, "compression": "powersgd:4"},
        "fsdp_compiled": {"shard": "all"},
        "local_sgd_two_levels": {**_RACKS, "updates": "local_sgd:8"},
        # The step without what it is slowed by, to measure by.
        "no_communication": {"compression": "nothing"},
    },
    "ParameterServerStrategy": {
        "async_parameter_server_apart": {"overlap_steps": False},
        "sync_parameter_server_apart": {"mode": "sync", "overlap_steps": False},
    },
    "HybridStrategy": {
        "hybrid_8_steps": {},
        "hybrid_bf16": {"row_compression": "bf16", "pull_compression": "bf16"},
        "hybrid_dynamic": {},
        "hybrid_dynamic_int8": _ROWS_INT8,
        "hybrid_int8": _ROWS_INT8,
        "hybrid_int8_prefetch": {**_ROWS_INT8, "prefetch": True},
        "hybrid_prefetch": {"prefetch": True},
    },
}
ENTRIES = {
    name: catalogue.Entry(name, strategy, arguments)
    for strategy, by_name in _FURTHER.items()
    for name, arguments in by_name.items()
}
# The lab's argument of `model.compile(steps_per_execution=)`.
TOGETHER = {"hybrid_8_steps": 8}
# The lab's table is a `DynamicEmbedding`.
DYNAMIC = ("hybrid_dynamic", "hybrid_dynamic_int8")
# XLA compiles on CPUs as `jit_compile="auto"` does on GPUs.
COMPILED = ("all_reduce_compiled", "fsdp_compiled")


def everything():
    """All entries by name, but pipelines, which `benchmarks/pipeline.py` measures."""
    entries = {**catalogue.ENTRIES, **ENTRIES}
    return {n: entry for n, entry in entries.items() if entry.strategy != "PipelineStrategy"}


def make(name):
    """Makes the strategy of an entry, in a task of the lab."""
    if name in catalogue.ENTRIES:
        return keras_psplus.strategy_from_env(name)
    entry = ENTRIES[name]
    arguments = dict(entry.arguments)
    if arguments.get("topology") == "racks":
        racks = json.loads(os.environ["LAB_RACKS"])
        arguments["topology"] = [
            [i for i, rack in enumerate(racks) if rack == one] for one in sorted(set(racks))
        ]
    if arguments.get("compression") == "nothing":
        arguments["compression"] = keras_psplus.compression.NoCommunication()
    strategy = dataclasses.replace(entry, arguments=arguments).make()
    if name in COMPILED:
        type(strategy.engine).compiles_by_default = True
    return strategy
