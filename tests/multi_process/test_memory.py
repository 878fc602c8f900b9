"""All tasks keep freed memory, whatever the strategy."""

import pytest

from tests.cluster.page_faults import PAGE
from tests.support.jobs import run_in_processes
from tests.support.tiers import extended


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "ps", "chief"),
    extended(
        *(("HybridStrategy", 1, False), ("MultiWorkerMirroredStrategy", 0, False)),
        ("ParameterServerStrategy", 1, True),
    ),
)
def test_strategies_keep_it_where_they_compute(strategy, ps, chief):
    # Servers end inside the constructor: they say it at their exit.
    code = (
        "import os\n"
        "import keras_psplus as psp\n"
        "from tests.cluster.page_faults import faults_of_a_block\n"
        "leave = os._exit\n"
        "def say(code=0):\n"
        "    print('faults', faults_of_a_block(40), flush=True)\n"
        "    leave(code)\n"
        "os._exit = say\n"
        f"strategy = psp.{strategy}()\n"
        "print('faults', faults_of_a_block(40), flush=True)\n"
    )
    result = run_in_processes(code, workers=2, ps=ps, chief=chief, timeout=560)
    assert len(result.logs) >= 2 + ps + chief
    for name, log in result.logs.items():
        said = [line.split()[-1] for line in log.splitlines() if "faults" in line]
        assert said and int(said[0]) < (40 << 20) // PAGE // 100, (name, log[-3000:])
