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


def program():
    """The path of OpenSSH's server; None where it is not, or this is not root."""
    found = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
    return None if os.getuid() else found


def make_keys(folder, port, has_key=True):
    """Makes keys of a server and of a user in a folder; returns the server's options.

    Args:
        has_key: Whether the server knows the user's key.
    """
    pathlib.Path("/run/sshd").mkdir(exist_ok=True)  # Where the server gives up its rights.
    for name in ("host", "own"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    options = {
        "Port": port,
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "own.pub" if has_key else "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
        "MaxStartups": "100",
        "Subsystem": "sftp internal-sftp",
        "PermitRootLogin": "prohibit-password",
    }
    return ["-f", os.devnull, *(f"-o{name}={value}" for name, value in options.items())]


def client(folder, *words):
    """The command of a user with the folder's keys, for a shell."""
    known = ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={folder / 'known'}"]
    ssh = [shutil.which("ssh"), *words, "-i", str(folder / "own"), "-F", os.devnull, *known]
    return shlex.join(ssh)


@contextlib.contextmanager
def server(folder):
    """Runs a server on all addresses; gives the command that logs in, as for `--ssh`.

    Without OpenSSH's server, it is a program that runs the command here.
    """
    if program() is None:
        yield fake(folder)
        return
    (port,) = free_ports(1)
    options = make_keys(folder, port)
    ssh = client(folder, "-p", str(port))
    with open(folder / "sshd.log", "w") as log:
        process = subprocess.Popen([program(), "-D", "-e", *options], stderr=log)
    try:
        for _ in range(100):
            trial = [*shlex.split(ssh), "127.0.0.1", "true"]
            if subprocess.run(trial, capture_output=True).returncode == 0:
                break
            time.sleep(0.1)
        else:
            raise AssertionError((folder / "sshd.log").read_text())
        yield ssh
    finally:
        process.kill()
        process.wait()
