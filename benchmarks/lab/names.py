"""Host names for libraries that look up their machine's name."""

import socket

# The file that is bound over /etc/hosts stays there after it has lost its name.
_BIND = """
set -e
file=$(mktemp)
printf '127.0.0.1 localhost\\n%s %s\\n' "$1" "$2" > "$file"
chmod 644 "$file"
mount --bind "$file" /etc/hosts
rm "$file"
shift 2
exec "$@"
"""


def resolving(command, address):
    """Wraps a command so that this machine's name resolves to an address.

    The command has a separate /etc/hosts. gloo, as JAX uses it, listens on the address of the
    machine's name, which on an emulated host would be the loopback. Needs root, and the programs
    `unshare` and `mount`.

    Args:
        command: A list of strings.
        address: The host's, as `"10.77.0.1:2222"` or without the port.

    Returns:
        A list of strings. The command becomes the process that is started so.
    """
    host = address.partition(":")[0]
    return ["unshare", "--mount", "sh", "-c", _BIND, "sh", host, socket.gethostname(), *command]
