"""Synchronous steps that overlap in real processes: equal to one process, whatever happens."""

import pathlib
import re

import pytest

from keras_psplus.cluster.testing import run_in_processes
from tests import references
from tests.multi_process import fit_cases
from tests.selection import cases
from tests.support.results import assert_close, load

JOB = pathlib.Path(__file__).with_name("sync_overlap_job.py")
# What an update may need beside its own variable's gradient, and all kinds of variables.
CASES = [
    *("global_clipnorm", "adamw_with_schedule_and_average", "embeddings_of_several_widths"),
    *("regularisers_and_constraint", "mixed_precision_skips_overflow", "much_at_once"),
    *("gradient_accumulation_in_loop", "last_batch_of_one_row"),
]
TOLERANCE = {"mixed_precision_skips_overflow": 2e-3}
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    """The folder of what the cases come to, and the chief's log."""
    folder = tmp_path_factory.mktemp("overlap")
    wanted = cases(request)
    with references.built_first():
        fit_cases.run(wanted, None, "reference", folder)
    result = run_in_processes(
        JOB,
        workers=2,
        ps=2,
        chief=True,
        timeout=560,
        env=ENVIRONMENT,
        args=[folder, ",".join(wanted)],
    )
    return folder, result.logs["chief-0"]


@pytest.mark.parametrize("case", CASES)
def test_two_workers_equal_one_process(case, job):
    folder, log = job
    expected = load(folder / f"{case}.reference.npz", log)
    found = load(folder / f"{case}.cluster.npz", log)
    assert_close(found, expected, TOLERANCE.get(case, 2e-5))


@pytest.mark.parametrize(
    "what", re.findall(r"^def (\w+)\(strategy\):$", JOB.read_text(), re.MULTILINE)
)
def test_overlapping(what, job):
    assert f"done {what}\n" in job[1], job[1][-4000:]


def test_it_is_said_why_steps_do_not_overlap(job):
    log = job[1]
    assert "steps do not overlap, as it reads a variable by" in log
    assert "a function of the script assigns to variables on parameter servers" in log
