"""What goes for all tests."""

import collections
import gc
import logging
import os
import pathlib
import signal
import subprocess
import sys

import hypothesis
import pytest

# Python's garbage collector would walk through TensorFlow and Keras again and again, also while the
# tests import them. What children of this process do is not changed; see quick_start.py for that.
gc.set_threshold(50_000, 20, 20)

# pytest's handlers are given the library's lines, as `log.show` would show them.
logging.getLogger("keras_psplus").setLevel(logging.INFO)

# What a shell starts with `&` ignores SIGINT, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Scripts that tests start import what they have in common from this folder.
_ROOT = str(pathlib.Path(__file__).resolve().parents[1])
if _ROOT not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *inherited])

# Hundreds of processes import the library, and each would compile its five hundred files, in a
# third of a second, where Python is told to leave no bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A machine that is busy is no error.
hypothesis.settings.register_profile("without a deadline", deadline=None)
hypothesis.settings.load_profile("without a deadline")

# Folders and files whose scripts new interpreters run, as they are about how these start, or start
# scripts that need no TensorFlow. Those of the others are started by `warm.py`.
COLD = (
    *("benchmarks", "native", "versions", "wheels"),
    *(f"cluster/test_{name}.py" for name in ("launchers", "memory", "preflight", "processes")),
    *(f"cluster/test_{name}.py" for name in ("slurm", "testing", "warm")),
    *("core/test_preemption.py", "docs/test_tutorial.py", "tests/test_warm.py"),
    *("faults/test_injector.py", "faults/test_links.py"),
)

_FAILED_SETUPS = collections.Counter()


def pytest_configure(config):
    config.addinivalue_line("markers", "cases(*names): what a test looks at; see selection.py")
    config.addinivalue_line(
        "markers", "extended: what `make test` leaves out; see support/tiers.py"
    )
    config.addinivalue_line("markers", "processes: not in `make test-fast`; see there")
    config.addinivalue_line("markers", "matrix: only in `make matrix`; see matrix/test_matrix.py")


@pytest.fixture(scope="module", autouse=True)
def warm_start(request):
    from tests import warm

    with pytest.MonkeyPatch.context() as patch:
        folder = request.path.parent.name
        if {folder, f"{folder}/{request.path.name}"}.isdisjoint(COLD):
            patch.setattr(subprocess, "Popen", warm.Popen)
        yield


def pytest_collection_modifyitems(items):
    # Files of jobs take minutes, of which one at the end would leave all but one processor idle.
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)


def pytest_collection_finish():
    gc.freeze()


def pytest_sessionfinish(session):
    from tests.support import cluster

    problems = cluster.end_all()
    if problems:
        print("\n".join(["", "Clusters that did not end well:", *problems]), file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if _FAILED_SETUPS[item.path] > 1:
        pytest.fail("Not tried: what this module's tests need has failed twice.", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "setup" and report.failed:
        # A job that all tests of a module look at takes minutes, and would be run for each again.
        _FAILED_SETUPS[item.path] += 1
    if report.failed:
        report.sections.append(("this test alone", f"python -m pytest '{item.nodeid}'"))
    return report
