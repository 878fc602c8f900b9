"""Workers are killed at random while others join and leave: no step is lost, and nothing hangs.

`python tests/faults/elastic_trials.py` has any number of trials. One worker that joins and one that
leaves: tests/parameter_server/test_elastic.py.
"""

import signal

import pytest

from tests.faults import elastic_trials

pytestmark = [pytest.mark.processes, pytest.mark.extended]


# Steps that overlap on data that workers read.
def test_random_kills_while_workers_come_and_go(tmp_path):
    outcome, problems = elastic_trials.run(7, tmp_path)
    assert not problems, f"{problems} after {outcome.did}:\n{outcome.text}"


@pytest.mark.parametrize("options", [["workers_read"], ["sync"]], ids=["async", "sync"])
def test_workers_die_and_stop_while_tensorflow_connects_to_them(options, tmp_path):
    """The chief has just looked for them; others go on, and those that have stopped come back."""
    trial, gate = elastic_trials.Trial(0, tmp_path, [*options, "gate"]), tmp_path / "gate"

    def add_and(does, name):
        """Adds a worker, and does something to one when the chief is about to take it in."""
        gate.touch()
        before = trial.log().count("at the gate")
        trial.add()
        trial.wait_for("the gate", lambda: trial.log().count("at the gate") > before)
        does(name)
        gate.unlink()

    def stop(name):
        trial.signal(name, signal.SIGSTOP)

    def go_on(name):
        trial.signal(name, signal.SIGCONT)

    def act():
        add_and(trial.kill, "worker-1")
        trial.wait_for_steps(["worker-0"])
        assert trial.log().count("lost while TensorFlow connected") == 1
        add_and(stop, "worker-1")
        trial.wait_for_steps(["worker-0"])
        go_on("worker-1")
        trial.wait_for_steps(["worker-0", "worker-1"])
        add_and(stop, "worker-0")
        trial.wait_for_steps(["worker-1", "worker-2"])
        go_on("worker-0")
        trial.wait_for_steps(["worker-0", "worker-1", "worker-2"])
        trial.let_end()

    outcome = trial.run(act)
    assert not outcome.problems(trial.options), outcome.text
    assert trial.log().count("does not answer while TensorFlow connects") == 2
