"""Common parts of a job's tasks, for all libraries."""

import json
import sys

from lab import meter, work


class Task:
    """One task, as the lab has described it in its only argument, as JSON.

    Attributes:
        library: As of `methods.Method`, like `name` and `path`.
        jobs: The job of each host's task; `addresses` are theirs.
        rank: This task's.
        trainers: Ranks of the tasks that train, of which the first leads.
        workers: Number of workers.
        plans: What to train, in turn, as of `meter.Meter`.
    """

    def __init__(self, text=None):
        description = json.loads(text or sys.argv[1])
        for key in ("library", "name", "path", "jobs", "addresses", "rank", "trainers", "plans"):
            setattr(self, key, description[key])
        self._size = description["size"]
        self.waits = description["waits"]
        self.workers = self.jobs.count("worker")
        leads = self.rank == self.trainers[0]
        self.leader = meter.Leader(self.jobs, self.trainers) if leads else None

    @property
    def job(self):
        return self.jobs[self.rank]

    @property
    def index(self):
        """This task's among those of its job."""
        return self.jobs[: self.rank].count(self.job)

    def addresses_of(self, job):
        """Addresses of the tasks of one job."""
        return [address for name, address in zip(self.jobs, self.addresses) if name == job]

    def works(self):
        """Yields each work, its plan and its number of windows, links being unlimited then."""
        for plan in self.plans:
            if self.leader is not None:
                self.leader.set_rate("loopback")
            count = meter.windows(plan)
            if self.path == "alone" and self.leader is None:
                count = 1_000_000  # The others keep the machine as busy until the leader ends.
            yield work.SIZES[self._size][plan["name"]], plan, count
        if self.leader is not None:
            self.leader.say_done()
