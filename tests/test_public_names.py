"""Public names of strategies."""

import inspect

import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus import catalogue
from keras_psplus.cli import export, run, serve
from keras_psplus.cli.flags import UsageError

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
        (run, ["--chief=false"], ("chief", False)),
        (run, ["--nochief", "--chief=True"], ("chief", True)),
        (run, ["--dry-run=1"], ("dry_run", True)),
        (run, ["--hosts=a, b"], ("hosts", ["a", "b"])),
        (export, ["--max-restarts=2"], ("max_restarts", 2)),
        (serve, ["--startup-timeout=2"], ("startup_timeout", 2)),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else None,
)
def test_flags_have_dashes_or_underscores(command, words, found):
    options = command._parser().read(words)
    assert options.command == [] and getattr(options, found[0]) == found[1]
    assert "--max-restarts, or underscores" in command._parser().format_help()


@pytest.mark.parametrize(
    "behind",
    [["--help"], ["-h", "--ps=9"], ["a b", "--", "-x", "--workers"], ["--nochief", "--unknown"]],
    ids=" ".join,
)
def test_what_is_behind_the_script_is_the_scripts(behind):
    for dashes in ([], ["--"]):
        options = run._parser().read(["--ps", "1", "--chief", *dashes, "train.py", *behind])
        assert options.command == ["train.py", *behind]
        assert (options.ps, options.chief, options.workers) == (1, True, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--work=2"], "no such flag. Did you mean: .* Received: --work=2"),
        (
            ["--workrs", "2", "train.py"],
            "no such flag. Did you mean: --workers\\? Received: --workrs",
        ),
        (["--ps=", "train.py"], "--ps needs a value. Received: --ps=''"),
        (["--ps=1.5"], "--ps must be a whole number. Received: --ps=1.5"),
        (["--timeout=-inf"], "--timeout must be a finite number. Received: --timeout=-inf"),
        (["--grace", "-1"], "--grace must be at least 0. Received: --grace=-1"),
        (["--restart=both"], "--restart: invalid choice: 'both'.*Received: --restart=both"),
        (["--warm=maybe"], "'maybe'. Received: --warm=maybe"),
        (["--log_dir"], "--log-dir: expected one argument. Received: --log_dir"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else None,
)
def test_wrong_flags(words, message):
    with pytest.raises(UsageError, match=message):
        run._parser().read(words)
