"""Tasks that start as forks of a process that has imported modules; tests/test_warm.py has more."""

import os
import signal
import textwrap

import pytest

from keras_psplus.cluster import processes
from keras_psplus.cluster.process.warm import WarmPython, WarmStartError
from keras_psplus.cluster.processes import LocalCluster
from tests.endings import wait_for_end

pytestmark = pytest.mark.processes
SCRIPT = """
import json, os, pathlib, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}-{task['index']}"
"""


@pytest.fixture
def make(tmp_path):
    """Makes clusters whose tasks run a script in forks; without TensorFlow."""
    path = tmp_path / "script.py"
    with WarmPython(["colorsys"]) as warm:

        def make(body, restart=0, **options):
            path.write_text(SCRIPT + textwrap.dedent(body))
            argv = ["/no/python", str(path), "one", "two words"]
            options = {"workers": 2, "log_dir": tmp_path, "warm": warm, **options}
            return LocalCluster(argv, restart=restart, kill_grace=2.0, **options)

        yield make


def test_a_task_is_as_one_of_a_new_interpreter(make):
    body = """
    here = pathlib.Path(sys.argv[0]).parent
    assert "colorsys" in sys.modules and sys.argv[1:] == ["one", "two words"]
    assert sys.path[0] == str(here) and sys.orig_argv[1:] == sys.argv
    assert __name__ == "__main__" and sys.modules["__main__"].name is name
    assert sys.stdin.read() == "" and os.getsid(0) == os.getpid()
    print(name, os.environ["OMP_NUM_THREADS"] == os.environ["TF_NUM_INTRAOP_THREADS"])
    print("to stderr", file=sys.stderr)
    def of_the_user():
        raise ArithmeticError("so it is")
    if name == "worker-1":
        of_the_user()
    """
    with make(body) as cluster:
        result = cluster.wait(60)
    assert result.exit_codes == {"worker-0": 0, "worker-1": 1}
    assert result.logs["worker-0"] == "worker-0 True\nto stderr\n"
    _, _, trace = result.logs["worker-1"].partition("Traceback (most recent call last):\n")
    assert trace.lstrip().startswith(f'File "{cluster.log_dir / "script.py"}"'), trace
    assert trace.endswith("ArithmeticError: so it is\n")
    # Who has nothing to say of its environment has that of the launcher.
    assert "TF_CONFIG" not in os.environ


def test_a_killed_one_is_started_again_by_the_same_process(make, tmp_path):
    body = """
    again = os.environ["KERAS_PSPLUS_RESTART"] == "1"
    print(name, "again" if again else "first", flush=True)
    if not again:
        (pathlib.Path(sys.argv[0]).parent / name).touch()
        time.sleep(100)
    """
    pids = []

    def attempt(restart):
        cluster = make(body, restart)
        if not restart:
            start = cluster.start

            def start_and_kill():
                start()
                while not (tmp_path / "worker-1").exists():
                    pass
                pids.extend(cluster.pids.values())
                os.kill(cluster.pids["worker-1"], signal.SIGKILL)

            cluster.start = start_and_kill
        return cluster

    result = processes.run(attempt, 1, 60, sleep=lambda seconds: None)
    assert result.exit_code == 0
    log = (tmp_path / "worker-1.log").read_text()
    assert log == "worker-1 first\nkeras-psplus: restart 1\nworker-1 again\n"
    for pid in pids:
        wait_for_end(pid)


def test_an_evaluator_has_its_input(make):
    body = """
    if name == "evaluator-0":
        print(repr(sys.stdin.read()))
    """
    with make(body, evaluator=True) as cluster:
        result = cluster.wait(60)
    assert result.exit_code == 0
    assert result.logs["evaluator-0"] == "''\n"


def test_a_process_that_was_killed_has_a_successor(make):
    for _ in range(2):
        with make("print(name)") as cluster:
            assert cluster.wait(60).logs == {f"worker-{i}": f"worker-{i}\n" for i in range(2)}
        warm = cluster._processes._warm._process
        warm.kill()
        warm.wait()


def test_modules_that_cannot_be_imported_are_named(tmp_path):
    with WarmPython(["no_such_module"]) as warm:
        cluster = LocalCluster(["python", "script.py"], 1, log_dir=tmp_path, warm=warm)
        with pytest.raises(WarmStartError, match=r"no_such_module.* has ended[\s\S]*Received:"):
            cluster.start()
