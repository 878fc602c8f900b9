import json
import os
import signal
import subprocess
import sys

import pytest

from tests import warm
from tests.endings import wait_for_end

TELLS = """
import json, os, random, sys, tempfile, time
print(json.dumps({
    "argv": sys.argv, "parent": os.getppid(), "group": os.getpgid(0) == os.getpid(),
    "cwd": os.getcwd(),
    "variable": os.environ.get("VARIABLE"), "home": os.environ.get("HOME"), "name": __name__,
    "folder": tempfile.gettempdir(), "zone": time.tzname[0],
    "hash": hash("a"), "random": random.random(), "beside": sys.path[0],
    "has_keras": "keras" in sys.modules, "has_library": "keras_psplus" in sys.modules,
}))
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(TELLS)
    return path


def run(monkeypatch, *args, **kwargs):
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    return subprocess.run(*args, capture_output=True, text=True, **kwargs)


def test_a_fork_is_as_a_new_interpreter(monkeypatch, script):
    done = [
        run(
            monkeypatch,
            [sys.executable, script, "one", "two words"],
            env={"VARIABLE": "1", "TMPDIR": str(script.parent), "TZ": "XYZ-3"},
            cwd=script.parent,
            start_new_session=True,
        )
        for _ in range(3)
    ]
    told = [json.loads(process.stdout) for process in done]
    assert [process.returncode for process in done] == [7, 7, 7]
    assert [process.stderr for process in done] == ["to stderr\n"] * 3
    for one in told:
        assert one["argv"] == [str(script), "one", "two words"]
        assert one["parent"] == os.getpid()
        assert one["group"] and one["name"] == "__main__"
        assert one["cwd"] == one["beside"] == str(script.parent)
        assert (one["variable"], one["home"]) == ("1", None)
        assert (one["folder"], one["zone"]) == (str(script.parent), "XYZ")
        assert one["has_keras"] and not one["has_library"]
    assert len({one["random"] for one in told}) == 3
    assert told[0]["hash"] != told[1]["hash"]


def test_a_launcher_and_its_tasks_are_forks(monkeypatch, script, tmp_path):
    command = ["-m", "keras_psplus", "run", "--workers=2", "--verbose", f"--log_dir={tmp_path}"]
    done = run(monkeypatch, [sys.executable, *command, script, "x"], cwd=tmp_path)
    assert done.returncode == 7
    launchers = set()
    for number in range(2):
        text = (tmp_path / f"worker-{number}.log").read_text()
        told = json.loads(text.splitlines()[0])
        assert told["argv"] == [str(script), "x"] and told["group"]
        assert told["cwd"] == told["beside"] == str(tmp_path)
        assert told["has_keras"] and not told["has_library"]
        launchers.add(told["parent"])
    assert len(launchers) == 1 and os.getpid() not in launchers
    with pytest.raises(ProcessLookupError):
        os.kill(launchers.pop(), 0)


def test_it_is_killed_like_others(monkeypatch, script):
    script.write_text("import time; print('here', flush=True); time.sleep(60)")
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "here\n"
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL


def test_an_error_is_shown_and_ends_with_one(monkeypatch, script):
    script.write_text("def of_the_user():\n    raise ValueError('so it is')\nof_the_user()")
    done = run(monkeypatch, [sys.executable, script])
    assert done.returncode == 1
    assert "of_the_user()" in done.stderr and "ValueError: so it is" in done.stderr


ENDS = """
import atexit, sys, threading, time
file = open("left_open", "w")
file.write("all of it")
binary = open("left_open_too", "wb")
binary.write(b"that as well")
atexit.register(lambda: print("at exit"))
threading.Thread(target=lambda: (time.sleep(0.2), print("in a thread"))).start()
print("to the end", end="; ")
{last}
"""


@pytest.mark.parametrize(
    "last, code, said",
    [
        ("", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('no more')", 1, "no more\n"),
        ("raise SystemExit(300)", 300 % 256, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_a_fork_ends_as_an_interpreter_does(monkeypatch, script, last, code, said):
    script.write_text(ENDS.format(last=last))
    done = run(monkeypatch, [sys.executable, script], cwd=script.parent)
    assert done.returncode == code
    assert done.stdout == "to the end; in a thread\nat exit\n"
    assert said in done.stderr and bool(said) == bool(done.stderr)
    assert (script.parent / "left_open").read_text() == "all of it"
    assert (script.parent / "left_open_too").read_bytes() == b"that as well"


@pytest.mark.parametrize(
    "args, kwargs",
    [
        (["-c", "import sys; print('keras' in sys.modules)"], {}),
        (["-m", "timeit", "-n1", "-r1", "pass"], {}),
        ([None], {"env": {**os.environ, "KERAS_BACKEND": "jax"}}),
        ([None], {"env": {**os.environ, "PYTHONHASHSEED": "5"}}),
    ],
)
def test_others_are_started_as_ever(monkeypatch, script, args, kwargs):
    script.write_text("import sys; print('keras' in sys.modules)")
    done = run(monkeypatch, [sys.executable, *(arg or script for arg in args)], **kwargs)
    assert done.returncode == 0 and "True" not in done.stdout


@pytest.mark.extended
def test_forks_and_zygotes_end_with_the_process(script):
    """As `LocalCluster` asks for it."""
    script.write_text("import time; time.sleep(60)")
    code = f"""
import os, sys
from keras_psplus.cluster.launcher.task_ends import ending_with_parent
from tests import warm
from tests.endings import wait_for_end
warm._PROCESSES = 1
process = warm.Popen(ending_with_parent([sys.executable, {str(script)!r}]))
print(process.pid, flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    wait_for_end(int(done.stdout))
