"""A host that is reached by ssh: OpenSSH's server on this machine, or a program in its place."""

import contextlib
import os
import pathlib
import shlex
import shutil
import subprocess
import time

from keras_psplus.cluster.ports import free_ports

# Runs the command in a session of its own with a new environment, as sshd does.
_FAKE = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
shift
exec env -i HOME="$HOME" PATH=/usr/bin:/bin setsid --wait sh -c "$1"
"""


def fake(folder):
    """The path of a program in the place of ssh."""
    path = pathlib.Path(folder) / "ssh"
    path.write_text(_FAKE)
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
