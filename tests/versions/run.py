"""Runs the core set of the tests under each supported pair of Python, Keras and TensorFlow.

    python tests/versions/run.py [--only PATTERN | --ends] [--folder FOLDER]

makes an environment for each pair in the folder, installs what is missing there, and prints a line
for each pair at the end. The core set: every strategy equals one process, every hook
fires, and private attributes are there.
"""

import argparse
import fnmatch
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Python, Keras and TensorFlow. The oldest of all, each Keras, each Python, and tomorrow's Keras.
PAIRS = (
    ("3.11", "keras==3.13.*", "tensorflow==2.20.*"),
    ("3.11", "keras==3.14.*", "tensorflow==2.21.*"),
    ("3.11", "keras==3.15.*", "tensorflow==2.21.*"),
    ("3.12", "keras==3.15.*", "tensorflow==2.21.*"),
    ("3.13", "keras==3.15.*", "tensorflow==2.21.*"),
    ("3.11", "keras-nightly", "tensorflow==2.21.*"),
)
OTHERS = ("hypothesis", "keras-rs>=0.4", "pytest>=8", "pytest-timeout")
TESTS = ("tests/smoke", "tests/keras_hooks", "tests/test_private_attributes.py")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="pattern of names, such as '*nightly*'")
    parser.add_argument("--ends", action="store_true", help="the oldest, and the newest Python")
    parser.add_argument("--folder", default=ROOT / ".venv-versions", type=pathlib.Path)
    args = parser.parse_args()
    results = {}
    pairs = ends() if args.ends else PAIRS
    for python, keras, tensorflow in pairs:
        name = "-".join(("python" + python, keras, tensorflow)).replace("==", "").replace(".*", "")
        if fnmatch.fnmatch(name, args.only):
            start = time.monotonic()
            result = run(args.folder / name, f"python{python}", keras, tensorflow)
            results[name] = f"{result} ({time.monotonic() - start:.0f} s)"
            print(f"{name}: {results[name]}", flush=True)
    print("\n" + "\n".join(f"{name:<45} {result}" for name, result in results.items()))
    return 0 if results and all(r.startswith("passed") for r in results.values()) else 1


def ends():
    """The first pair, and the last one of released versions whose Python is found."""
    released = [pair for pair in PAIRS if "nightly" not in pair[1] and find(f"python{pair[0]}")]
    return dict.fromkeys([PAIRS[0], max(released, key=lambda pair: int(pair[0].split(".")[1]))])


def run(folder, python, keras, tensorflow):
    """Runs the core set in an environment; returns what came of it, in a few words."""
    interpreter = find(python)
    if interpreter is None:
        return f"no {python} was found"
    own = folder / "bin" / "python"
    if not (folder / "is complete").exists():
        subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
        pip = [own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        # TensorFlow asks for a Keras of its own, which a nightly build replaces.
        for packages in ((tensorflow, *OTHERS, "numpy"), (keras,)):
            if subprocess.run([*pip, *packages]).returncode:
                return f"cannot install {' '.join(packages)}"
        (folder / "is complete").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [own, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment)
    return "failed" if done.returncode else "passed"


def find(python):
    """The path of an interpreter, in the path or among pyenv's; None if there is none."""
    if sys.version.startswith(python.removeprefix("python") + "."):
        return sys.executable
    versions = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    for path in sorted(versions.glob(f"{python.removeprefix('python')}.*/bin/{python}")):
        return path
    return shutil.which(python)


if __name__ == "__main__":
    sys.exit(main())
