"""Steps of all strategies and compressors, as they would run on GPUs."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.testing import run_in_processes
from tests import selection
from tests.gpu import cases, findings, kernels, known

JOB = pathlib.Path(__file__).with_name("steps_job.py")
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
}
SECONDS = 560

pytestmark = pytest.mark.skipif(
    not kernels.are_registered(), reason="this TensorFlow was built without GPU kernels"
)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """What was found in each case, by its name."""
    folder, chosen = tmp_path_factory.mktemp("steps"), selection.cases(request, argument="name")
    groups = {"all_reduce": cases.ALL_REDUCE, "others": cases.OTHERS}
    groups |= {"cluster": cases.IN_CLUSTER, "pairs": cases.IN_PAIRS}
    names = {group: [n for n in known if n in chosen] for group, known in groups.items()}
    results = {}
    with contextlib.ExitStack() as stack:
        running = {
            group: stack.enter_context(start(folder / group, names[group]))
            for group in ("all_reduce", "others")
            if names[group]
        }
        # A process of several has one strategy.
        for group, tasks in (("cluster", dict(workers=1, ps=1)), ("pairs", dict(workers=2))):
            for name in names[group]:
                args = ["--out", folder / name, name]
                run_in_processes(JOB, **tasks, timeout=SECONDS, env=ENVIRONMENT, args=args)
                results |= json.loads((folder / name).read_text())
        for group, process in running.items():
            _, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors[-8000:]
            results |= json.loads((folder / group).read_text())
    return results


@contextlib.contextmanager
def start(out, names):
    process = subprocess.Popen(
        [sys.executable, str(JOB), "--out", str(out), *names],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path(os.environ)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", [name for name in cases.CASES if name != "unfit"])
def test_what_would_be_slow_or_fail_on_gpus_is_known(name, results):
    """What is new is mended, or gets an entry in `known.py` with its reason."""
    found = results[name]["found"]
    new = [each for each in found if not any(one.covers(each) for one in known.KNOWN)]
    assert not new, "\n".join(map(str, new))
    # Otherwise it was another step that was looked at, or none.
    assert results[name]["on_gpu"] > 100


@pytest.mark.cases(*cases.CASES)
@pytest.mark.parametrize(
    "one", [one for one in known.KNOWN if not one.is_mended], ids=lambda one: one.reason
)
def test_what_is_known_is_still_so(one, results):
    assert any(one.covers(each) for result in results.values() for each in result["found"])


@pytest.mark.cases("unfit")
@pytest.mark.parametrize(
    ("kind", "op"),
    [
        (findings.NO_KERNEL, "NthElement"),
        (findings.INT32, "Reshape"),
        (findings.COPY, "Abs"),
    ],
)
def test_faults_of_a_compressor_are_found(kind, op, results):
    found = [each for each in results["unfit"]["found"] if (each["kind"], each["op"]) == (kind, op)]
    assert found and not any(one.covers(each) for each in found for one in known.KNOWN)
