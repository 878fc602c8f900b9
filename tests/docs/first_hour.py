"""A stranger's first hour: from an empty environment to a model that two hosts have trained.

    make first-hour

Does what the first page, the tutorial and the page of two machines say, in this order, with the
files and the commands of these pages and nothing else, and says how long it took. What pages show
of outputs has to come. The two machines are those of `tests.cluster.two_hosts`, which share all of
their disk but the folder of work; what installs packages runs where there is a network. In place of
`ssh-copy-id`, which asks for a password, the key is put where the second machine looks for it.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.cluster import two_hosts  # noqa: E402
from tests.docs import pages  # noqa: E402

PAGES = [ROOT / "docs" / name for name in ("index.md", "tutorial.md", "two_machines.md")]
_END = "\x1e"
_PACKAGES = re.compile(r"python3 -m venv|\. \S+/activate|pip |keras-psplus doctor$")


class Shell:
    """A shell that runs one line after another.

    Args:
        process: The shell, with pipes.
        folder: Where it begins.
    """

    def __init__(self, process, folder):
        self._process = process
        self.run(f"cd {folder}")

    def run(self, line):
        """Runs a line; returns its exit code and what it has printed."""
        # Programs that it starts do not read the lines that come next.
        self._process.stdin.write(f"{{ {line}\n}} </dev/null\necho {_END}$?\n")
        self._process.stdin.flush()
        said = ""
        for more in self._process.stdout:
            said += more
            if _END in more:
                said, _, code = said.partition(_END)
                return int(code), said
        raise AssertionError(f"the shell has ended in {line}:\n{said}")


class Stranger:
    """Somebody who follows the pages.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder):
        self._folder, self.home = folder, folder / "home"
        self._checkout = self.home / "keras_psplus"
        # Nothing of the environment of this process but where pip looks.
        programs = [p for p in os.environ["PATH"].split(":") if not p.startswith(sys.prefix)]
        self._environ = {"HOME": str(self.home), "PATH": ":".join(programs), "PYTHONPATH": ""}
        self._environ["PIP_CACHE_DIR"] = str(pathlib.Path.home() / ".cache" / "pip")
        self._beside = []
        self.counts = {}  # commands and seconds of each page
        self.missing = []  # lines that a page shows, and that did not come
        self.said = ""

    def __enter__(self):
        self._checkout.mkdir(parents=True)
        (self.home / ".ssh").mkdir()
        names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT)
        copy = ["xargs", "-0", "cp", "--parents", "-t", self._checkout]
        subprocess.run(copy, input=names, cwd=ROOT, check=True)
        self._hosts = two_hosts.TwoHosts(self._folder, environ=self._environ)
        self._hosts.__enter__()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        env = {**os.environ, **self._environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
        online = subprocess.Popen(["bash"], env=env, text=True, **pipes)
        self._online = Shell(online, self._checkout)
        self._first = Shell(self._hosts.start("exec bash", stdin=subprocess.PIPE), self._hosts.work)
        self._ends = [online]
        return self

    def __exit__(self, *_):
        for process in self._ends:
            process.kill()
            process.wait()
        self._hosts.__exit__()

    def follow(self, page):
        """Does what a page says."""
        began, number, name = time.monotonic(), 0, None
        folder = self._checkout if page.name == "index.md" else self._hosts.work / page.stem
        folder.mkdir(exist_ok=True)
        self._first.run(f"cd {folder}")
        for block in pages.blocks(page):
            if block.language == "file":
                name = block.text.strip()
            elif block.language == "python":
                (folder / (name or "train.py")).write_text(block.text)
                name = None
            elif block.language == "text":
                self._expect(block)
            elif block.language in ("shell", "bash"):
                lines = block.text.strip().splitlines()
                number += len(lines)
                self.said = ""
                for line in lines:
                    print(f"[{page.stem}] $ {line}", flush=True)
                    self.said += self._run(line, page).replace("10.77.0.", "10.0.0.")
        self.counts[page.stem] = number, time.monotonic() - began

    def _run(self, line, page):
        if index := re.match(r'KERAS_.*"index": (\d)', line):
            return self._paste(line, int(index[1]))
        if line.startswith("tensorboard"):
            line = f"timeout -s INT 30 {line}; test $? = 124"
        if line.startswith("ssh-copy-id"):
            return self._copy_key()
        is_online = page.name == "index.md" or _PACKAGES.match(line)
        if line.startswith(". "):
            self._first.run(line)  # of the same machine
        shell = self._online if is_online else self._first
        code, said = shell.run(line.replace("10.0.0.", "10.77.0."))
        assert code == 0, f"{line} has ended with {code}:\n{said}"
        return said

    def _paste(self, line, rank):
        """Starts a line in a terminal of a machine; returns what all have said once all run."""
        line = f". {self.home}/psplus/bin/activate; {line}"
        folder = self._hosts.work / "tutorial"
        if rank:
            shutil.copy(folder / "train.py", self._hosts.work_there)
            folder = self._hosts.work_there
        self._beside.append(self._hosts.start(f"cd {folder}; {line}", rank))
        if len(self._beside) < 2:
            return ""
        said = [process.communicate(timeout=300)[0] for process in self._beside]
        codes = [process.returncode for process in self._beside]
        self._beside.clear()
        assert codes == [0, 0], "\n".join(said)
        return said[0]

    def _copy_key(self):
        for suffix in ("", ".pub"):
            shutil.copy(self.home / f".ssh/id_ed25519{suffix}", self._folder / f"own{suffix}")
        return ""

    def _expect(self, block):
        position = 0
        for line in block.text.splitlines():
            # Numbers of a page are of another machine, and another seed.
            line = re.sub(r"\d+\.\d+|\d+(?=m?s\b)", "...", line) if self._is_first(block) else line
            found = pages.shows(line, self.said, position)
            if found is None:
                self.missing.append(f"{block.name}: no {line!r}")
                print(f"{self.missing[-1]} in:\n{self.said}")
                continue
            position = found.end()
            print(self.said[self.said.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0])

    @staticmethod
    def _is_first(block):
        return block.page.name == "index.md"

    def check(self):
        """Whether the first machine, and it alone, has the model that both have trained."""
        folders = [self._hosts.work / "two_machines"]
        folders.append(self._hosts.work_there / "two_machines")
        assert [(folder / "model.keras").is_file() for folder in folders] == [True, False]


def main():
    if problem := two_hosts.why_not():
        print(f"no two hosts can be had here: {problem}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder, Stranger(pathlib.Path(folder)) as stranger:
        for page in PAGES:
            stranger.follow(page)
        stranger.check()
    for page, (number, seconds) in stranger.counts.items():
        print(f"{page:<14} {number:>3} commands {seconds:>7.0f} s")
    numbers, seconds = zip(*stranger.counts.values())
    print(f"{'together':<14} {sum(numbers):>3} commands {sum(seconds):>7.0f} s")
    print("ends with a model that 10.0.0.1 and 10.0.0.2 have trained")
    print("\n".join(stranger.missing))
    return int(bool(stranger.missing))


if __name__ == "__main__":
    os.environ.pop("VIRTUAL_ENV", None)
    sys.exit(main())
