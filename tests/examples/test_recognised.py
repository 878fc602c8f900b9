"""The examples that follow Keras's own: under every strategy that fits, as in one process.

They are made small here, and run one after the other in the same processes. Without what they need,
`pip install ".[examples]"`, those that need it are left out.
"""

import importlib.util
import json
import pathlib
import re
import runpy

import numpy as np
import pytest

from keras_psplus.catalogue import lookup
from tests.support.jobs import run_in_processes, run_script

JOB = pathlib.Path(__file__).with_name("recognised_job.py")
TIMEOUT = 200
# What each needs, and how it is made small. Masks of Dropout differ from replica to replica.
EXAMPLES = {
    "mnist_convnet": (
        None,
        ["--epochs=2", "--train_size=256", "--batch_size=64", "--dropout=0"],
    ),
    "text_classification": (
        "keras_hub",
        ["--epochs=2", "--train_size=96", "--batch_size=32", "--dropout=0"],
    ),
    "dlrm": ("keras_rs", ["--epochs=2", "--train_size=4000", "--batch_size=250"]),
}
CHIEF = {"chief": True, "workers": 2}
# Entries beside all-reduce: their tasks, and the examples that fit.
ENTRIES = {
    "hybrid": ({"workers": 2, "ps": 1}, ["dlrm"]),
    "sync_parameter_server": (CHIEF | {"ps": 1}, list(EXAMPLES)),
    "pipeline": (CHIEF, list(EXAMPLES)),
}


def those_installed(names):
    """The examples that can be run; skips the test if there is none."""
    missing = {EXAMPLES[n][0] for n in names if EXAMPLES[n][0]}
    missing = {need for need in missing if importlib.util.find_spec(need) is None}
    found = [name for name in names if EXAMPLES[name][0] not in missing]
    if not found:
        pytest.skip(f"no {', '.join(missing)}: pip install '.[examples]'")
    return found


def arguments(names):
    words = []
    for name in names:
        words += ["--"] * bool(words) + [name, *EXAMPLES[name][1]]
    return words


def results(output, names):
    """What each example has printed for programs, which is one line of the chief's."""
    found = {}
    for name in names:
        (line,) = re.findall(rf"\b{name}: (\{{.*\}})", output)
        found[name] = json.loads(line)
    return found


def flat(result):
    """All numbers of a result, by names, but how long it took."""
    numbers = {f"test {name}": value for name, value in result["test"].items()}
    for name in result.keys() - {"test", "seconds"}:
        assert len(result[name]) == 2, name
        numbers |= {f"{name} {epoch}": value for epoch, value in enumerate(result[name])}
    return numbers


@pytest.fixture(scope="module")
def alone():
    """Results of one process, of all examples that can be run."""
    names = those_installed(EXAMPLES)
    output = run_script(JOB, *arguments(names), timeout=TIMEOUT)
    return results(output, names)


def check(entry, tasks, names, alone, record_property):
    """Runs examples in a cluster and compares them with one process."""
    names = those_installed(names)
    env = {lookup.STRATEGY_VARIABLE: entry}
    done = run_in_processes(JOB, *arguments(names), **tasks, timeout=TIMEOUT, env=env)
    found = results("\n".join(done.logs.values()), names)
    for name in names:
        seconds = {"alone": alone[name]["seconds"], entry: found[name]["seconds"]}
        record_property(name, seconds)
        print(f"{name}: seconds of fit {seconds}")
        assert flat(found[name]) == pytest.approx(flat(alone[name]), rel=2e-4, abs=2e-4), name
    return done


@pytest.mark.extended
@pytest.mark.processes
def test_all_of_them_by_all_reduce(alone, record_property):
    check("all_reduce", {"workers": 2}, EXAMPLES, alone, record_property)


@pytest.mark.extended
@pytest.mark.processes
def test_large_tables_on_servers(alone, record_property):
    tasks, names = ENTRIES["hybrid"]
    done = check("hybrid", tasks, names, alone, record_property)
    log = "\n".join(done.logs.values())
    # As the strategy's table says; the small ones are all-reduced.
    (places,) = {tuple(re.findall(r"(\w+) +\(\d+, 16\) .*(parameter servers|workers) ", log))}
    assert len(places) == 5, log


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.parametrize("entry", ["sync_parameter_server", "pipeline"])
def test_under_other_entries(entry, alone, record_property):
    tasks, names = ENTRIES[entry]
    check(entry, tasks, names, alone, record_property)


def test_mnist_in_the_file_of_keras(tmp_path):
    """The form of what `keras.datasets.mnist` downloads."""
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, (30, 28, 28), "uint8") for name in ("x_train", "x_test")}
    labels = {name: rng.integers(0, 10, 30, "uint8") for name in ("y_train", "y_test")}
    np.savez(tmp_path / "mnist.npz", **images, **labels)
    load_data = runpy.run_path(str(JOB.parents[2] / "examples" / "mnist_convnet.py"))["load_data"]
    for part, (x, y) in zip(("train", "test"), load_data(tmp_path / "mnist.npz"), strict=True):
        assert (x.shape, x.dtype, y.shape) == ((30, 28, 28, 1), "float32", (30, 10))
        np.testing.assert_allclose(x[..., 0] * 255, images[f"x_{part}"], atol=1e-4)
        np.testing.assert_array_equal(y.argmax(-1), labels[f"y_{part}"])
