"""Applies each fault to a copy of this checkout, and runs the tests that are to find it.

    python tests/faults_on_purpose/run.py [--only PATTERN] [--tier fast|test|all] [--results FILE]

The copy has what git would commit, changes included. A fault's tests run from the cheapest on:
those of `make test-fast`, then those that `make test` adds, then the extended ones. The first that
fails is run once more without the fault, where it has to pass. Each result is written to a file of
JSON lines: what was found there, by a test that is as it was, is not looked for again. Prints a
table in Markdown; the exit code is 1 if a fault survives.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.faults_on_purpose.faults import FAULTS  # noqa: E402

# What runs a tier, and which of its tests no smaller tier has.
TIERS = {
    "fast": ("make test-fast", "not extended and not processes"),
    "test": ("make test", "not extended and processes"),
    "all": ("make test-all", "extended"),
}
NOT_FOUND, FOUND, UNSURE = "survived", "found", "fails without the fault, too"
# pytest's exit codes.
_PASSED, _FAILED, _NOTHING_COLLECTED = 0, 1, 5
# Names in brackets may have anything in them.
FIRST_FAILURE = re.compile(
    r"^(?:FAILED|ERROR) (tests/[^[\s]+(?:\[.*?\](?= - |$))?)(?: - (.*))?$", re.MULTILINE
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="pattern of names, such as '*residual*'")
    parser.add_argument("--tier", default="all", choices=TIERS, help="the last one to be tried")
    parser.add_argument("--results", default=ROOT / "mutants.jsonl", type=pathlib.Path)
    parser.add_argument("--timeout", default=300, type=int, help="seconds for each test")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    args = parser.parse_args()
    faults = [fault for fault in FAULTS if fnmatch.fnmatch(fault.name, args.only)]
    if args.list:
        print("\n".join(f"{fault.name}: {fault.file}" for fault in faults))
        return 0
    known = read(args.results)
    with tempfile.TemporaryDirectory(prefix="keras_psplus_mutants_") as folder:
        copy = Copy(pathlib.Path(folder), args.timeout)
        for fault in faults:
            done = known.get(fault.name)
            if not is_true(done, fault):
                done = {"fault": fault.name, **copy.look_for(fault, args.tier)}
                done["digest"] = digest_of(fault, done["test"])
                known[fault.name] = done
                with args.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done) + "\n")
            print(f"{fault.name}: {done['result']}, {done['seconds']} s", flush=True)
            print(f"  {done['test']}\n  {done['why']}", flush=True)
    results = [known[fault.name] for fault in faults]
    print(f"\n{table(faults, results)}")
    return 0 if results and all(one["result"] == FOUND for one in results) else 1


def read(path):
    """The last result of each fault."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {result["fault"]: result for result in map(json.loads, lines)}


def is_true(done, fault):
    """Whether a fault was found, by a file that is as it was, in a file that is as it was."""
    if done is None or done["result"] != FOUND:
        return False
    return (ROOT / file_of(done["test"])).exists() and done["digest"] == digest_of(
        fault, done["test"]
    )


def digest_of(fault, test):
    """Digest of a fault, of the file that it is in, and of that of a test."""
    paths = [ROOT / "keras_psplus" / fault.file, *([ROOT / file_of(test)] if test else [])]
    text = repr(fault) + "".join(path.read_text(encoding="utf-8") for path in paths)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_of(test):
    """The file of a test, of its name for pytest."""
    return test.partition("::")[0]


def changed(fault, text):
    """The text of a file with a fault."""
    count = text.count(fault.before)
    if count != 1:
        raise ValueError(
            f"the text before the fault must occur once in keras_psplus/{fault.file}. "
            f"Received: '{fault.name}', whose text occurs {count} times"
        )
    return text.replace(fault.before, fault.after)


def table(faults, results):
    """The results in Markdown."""
    lines = ["| fault | consequence | found in | by |", "|---|---|---|---|"]
    for fault, one in zip(faults, results):
        is_found = one["result"] == FOUND
        # Files come and go sooner than folders.
        found = f"`{pathlib.Path(file_of(one['test'])).parent}`" if is_found else one["result"]
        lines.append(f"| {fault.name} | {fault.breaks} | {found} | `{one['tier']}` |")
    return "\n".join(lines)


class Copy:
    """A copy of the checkout, in which tests run.

    Args:
        timeout: Seconds for each test.
    """

    def __init__(self, folder, timeout):
        self._folder, self._timeout = folder, timeout
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def look_for(self, fault, last_tier):
        """Runs a fault's tests up to a tier; returns what has come of it."""
        path = self._folder / "keras_psplus" / fault.file
        text = path.read_text(encoding="utf-8")
        begin = time.monotonic()
        try:
            path.write_text(changed(fault, text), encoding="utf-8")
            found, why, tier = self._first_failure(fault, last_tier)
        finally:
            path.write_text(text, encoding="utf-8")
            # Python takes a file of the same size and second for the one that it has compiled.
            shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
        seconds = round(time.monotonic() - begin)
        result = NOT_FOUND
        if found is not None:
            passes = self._pytest("", [found])[0] == _PASSED
            result = FOUND if passes else UNSURE
        return {"result": result, "test": found, "why": why, "tier": tier, "seconds": seconds}

    def _first_failure(self, fault, last_tier):
        for tier, (command, marks) in TIERS.items():
            for path in fault.tests:
                code, output = self._pytest(marks, [f"tests/{path}"])
                failure = FIRST_FAILURE.search(output)
                if code == _FAILED and failure:
                    return *failure.groups(), command
                if code not in (_PASSED, _NOTHING_COLLECTED):
                    raise RuntimeError(f"pytest could not run {path} (exit code {code}):\n{output}")
            if tier == last_tier:
                break
        return None, None, None

    def _pytest(self, marks, arguments):
        """Runs tests until the first failure; returns pytest's exit code and its output."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["--tb=short", "-rfE", f"--timeout={self._timeout}", "-m", marks, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(self._folder), "COLUMNS": "1000"}
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
