"""Goodput of a job whose workers are killed repeatedly, and costs of its restarts.

    python benchmarks/soak.py --strategy all_reduce --minutes 20 --every 60
    python benchmarks/soak.py --strategy async_parameter_server --minutes 20

A job of `keras-psplus run` trains without faults for `--undisturbed` seconds; the steps that it
makes in a second are what the goodput is measured by. Then it trains for so many minutes from its
first step on, and about every so many seconds one worker is killed by SIGKILL (when, and which one,
is drawn by the seed; not before a step is made after the last fault). The goodput is the steps that
count at the end, as a part of those that it would have made in that time without faults: steps
that were trained twice count once.

Under all-reduce, a job without faults then makes as many steps, and has to end with the same
weights. Under parameter servers, none of the updates may be missing; the one that a killed worker
had may count twice. A step of all-reduce has `--pause` milliseconds more than it computes, as steps
on a larger model would have.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

BEGAN = time.time()
PARTS = ("killed to started", "imports", "strategy", "to fit", "to first step", "to new step")
SERVERS = "async_parameter_server"
STEPS = 50  # of an epoch
TOLERANCE = 2e-5


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=["all_reduce", SERVERS], default="all_reduce")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every", type=float, default=60, help="seconds from fault to fault")
    parser.add_argument("--undisturbed", type=float, default=60, help="seconds without faults")
    parser.add_argument("--save_freq", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pause", type=float, default=50, help="milliseconds, of all-reduce")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--keep", type=pathlib.Path, help="folder for what the jobs write")
    parser.add_argument("--verify", type=pathlib.Path, help="compare weights in such a folder only")
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        train(args)
        return
    with tempfile.TemporaryDirectory(prefix="soak_") as temporary:
        folder = args.verify or args.keep or pathlib.Path(temporary)
        if not args.verify:
            tell(measure(args, folder))
        if args.strategy != SERVERS and not args.keep:
            tell(verify(args, folder))


def tell(found):
    for name, value in found.items():
        print(f"{name}: {value}", flush=True)
    if not found.get("nothing lost", True):
        sys.exit(1)


def measure(args, folder):
    """Runs the jobs without and with faults; returns a dict of what was found."""
    folder.mkdir(exist_ok=True)
    calm = Job(args, folder / "calm", seconds=args.undisturbed)
    calm.run()
    steps = calm.steps()
    rate = (steps[-1]["step"] - steps[0]["step"]) / (steps[-1]["time"] - steps[0]["time"])
    job = Job(args, folder / "faults", seconds=60 * args.minutes)
    job.run(args.every)
    steps = job.steps()
    length = steps[-1]["time"] - steps[0]["time"]
    useful = steps[-1]["step"] - steps[0]["step"]
    found = {
        "strategy": args.strategy,
        "undisturbed": f"{rate:.2f} steps/s",
        "useful steps": useful,
        "seconds": round(length, 1),
        "kills": len(job.kills),
        "goodput": f"{100 * useful / (rate * length):.1f} %",
    }
    if args.strategy == SERVERS:
        most = steps[-1]["sent"] + len(job.kills)
        found["updates"] = f"{steps[-1]['step']}, of {steps[-1]['sent']} steps"
        found["nothing lost"] = steps[-1]["sent"] <= steps[-1]["step"] <= most
        return found | job.recovery(rate)
    found["steps trained twice"] = len(steps) - len({event["step"] for event in steps})
    return found | job.parts()


def verify(args, folder):
    """Trains as many steps without faults; returns a dict of how the weights compare."""
    job = Job(args, folder / "faults")
    whole = Job(args, folder / "whole", steps=job.steps()[-1]["step"])
    whole.run()
    distance = whole.distance(job)
    return {
        "largest difference of weights": f"{distance:.1e}",
        "nothing lost": distance <= TOLERANCE,
    }


class Job:
    """A job of the launcher, and what its chief notes.

    Args:
        args: Of the command line.
        folder: For all of its files.
        seconds: From its first step to its last.
        steps: How many it makes, if that is what ends it.
    """

    def __init__(self, args, folder, seconds=None, steps=None):
        self._args, self._folder, self._seconds, self._steps = args, folder, seconds, steps
        self.kills = []
        folder.mkdir(exist_ok=True)
        self._file = folder / "events.jsonl"
        self._file.touch()

    def events(self):
        lines = self._file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def steps(self):
        return [event for event in self.events() if event["step"]]

    def run(self, every=None):
        """Runs it to its end, with a fault every so many seconds."""
        args = self._args
        flags = ["--workers", str(args.workers), "--log_dir", str(self._folder / "logs")]
        flags += ["--ps", "1"] if args.strategy == SERVERS else []
        flags += ["--max_restarts", "1000"] if every else []
        flags += ["--warm"] if args.warm else []
        command = [sys.executable, "-m", "keras_psplus", "run", *flags, "--strategy", args.strategy]
        own = [__file__, "--folder", str(self._folder), "--pause", str(args.pause)]
        own += ["--save_freq", str(args.save_freq)]
        env = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", **os.environ}
        if self._steps:
            env["SOAK_STEPS"] = str(self._steps)
        with open(self._folder / "launcher.log", "w") as log:
            process = subprocess.Popen([*command, *own], env=env, stdout=log, stderr=log)
            try:
                if self._seconds:
                    self._disturb(process, every)
                process.wait(300 if self._seconds else None)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if process.returncode:
            raise SystemExit((self._folder / "launcher.log").read_text()[-5000:])

    def _disturb(self, process, every):
        """Kills workers by the seed's schedule, and ends the job after its time."""
        draw = random.Random(self._args.seed)
        self._wait_for_step(process)
        first = self.steps()[0]["time"]
        end, number = first + self._seconds, 0
        while every:
            number += 1
            due = first + every * (number + draw.uniform(-0.25, 0.25))
            victim = f"worker-{draw.randrange(self._args.workers)}"
            if due > end - every / 2:
                break
            time.sleep(max(0.0, due - time.time()))
            self._wait_for_step(process)
            pid = int((self._folder / f"{victim}.pid").read_text())
            self.kills.append({"time": time.time(), "task": victim})
            os.kill(pid, signal.SIGKILL)
        time.sleep(max(0.0, end - time.time()))
        self._wait_for_step(process)
        (self._folder / "time_is_over").touch()

    def _wait_for_step(self, process):
        """Waits for a step that had not been made before the last kill."""
        while not self._has_new_step():
            if process.poll() is not None:
                raise SystemExit((self._folder / "launcher.log").read_text()[-5000:])
            time.sleep(0.1)

    def _has_new_step(self):
        steps = self.steps()
        if not self.kills:
            return bool(steps)
        start = self._start_after(self.kills[-1])
        if start is None:
            return False
        before = max(e["step"] for e in steps if e["time"] < start)
        return any(e["step"] > before for e in steps if e["time"] > start)

    def _start_after(self, kill):
        """Time at which the killed task was restarted; None if it was not."""
        starts = (self._folder / f"{kill['task']}.starts").read_text().split()
        return next((float(t) for t in starts if float(t) > kill["time"]), None)

    def parts(self):
        """Medians of what the parts of a restart take."""
        events, rows = self.events(), []
        for kill in self.kills:
            starts = [e for e in events if "marks" in e and e["time"] > kill["time"]]
            if not starts:
                continue
            restart = starts[0]["restart"]
            own = [e for e in events if e["restart"] == restart and e["step"]]
            before = max(e["step"] for e in events if e["restart"] < restart)
            new = [e["time"] for e in own if e["step"] > before]
            times = [kill["time"], *starts[0]["marks"], own[0]["time"], new[0]]
            rows.append([b - a for a, b in zip(times, times[1:])])
        if not rows:
            return {}
        medians = {p: statistics.median(v) for p, v in zip(PARTS, zip(*rows), strict=True)}
        total = statistics.median(map(sum, rows))
        longest = max(map(sum, rows))
        return {
            "from the kill to a new step": f"{total:.1f} s (median), {longest:.1f} s (longest)",
            **{f"  {part}": f"{seconds:.1f} s" for part, seconds in medians.items()},
        }

    def recovery(self, rate):
        """Downtime of workers, and the lengths of the chief's epochs meanwhile."""
        steps = self.steps()
        gaps = [b["time"] - a["time"] for a, b in zip(steps, steps[1:])]
        about = f"{statistics.median(gaps):.1f} s (median), {max(gaps):.1f} s (longest)"
        starts = [self._start_after(kill) - kill["time"] for kill in self.kills]
        if not starts:
            return {}
        return {
            "from the kill to the start": f"{statistics.median(starts):.1f} s (median)",
            f"{STEPS} steps undisturbed": f"{STEPS / rate:.1f} s",
            f"{STEPS} steps": about,
        }

    def distance(self, other):
        """The largest difference between the weights of two jobs."""
        import numpy as np

        files = [np.load(job._folder / "weights.npz") for job in (self, other)]
        return max(float(np.abs(files[0][n] - files[1][n]).max()) for n in files[0].files)


def train(args):
    """One task."""
    own = json.loads(os.environ["TF_CONFIG"])["task"]
    name, folder = f"{own['type']}-{own['index']}", args.folder
    (folder / f"{name}.pid").write_text(str(os.getpid()))
    with open(folder / f"{name}.starts", "a") as file:
        file.write(f"{BEGAN}\n")
    import keras
    import numpy as np

    import keras_psplus as psp

    imported = time.time()
    strategy = psp.strategy_from_env()
    formed, restart = time.time(), int(os.environ["KERAS_PSPLUS_RESTART"])
    serves = bool(json.loads(os.environ["TF_CONFIG"])["cluster"].get("ps"))
    steps = int(os.environ.get("SOAK_STEPS", 0))
    rows, units = (256, 1024) if serves else (64, 256)
    random_numbers = np.random.default_rng(0)
    x = random_numbers.standard_normal((rows * STEPS, 64), np.float32)
    y = random_numbers.integers(0, 10, len(x))
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(units, "relu"), keras.layers.Dense(units, "relu")]
        model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # So slow that the last bits of floats do not grow into other trajectories.
        model.compile(keras.optimizers.Adam(1e-5), loss, metrics=["accuracy"])
    is_chief = name in ("chief-0", "worker-0") and getattr(strategy, "is_chief", True)

    class Note(keras.callbacks.Callback):
        sent = 0

        def _note(self, step, **more):
            if is_chief:
                with open(folder / "events.jsonl", "a") as file:
                    line = {"restart": restart, "step": step, "time": time.time(), **more}
                    file.write(json.dumps(line) + "\n")

        def on_train_begin(self, logs=None):
            self._note(0, marks=[BEGAN, imported, formed, time.time()])

        def on_epoch_begin(self, epoch, logs=None):
            # Before any worker can have made a step of it: all of them end with it.
            if is_chief and (folder / "time_is_over").exists():
                with contextlib.suppress(FileExistsError):
                    os.link(folder / "time_is_over", folder / f"last_{epoch}")

        def on_train_batch_end(self, batch, logs=None):
            if not serves and not steps:
                time.sleep(args.pause / 1000)
                self._note(int(self.model.optimizer.iterations.numpy()))

        def on_epoch_end(self, epoch, logs=None):
            made = int(self.model.optimizer.iterations.numpy())
            if serves:
                self._note(made, sent=(epoch + 1) * STEPS)
            if (folder / f"last_{epoch}").exists() or made == steps:
                self.model.stop_training = True

    backup = keras.callbacks.BackupAndRestore(folder / "backup", save_freq=args.save_freq)
    callbacks = [Note()] if steps else [backup, Note()]
    model.fit(x, y, rows, 1_000_000, 0, callbacks)
    if is_chief:
        np.savez(folder / "weights.npz", *model.get_weights())


if __name__ == "__main__":
    main()
