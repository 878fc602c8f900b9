"""`keras-psplus export kubernetes`: the manifest of a job that trains a script."""

import json
import re
import secrets
import shlex
import textwrap
from typing import Any

from absl import flags

from keras_psplus import catalogue
from keras_psplus.cli import command_flags, manifests
from keras_psplus.cluster.discovery import launchers
from keras_psplus.cluster.environment import TOKEN_VARIABLE

# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_QUANTITIES = {
    "cpus": (r"\d+(\.\d+)?m?", "500m"),
    "memory": (r"\d+(\.\d+)?([KMGTPE]i|[kMGTPE])?", "8Gi"),
}
_USAGE = """
usage: keras-psplus export kubernetes [flags] SCRIPT [arguments of the script]

Prints a manifest for `kubectl apply`: an Indexed Job with a pod for each task, a headless service
by which they find each other, a secret with the job's token, a network policy that admits the job's
own pods alone, and with --backup_claim a volume for backups. SCRIPT is a path inside the image.
With --jobset a JobSet (https://jobset.sigs.k8s.io) of a Job for each kind of task; the workers' may
have its parallelism changed while it runs, if --workers is a range.

  keras-psplus export kubernetes --workers 4 --image example/train:1 /app/train.py > job.yaml
  keras-psplus export kubernetes --jobset --workers 2 --ps 2 --strategy async_parameter_server \\
      --image example/train:1 --backup_claim backups /app/train.py > job.yaml
"""


def main(argv: list[str]) -> int:
    """Runs the command; returns 0, or 2 for a wrong command line."""
    options = _flags()
    if command_flags.shows_help(_USAGE, options, argv[1:] if argv[:1] == ["kubernetes"] else argv):
        return 0
    try:
        if argv[:1] != ["kubernetes"]:
            raise command_flags.UsageError(
                "what can be exported is `kubernetes`. "
                f"Received: {argv[0] if argv else 'no argument'}"
            )
        command = command_flags.parse(options, argv[1:])
        if not command:
            raise command_flags.UsageError("name the script to run, after the flags")
        print(manifest(options, command))
    except (command_flags.UsageError, ValueError) as error:
        return command_flags.complain("export", error)
    return 0


def manifest(options: flags.FlagValues, command: list[str]) -> str:
    """Returns the documents of a job, as YAML.

    Args:
        command: The script, in the image, and its arguments.

    Raises:
        UsageError: If flags are missing, or do not go together.
    """
    if not options.image:
        raise command_flags.UsageError(
            "name the image that has the script: --image example/train:1"
        )
    name = options.name
    if not (name.isascii() and name.replace("-", "").isalnum() and name == name.lower()):
        raise command_flags.UsageError(
            "a name has lower-case letters, digits and '-' in it, and begins and ends with one of "
            f"the first two. Received: --name={name}"
        )
    for flag, (pattern, example) in _QUANTITIES.items():
        value = getattr(options, flag)
        if not re.fullmatch(pattern, value):
            raise command_flags.UsageError(
                f"--{flag} is a quantity of Kubernetes, such as {example}. "
                f"Received: --{flag}={value}"
            )
    chief = command_flags.chief_of(options)
    least, workers = command_flags.workers_of(options.workers)
    counts = {"chief": int(chief), "worker": workers or 0, "ps": options.ps}
    # Refused here as by `run`.
    command_flags.variables(
        options, {"workers": counts["worker"], "ps": options.ps, "chief": chief}
    )
    if least is not None:
        command_flags.check_range(options, chief)
        if not options.jobset:
            raise command_flags.UsageError(
                "workers that come and go are pods of a Job of their own, whose parallelism may "
                f"change: add --jobset. Received: --workers={options.workers}"
            )
    strategy = options.strategy
    given = [
        (option, getattr(options, option)) for option in ("strategy", *catalogue.OPTION_VARIABLES)
    ]
    chosen = [f"--{option}={value}" for option, value in given if value is not None]
    words = ["keras-psplus", "exec", *chosen, *command]
    values = {
        "name": name,
        "token": secrets.token_hex(16),
        "token_variable": TOKEN_VARIABLE,
        "image": options.image,
        "command": "[" + ", ".join(_quoted(word) for word in words) + "]",
        "layout": launchers.text_of(counts),
        "cpu": options.cpus,
        "memory": options.memory,
        "limits": f"memory: {options.memory}"
        + (f', nvidia.com/gpu: "{options.gpus}"' if options.gpus else ""),
        "claim": options.backup_claim,
    }
    if options.jobset:
        entry = None if strategy is None else catalogue.find(strategy)
        kind = None if entry is None else entry.strategy
        text = manifests.jobset(values, counts, kind, options.max_restarts, least)
    else:
        text = manifests.indexed_job(values, counts, options.max_restarts)
    head = textwrap.dedent(
        f"""\
        # {sum(counts.values())} tasks: {values["layout"]}. Made by
        #   keras-psplus export kubernetes ... {shlex.join(command)}
        # The image has keras-psplus and the script. `kubectl apply -f` this file; to train again,
        # delete the {"JobSet" if options.jobset else "Job"} first.
        """
    )
    if least is not None:
        head += (
            "# Workers come and go with the parallelism of their Job, while it runs:\n"
            f"#   kubectl patch job {name}-worker-0 --type merge "
            f"""-p '{{"spec": {{"parallelism": {workers}}}}}'\n"""
        )
    return head + text


def _quoted(word: str) -> str:
    # Of `$(NAME)` Kubernetes would put the variable's value in its place.
    return json.dumps(word.replace("$(", "$$("))


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    whole: dict[str, Any] = {"flag_values": values, "lower_bound": 0}
    flags.DEFINE_string(
        "workers",
        "2",
        "Number of workers; with --jobset also MIN:MAX, of which MIN are started and others come "
        "and go with their Job's parallelism.",
        flag_values=values,
    )
    flags.DEFINE_integer("ps", 0, "Number of parameter servers.", **whole)
    flags.DEFINE_boolean(
        "chief",
        None,
        "Whether there is a chief beside the workers (default: if there are parameter servers, or "
        "with --strategy pipeline).",
        flag_values=values,
    )
    flags.DEFINE_string("image", None, "Image that has the script.", flag_values=values)
    flags.DEFINE_string("name", "train", "Name of the Job and the service.", flag_values=values)
    flags.DEFINE_boolean(
        "jobset",
        False,
        "Whether the manifest is that of a JobSet, which its controller restarts as a whole.",
        flag_values=values,
    )
    flags.DEFINE_string("cpus", "4", "Processors of each pod.", flag_values=values)
    flags.DEFINE_string("memory", "8Gi", "Memory of each pod.", flag_values=values)
    flags.DEFINE_integer("gpus", 0, "GPUs of each pod (NVIDIA's).", **whole)
    flags.DEFINE_integer("max_restarts", 3, "How often all tasks may fail.", **whole)
    flags.DEFINE_string(
        "backup_claim",
        None,
        "A PersistentVolumeClaim that all pods can write, which is mounted at /backups.",
        flag_values=values,
    )
    command_flags.define_strategy(values)
    return values
