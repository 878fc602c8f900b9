"""Workers are killed at random while others join and leave: no step is lost, and nothing hangs."""

import pytest

from tests.faults import elastic_trials


@pytest.mark.parametrize("number", range(30))
def test_random_kills_while_workers_come_and_go(number, tmp_path):
    outcome, problems = elastic_trials.run(number, tmp_path)
    assert not problems, f"{problems} after {outcome.did}:\n{outcome.text}"
