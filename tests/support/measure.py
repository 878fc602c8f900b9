"""A pytest plugin that measures each test: seconds, processor time, processes, traced functions.

    pytest -p tests.support.measure --measure=FOLDER ...

Each process of pytest appends JSON lines to FOLDER; `python tests/support/measure.py FOLDER` prints
a table by file. Processor time includes that of all processes that a test has started, of which a
thread reads `/proc` every quarter of a second: those that live shorter are counted too low.
"""

import collections
import json
import os
import pathlib
import sys
import threading
import time

import pytest

_PERIOD = 0.25
_TICKS = os.sysconf("SC_CLK_TCK")
_FOLDER = "KERAS_PSPLUS_MEASURE_FOLDER"


def pytest_addoption(parser):
    parser.addoption("--measure", metavar="FOLDER", help="where to write what each test costs")


def pytest_configure(config):
    folder = config.getoption("--measure")
    if folder:
        folder = pathlib.Path(folder).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[_FOLDER] = str(folder)
        config.pluginmanager.register(_Recorder(folder))


def count_traces():
    """Has this process, and its forks, note each function that TensorFlow traces."""
    if _FOLDER not in os.environ:
        return
    from tensorflow.python.eager.polymorphic_function import tracing_compilation as module

    create = module._create_concrete_function
    if hasattr(create, "is_counted"):
        return

    def counted(*args, **kwargs):
        with open(f"{os.environ[_FOLDER]}/{os.getpid()}.traces", "ab", buffering=0) as file:
            file.write(b".")
        return create(*args, **kwargs)

    counted.is_counted = True
    module._create_concrete_function = counted


class _Recorder:
    """Writes a line for each test."""

    def __init__(self, folder):
        self._folder = folder
        self._processes = _Descendants()
        self._traces_before = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        start = time.monotonic()
        self._cost()  # What went on between tests is nobody's.
        result = yield
        if "tensorflow" in sys.modules:
            count_traces()
        seconds, processes = self._cost()
        traces = self._traces()
        line = {
            "test": item.nodeid,
            "wall": round(time.monotonic() - start, 3),
            "cpu": round(seconds, 3),
            "processes": processes,
            "traces": traces - self._traces_before,
        }
        self._traces_before = traces
        with open(self._folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return result

    def _cost(self):
        return self._processes.take()

    def _traces(self):
        pids = {os.getpid(), *self._processes.pids}
        files = (self._folder / f"{pid}.traces" for pid in pids)
        return sum(file.stat().st_size for file in files if file.exists())


class _Descendants:
    """Processor time of this process and of all that descend from it."""

    def __init__(self):
        self.pids = set()
        self._used = {}
        self._taken = collections.Counter()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def take(self):
        """Seconds of processor time, and processes begun, since the last call."""
        self._look()
        with self._lock:
            new = [key for key in self._used if key not in self._taken]
            seconds = sum(used - self._taken[key] for key, used in self._used.items())
            self._taken = collections.Counter(self._used)
        return seconds, len(new)

    def _run(self):
        while True:
            time.sleep(_PERIOD)
            self._look()

    def _look(self):
        with self._lock:
            found = dict(_stats())
            family = {os.getpid()} | {key[0] for key in self._used}
            size = 0
            while size != len(family):
                size = len(family)
                family |= {key[0] for key, (parent, _) in found.items() if parent in family}
            for key, (_, seconds) in found.items():
                if key in self._used or key[0] in family:
                    self._used[key] = seconds
            self.pids |= family


def _stats():
    """For each process and its start: its parent, and its seconds of processor time."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                text = pathlib.Path(f"/proc/{name}/stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            fields = text[text.rindex(")") + 2 :].split()
            yield (
                (int(name), fields[19]),
                (int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS),
            )


def table(folder):
    """Costs by file, the dearest first."""
    files = collections.defaultdict(lambda: [0, 0.0, 0.0, 0, 0])
    for path in pathlib.Path(folder).glob("*.jsonl"):
        for line in path.read_text().splitlines():
            cost = json.loads(line)
            sums = files[cost["test"].split("::")[0].removeprefix("tests/")]
            for index, value in enumerate(
                (1, cost["wall"], cost["cpu"], cost["processes"], cost["traces"])
            ):
                sums[index] += value
    return sorted(files.items(), key=lambda item: -item[1][2])


def main(folder, rows=40):
    """Prints a table in Markdown."""
    costs = table(folder)
    total = [sum(values) for values in zip(*(values for _, values in costs))]
    print("| file | tests | seconds | processor s | processes | traced functions |")
    print("|---|---|---|---|---|---|")
    for name, values in [*costs[: int(rows)], (f"all {len(costs)} files", total)]:
        tests, wall, cpu, processes, traces = values
        print(f"| {name} | {tests} | {wall:.0f} | {cpu:.0f} | {processes} | {traces} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
