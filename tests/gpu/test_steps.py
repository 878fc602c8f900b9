"""Steps of all strategies and compressors, as they would run on GPUs."""

import json
import pathlib

import pytest

from tests import selection
from tests.gpu import cases, findings, kernels, known
from tests.support.jobs import run_in_processes, run_script
from tests.support.tables import for_each
from tests.support.tiers import extended

JOB = pathlib.Path(__file__).with_name("steps_job.py")

pytestmark = [
    pytest.mark.skipif(
        not kernels.are_registered(), reason="this TensorFlow was built without GPU kernels"
    ),
    pytest.mark.processes,
]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """What was found in each case, by its name."""
    folder, chosen = tmp_path_factory.mktemp("steps"), selection.cases(request, argument="name")
    groups = [
        *((group, None) for group in (cases.ALL_REDUCE, cases.OTHERS)),
        # A process of several has one strategy.
        *(([name], {"workers": 1, "ps": 1}) for name in cases.IN_CLUSTER),
        *(([name], {"workers": 2}) for name in cases.IN_PAIRS),
    ]
    results = {}
    for number, (group, tasks) in enumerate(groups):
        if names := [name for name in group if name in chosen]:
            arguments = ["--out", folder / str(number), *names]
            if tasks is None:
                run_script(JOB, *arguments)
            else:
                run_in_processes(JOB, *arguments, **tasks, timeout=560)
            results |= json.loads((folder / str(number)).read_text())
    return results


FEW = ["topk", "1f1b", "sync int8", "all in shares"]
REST = [name for name in cases.CASES if name not in (*FEW, "unfit")]


@pytest.mark.parametrize("name", [*FEW, *extended(*REST)])
def test_what_would_be_slow_or_fail_on_gpus_is_known(name, results):
    """What is new is mended, or gets an entry in `known.py` with its reason."""
    found = results[name]["found"]
    new = [each for each in found if not any(one.covers(each) for one in known.KNOWN)]
    assert not new, "\n".join(map(str, new))
    # Otherwise it was another step that was looked at, or none.
    assert results[name]["on_gpu"] > 100


@pytest.mark.extended
@pytest.mark.cases(*cases.CASES)
@for_each("one", known.KNOWN)
def test_what_is_known_is_still_so(one, results):
    assert any(one.covers(each) for result in results.values() for each in result["found"])


@pytest.mark.cases("unfit")
@for_each(
    "kind, op",
    [
        (findings.NO_KERNEL, "NthElement"),
        (findings.INT32, "Reshape"),
        (findings.COPY, "Abs"),
    ],
)
def test_faults_of_a_compressor_are_found(kind, op, results):
    found = [each for each in results["unfit"]["found"] if (each["kind"], each["op"]) == (kind, op)]
    assert found and not any(one.covers(each) for each in found for one in known.KNOWN)
