import subprocess
import sys

import pytest

from tests.support.jobs import environment

pytestmark = pytest.mark.processes
INSTALL = "from keras_psplus.cluster.process import early_init\nearly_init.install()\n"
CASES = {
    "in a function of the user's": (
        INSTALL
        + "early_init.install()\nearly_init.check_not_initialized('S')\n"
        + "def load():\n    return tf.data.Dataset.range(3).batch(1)\nload()\n",
        ["script.py:8 in load: return tf", "script.py:9 in <module>: load()", "strategy first"],
    ),
    "before the import": ("tf.constant(1)\n" + INSTALL, ["before `import keras_psplus`"]),
    "after disarm": (
        INSTALL + "early_init.disarm()\ntf.constant(1)\n",
        ["for another strategy: a process has one"],
    ),
}
SCRIPT = """import sys
import tensorflow as tf
{body}
assert "ensure_initialized" not in vars(early_init._tf_context.context())
try:
    early_init.check_not_initialized("MyStrategy")
    sys.exit("not initialized")
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("name", CASES)
def test_the_call_that_started_the_runtime_is_named(name, tmp_path):
    body, expected = CASES[name]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(body=body))
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in expected), done.stdout
    assert done.stdout.startswith("MyStrategy has to be made before TensorFlow runs")
    assert "Received: MyStrategy" in done.stdout
    assert "site-packages" not in done.stdout
