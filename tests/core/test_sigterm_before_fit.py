"""SIGTERM ends a process that has made its strategy, and does not train yet."""

import os
import signal
import sys

import pytest

from keras_psplus.cluster.processes import LocalCluster
from tests.support.jobs import environment, wait_for
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

SCRIPT = """
import sys, time
import keras_psplus as psp
strategy = getattr(psp, sys.argv[1])(**eval(sys.argv[2]))
print("made", flush=True)
time.sleep(60)
"""
STRATEGIES = {
    "all_reduce": ("MultiWorkerMirroredStrategy", {}, {"workers": 2}),
    "hybrid": ("HybridStrategy", {}, {"workers": 2, "ps": 1}),
    "sync": ("ParameterServerStrategy", {"mode": "sync"}, {"workers": 1, "ps": 1, "chief": True}),
    "pipeline": ("PipelineStrategy", {"microbatches": 2}, {"workers": 2, "chief": True}),
}


@pytest.mark.parametrize("name", ["all_reduce", *extended(*list(STRATEGIES)[1:])])
def test_it_ends(name, tmp_path):
    strategy, options, tasks = STRATEGIES[name]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), strategy, repr(options)]
    trains = "chief-0" if tasks.get("chief") else "worker-1"
    with LocalCluster(command, **tasks, env=environment(), log_dir=tmp_path) as cluster:
        wait_for((cluster.log_path(trains), "made"), 120)
        os.kill(cluster.pids[trains], signal.SIGTERM)
        result = cluster.wait(30)
    assert not result.timed_out and result.first_failure == trains
    assert result.exit_codes[trains] == -signal.SIGTERM
