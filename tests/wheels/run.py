"""Runs the tests of `make test-fast` with the wheel, in an environment of its own for each Python.

    python tests/wheels/run.py [--only 3.12] [--step install] [arguments of pytest]

takes what `make wheel` has left in dist/. The tests are those of the source distribution, in which
the package is replaced by a link to what pip has installed. What pip makes of the source
distribution by itself has to be the same.
"""

import argparse
import filecmp
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.versions import run as versions  # noqa: E402

PYTHONS = ("3.11", "3.12", "3.13")
FAST = "not extended and not matrix and not processes"
# What pip writes of the installation itself.
OF_PIP = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "__pycache__"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PYTHONS, help="one Python")
    parser.add_argument("--folder", default=ROOT / ".venv-versions/wheels", type=pathlib.Path)
    parser.add_argument("--dist", default=ROOT / "dist", type=pathlib.Path)
    parser.add_argument("--step", choices=("install", "test"), help="one of both")
    args, others = parser.parse_known_args()
    results = {}
    for python in [args.only] if args.only else PYTHONS:
        start = time.monotonic()
        if (interpreter := versions.find(f"python{python}")) is None:
            results[python] = "is not found"
            continue
        folder = args.folder.resolve() / python
        result = "installed" if args.step == "test" else install(interpreter, folder, args.dist)
        if result == "installed" and args.step != "install":
            result = test(folder, others)
        results[python] = f"{result} ({time.monotonic() - start:.0f} s)"
    for python, result in results.items():
        print(f"Python {python}: {result}")
    return 0 if all(r.startswith(("passed", "installed")) for r in results.values()) else 1


def install(interpreter, folder, dist):
    """Installs the wheel with what it needs; returns what came of it."""
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    own = folder / "environment/bin/python"
    if not own.exists():
        subprocess.run([interpreter, "-m", "venv", folder / "environment"], check=True)
    pip = [own, "-m", "pip", "--disable-pip-version-check"]
    again = ["install", "--quiet", "--force-reinstall", "--no-deps"]
    subprocess.run([*pip, "install", "--quiet", f"{wheel}[test]"], check=True)
    subprocess.run([*pip, *again, wheel], check=True)
    if subprocess.run([*pip, "check"]).returncode:
        return "pip check found what does not fit"
    shutil.rmtree(folder / "from_source", ignore_errors=True)
    subprocess.run([*pip, *again, "--target", folder / "from_source", source], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = pathlib.Path(subprocess.check_output([own, "-c", where], text=True).strip())
    shutil.rmtree(folder / "source", ignore_errors=True)
    with tarfile.open(source) as archive:
        archive.extractall(folder / "source", filter="data")
    (tests,) = (folder / "source").iterdir()
    names = {path.relative_to(packages) for path in packages.glob("keras_psplus*")}
    pairs = [(packages / name, folder / "from_source" / name) for name in names]
    if different := [name for pair in pairs for name in differences(*pair)]:
        return f"the source distribution installs something else: {different}"
    if different := differences(packages / "keras_psplus", tests / "keras_psplus"):
        return f"the source distribution has something else: {different}"
    shutil.rmtree(tests / "keras_psplus")
    (tests / "keras_psplus").symlink_to(packages / "keras_psplus")
    return "installed"


def differences(one, other):
    """Files that one of two folders lacks, or that differ."""
    if missing := [folder for folder in (one, other) if not folder.is_dir()]:
        return [str(folder) for folder in missing]
    listed = [
        {p.relative_to(f) for p in f.rglob("*") if p.is_file() and OF_PIP.isdisjoint(p.parts)}
        for f in (one, other)
    ]
    both = sorted(map(str, listed[0] & listed[1]))
    _, different, unreadable = filecmp.cmpfiles(one, other, both, shallow=False)
    return [*map(str, listed[0] ^ listed[1]), *different, *unreadable]


def test(folder, arguments):
    """Runs the tests within the source distribution; returns what came of it."""
    (tests,) = (folder / "source").iterdir()
    programs = folder / "environment/bin"
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    command = [programs / "python", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    command += ["--no-loadscope-reorder", "-p", "no:cacheprovider", "-m", FAST, *arguments]
    done = subprocess.run(command, cwd=tests, env=environment)
    return "failed" if done.returncode else "passed"


if __name__ == "__main__":
    sys.exit(main())
