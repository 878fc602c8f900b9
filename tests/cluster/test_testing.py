import os

import pytest

from keras_psplus.cluster.testing import run_in_processes
from tests.support.jobs import WITHOUT_TENSORFLOW

pytestmark = pytest.mark.processes


def greet():
    import json
    import os

    task = json.loads(os.environ["TF_CONFIG"])["task"]
    print("hello from", task["type"], task["index"], os.environ.get("COLOUR"))


def test_function():
    result = run_in_processes(greet, workers=1, ps=1, timeout=60, env={"COLOUR": "red"})
    assert result.logs["worker-0"] == "hello from worker 0 red\n"
    assert result.logs["ps-0"] == "hello from ps 0 red\n"
    assert not any(path.exists() for path in result.log_paths.values())


def test_source_and_arguments():
    source = """
        import sys
        print(sys.argv[1:])
        """
    result = run_in_processes(source, workers=1, timeout=60, args=["a", 1])
    assert result.logs["worker-0"] == "['a', '1']\n"


def test_script_imports_the_same_package(tmp_path):
    script = tmp_path / "script.py"
    module = "keras_psplus.cluster.config"
    script.write_text(f"{WITHOUT_TENSORFLOW}import {module} as c; print(c.__file__)")
    result = run_in_processes(script, workers=1, timeout=60)
    import keras_psplus.cluster.config as config

    assert os.path.samefile(result.logs["worker-0"].splitlines()[-1], config.__file__)


def test_failure_shows_every_log():
    source = "import os, sys, time\nprint('started')\nif 'index\": 1' in os.environ['TF_CONFIG']:\n"
    source += "    sys.exit('broken')\ntime.sleep(50)\n"
    with pytest.raises(AssertionError) as error:
        run_in_processes(source, workers=2, timeout=60, failure_grace=0.2)
    message = str(error.value)
    assert message.startswith("worker-1 failed")
    assert "--- worker-0: ended by signal 15 (still running" in message
    assert message.count("started") == 2 and message.rstrip().endswith("broken")


def test_time_limit_is_hard():
    source = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('in', flush=True)\n"
    with pytest.raises(AssertionError, match=r"did not end within 1 s[^$]*--- worker-0"):
        run_in_processes(source + "time.sleep(100)\n", workers=1, timeout=1)


def test_expected_failure():
    result = run_in_processes("\nraise SystemExit(3)\n", workers=1, expect_failure=True)
    assert result.exit_code == 3
    with pytest.raises(AssertionError, match="No process failed"):
        run_in_processes("\npass\n", workers=1, expect_failure=True)


def test_missing_script():
    with pytest.raises(FileNotFoundError, match=r"Received: 'no_such\.py'"):
        run_in_processes("no_such.py")
