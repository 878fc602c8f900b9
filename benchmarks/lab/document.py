"""JSON file of a run: its arguments, its machine, and every figure so far."""

import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess

_PACKAGES = ("tensorflow", "keras", "tf_keras", "numpy")
# What prints the versions of a library that may be in another Python.
_PRINT = {
    "torch": "import torch; print(torch.__version__)",
    "jax": "from importlib.metadata import version; "
    "print(version('jax'), 'with keras', version('keras'))",
}
# What figures of one file have in common, so that they can be compared.
_SETTINGS = ("size", "ps", "delay", "links", "racks", "uplink", "window")
# Of files that were written before there were such.
_BEFORE = {"racks": 1, "uplink": None, "window": None}
_KEY = ("turn", "work", "workers", "library", "method", "rate")


class Document:
    """Results by their key, written to the file after each launch.

    Args:
        path: The file.
        settings: Dict of what holds for the whole run.
        pythons: Dict from `"torch"` and `"jax"` to a Python that has it, or None.
        fresh: Whether to leave out what the file holds.

    Raises:
        ValueError: If the file's results are of other settings.
    """

    def __init__(self, path, settings, pythons=None, fresh=False):
        self.path = pathlib.Path(path)
        self.content = {"machine": machine(), "versions": versions(pythons or {})}
        self.content |= {"settings": settings, "results": []}
        if self.path.exists() and not fresh:
            before = read(self.path)
            before["settings"] = _BEFORE | before["settings"]
            for name in _SETTINGS:
                if before["settings"][name] != (_BEFORE | settings)[name]:
                    raise ValueError(
                        f"{self.path} holds figures with another {name}: give another --out, or "
                        f"--fresh to begin again. Received: {settings.get(name)!r}, and in the "
                        f"file {before['settings'][name]!r}"
                    )
            self.content["results"] = before["results"]

    @property
    def results(self):
        return self.content["results"]

    def done(self, **key):
        """Whether there are figures of this key."""
        return any("times" in result and _key(result) == _key(key) for result in self.results)

    def add(self, results):
        """Puts results in the place of older ones with their keys, and writes the file."""
        keys = {_key(result) for result in results}
        kept = [result for result in self.results if _key(result) not in keys]
        self.content["results"] = kept + results
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n")
        part.replace(self.path)  # An interrupted run leaves the file whole.


def read(path):
    """Returns a file's content.

    Raises:
        ValueError: If it is none of the lab's.
    """
    try:
        content = json.loads(pathlib.Path(path).read_text())
        content["settings"], content["results"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no file of results ({error}). Received: {path}") from error
    return content


def _key(result):
    return tuple(result[name] for name in _KEY)


def machine():
    """Description of the machine on which the figures were measured."""
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    kilobytes = re.search(r"MemTotal:\s*(\d+)", pathlib.Path("/proc/meminfo").read_text())[1]
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(kilobytes) / 2**20, 1),
        "kernel": platform.release(),
    }


def versions(pythons):
    """Versions of Python, of installed packages, and of those in other Pythons."""
    from keras_psplus.versions import __version__

    found = {"python": platform.python_version(), "keras_psplus": __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    for library, python in pythons.items():
        if python:
            command = [python, "-c", _PRINT[library]]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[library] = done.stdout.strip()
    return found
