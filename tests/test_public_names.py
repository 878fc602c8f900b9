"""Public names of strategies."""

import inspect

import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus import catalogue
from keras_psplus.cli import command_flags, export, run, serve

ALL = {
    *("communication", "engine", "is_chief", "load_state_dict", "progress", "state_dict", "task"),
    "updates",
}
SYNCHRONOUS = {"finish_updates", "num_workers"}
# What a strategy has beside what `tf.distribute.Strategy` has. Parts of a strategy are not here.
PUBLIC = {
    psp.MultiWorkerMirroredStrategy: SYNCHRONOUS,
    psp.ModelParallelStrategy: SYNCHRONOUS,
    psp.HybridStrategy: {*SYNCHRONOUS, "load_tables", "prefetch", "save_tables", "sync"},
    psp.ParameterServerStrategy: {
        *("backup_workers", "dropped_gradients", "finish_updates", "max_staleness", "mode"),
        *("num_workers", "overlaps_steps", "steps_by_worker"),
    },
    psp.PipelineStrategy: {
        *("activation_compression", "compression", "microbatches", "num_stages", "pipelines"),
        *("recompute", "schedule"),
    },
}


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_strategies_have_these_public_attributes(kind):
    own = {n for n in dir(kind) if not n.startswith("_")} - set(dir(tf.distribute.Strategy))
    assert own == ALL | PUBLIC[kind]


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_timeouts_have_the_same_names(kind):
    parameters = inspect.signature(kind.__init__).parameters
    assert {"startup_timeout", "heartbeat_timeout", "stall_warning"} <= set(parameters)


def test_one_default_of_schedule():
    assert inspect.signature(psp.PipelineStrategy.__init__).parameters["schedule"].default == "1f1b"
    assert "schedule" not in catalogue.ENTRIES["pipeline"].arguments


@pytest.mark.parametrize(
    ("command", "words", "found"),
    [
        (run, ["--max-restarts=2"], ("max_restarts", 2)),
        (run, ["--max-restarts", "2"], ("max_restarts", 2)),
        (run, ["--max_restarts", "2"], ("max_restarts", 2)),
        (run, ["--log-dir", "there"], ("log_dir", "there")),
        (run, ["--nochief"], ("chief", False)),
        (run, ["--no-chief"], ("chief", False)),
        (run, ["--no_chief"], ("chief", False)),
        (run, ["--nodry-run"], ("dry_run", False)),
        (run, ["--no-dry-run"], ("dry_run", False)),
        (export, ["--max-restarts=2"], ("max_restarts", 2)),
        (serve, ["--startup-timeout=2"], ("startup_timeout", 2)),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else None,
)
def test_flags_have_dashes_or_underscores(command, words, found):
    values = command._flags()
    assert command_flags.parse(values, words) == []
    assert values[found[0]].value == found[1]
    assert "--max-restarts, or underscores" in command_flags.help_text("", values)
