"""A host that is reached by ssh: OpenSSH's server on this machine, or a program in its place."""

import contextlib
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

from keras_psplus.cluster.ports import free_ports

# Runs the command in a session of its own with a new environment, as sshd does, and hands on what
# comes and goes, so that both ends see it where this program is killed.
_FAKE = """#!{python} -IS
import os, subprocess, sys, threading

args = sys.argv[1:]
while args[0] == "-o":
    args = args[2:]
host, command = args
if host.endswith(".invalid"):
    sys.stderr.write(f"ssh: Could not resolve hostname {host}: Name or service not known\\n")
    sys.exit(255)
environ = {"HOME": os.environ.get("HOME", "/"), "PATH": "/usr/bin:/bin"}
pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
child = subprocess.Popen(["sh", "-c", command], env=environ, start_new_session=True, **pipes)


def hand_on(source, target):
    while data := os.read(source, 65536):
        try:
            os.write(target, data)
        except BrokenPipeError:
            return
    if source == 0:
        child.stdin.close()


ways = (0, child.stdin.fileno()), (child.stdout.fileno(), 1), (child.stderr.fileno(), 2)
threads = [threading.Thread(target=hand_on, args=way, daemon=True) for way in ways]
for thread in threads:
    thread.start()
for thread in threads[1:]:
    thread.join()
code = child.wait()
os._exit(code if code >= 0 else 255)
"""


def fake(folder):
    """The path of a program in the place of ssh."""
    path = pathlib.Path(folder) / "ssh"
    path.write_text(_FAKE.replace("{python}", sys.executable))
    path.chmod(0o755)
    return str(path)


@contextlib.contextmanager
def server(folder):
    """Runs a server on all addresses; gives the command that logs in, as for `--ssh`.

    Without OpenSSH's server, it is a program that runs the command here.
    """
    program = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
    if program is None or os.getuid():
        yield fake(folder)
        return
    pathlib.Path("/run/sshd").mkdir(exist_ok=True)  # Where the server gives up its rights.
    for name in ("host", "own"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    (port,) = free_ports(1)
    options = {
        "Port": port,
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "own.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
        "MaxStartups": "100",
        "PermitRootLogin": "prohibit-password",
    }
    words = [f"-o{name}={value}" for name, value in options.items()]
    with open(folder / "sshd.log", "w") as log:
        process = subprocess.Popen([program, "-D", "-e", "-f", os.devnull, *words], stderr=log)
    ssh = ["ssh", "-p", str(port), "-i", str(folder / "own"), "-F", os.devnull]
    ssh += ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={folder / 'known'}"]
    try:
        for _ in range(100):
            if subprocess.run([*ssh, "127.0.0.1", "true"], capture_output=True).returncode == 0:
                break
            time.sleep(0.1)
        else:
            raise AssertionError((folder / "sshd.log").read_text())
        yield shlex.join(ssh)
    finally:
        process.kill()
        process.wait()
