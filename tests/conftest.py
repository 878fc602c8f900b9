"""What goes for all tests."""

import collections
import contextlib
import fcntl
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
# third of a second, where Python is told to leave no bytecode. So would pytest those of tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

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
    *("faults/test_injector.py", "faults/test_links.py", "keras_hooks/test_one_door.py"),
)

_FAILED_SETUPS = collections.Counter()
_NOT_ENDED_WELL = []


def pytest_configure(config):
    config.addinivalue_line("markers", "cases(*names): what a test looks at; see selection.py")
    config.addinivalue_line(
        "markers", "extended: what `make test` leaves out; see support/tiers.py"
    )
    config.addinivalue_line("markers", "processes: not in `make test-fast`; see there")
    config.addinivalue_line("markers", "matrix: only in `make matrix`; see matrix/test_matrix.py")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Has one process of several rewrite the assertions of a file, and the others read it."""
    with contextlib.ExitStack() as stack:
        if isinstance(collector, pytest.Module) and "PYTEST_XDIST_TESTRUNUID" in os.environ:
            path = collector.path
            name = f"{path.stem}.{sys.implementation.cache_tag}-pytest-{pytest.__version__}.pyc"
            if not (path.parent / "__pycache__" / name).exists():
                fcntl.flock(stack.enter_context(path.open()), fcntl.LOCK_EX)
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def warm_start(request):
    from tests import warm

    with pytest.MonkeyPatch.context() as patch:
        folder = request.path.parent.name
        if {folder, f"{folder}/{request.path.name}"}.isdisjoint(COLD):
            patch.setattr(subprocess, "Popen", warm.Popen)
        yield


def pytest_collection_modifyitems(items):
    from tests.support import shared_clusters

    # Files of jobs take minutes, of which one at the end would leave all but one processor idle.
    def place(item):
        is_last = item.get_closest_marker("processes") is None
        return is_last, shared_clusters.place_of(item.nodeid)[1]

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from tests.support import shared_clusters

    return shared_clusters.scheduling(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_finish():
    gc.freeze()
    if "tensorflow" in sys.modules:
        from tests.support import graphs

        graphs.run_as_traced()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    from tests.support import cluster, shared_clusters

    # Tasks that nobody needs any more ask each other for signs of life.
    if nextitem and shared_clusters.row_of(item.nodeid) != shared_clusters.row_of(nextitem.nodeid):
        _NOT_ENDED_WELL.extend(cluster.end_all(but=["plain"]))


def pytest_sessionfinish(session):
    from tests.support import cluster

    problems = [*_NOT_ENDED_WELL, *cluster.end_all()]
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
