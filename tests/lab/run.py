"""`keras-psplus run` with faults in the job, each at the step for which it was planned.

    python -m tests.lab.run FAULTS [flags of `keras-psplus run`] SCRIPT [arguments of the script]

FAULTS are those of `faults.GRAMMAR`. `cut` and `delay` give each task a host of its own.
"""

import contextlib
import sys
import unittest.mock

if __name__ == "__main__":
    sys.argv[0] = "keras-psplus"  # which imports no TensorFlow

from keras_psplus.cli import main as command_line  # noqa: E402
from keras_psplus.cli import run  # noqa: E402
from keras_psplus.cluster.environment import plan_tasks  # noqa: E402
from keras_psplus.cluster.processes import LocalCluster  # noqa: E402
from tests.lab import faults, netlab  # noqa: E402


def main(argv):
    """Runs the command; returns its exit code.

    Args:
        argv: The faults, and what follows `keras-psplus run`.
    """
    text, *argv = argv
    with contextlib.ExitStack() as stack:
        injectors = []

        def make_cluster(command, console, env, **kwargs):
            layout = {name: kwargs[name] for name in ("workers", "ps", "chief", "evaluator")}
            tasks = [task.name for task in plan_tasks(**layout)]
            if not injectors:
                events = faults.parse(text, tasks)
                injector = faults.Injector(
                    events, lambda line: console.note(f"keras-psplus: {line}")
                )
                injectors.append(stack.enter_context(injector))
            (injector,) = injectors
            env = {**env, **injector.environment}
            network = netlab.Lab(len(tasks)) if injector.needs_network else None
            kwargs |= {"console": console, "env": env, "network": network}
            cluster = LocalCluster(command, **kwargs)
            injector.watch(cluster)
            return cluster

        with unittest.mock.patch.object(run, "LocalCluster", make_cluster):
            return command_line.main(["run", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
