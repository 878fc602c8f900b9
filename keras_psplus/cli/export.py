"""`keras-psplus export kubernetes`: the manifest of a job that trains a script."""

import argparse
import json
import re
import secrets
import shlex
import textwrap

from keras_psplus import catalogue
from keras_psplus.cli import flags, manifests
from keras_psplus.cli.flags import UsageError
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
    """Runs the command; returns 0."""
    is_known = argv[:1] == ["kubernetes"]
    options = _parser().read(argv[is_known:])
    if not is_known:
        raise UsageError(
            f"what can be exported is `kubernetes`. Received: {argv[0] if argv else 'no argument'}"
        )
    if not options.command:
        raise UsageError("name the script to run, after the flags")
    try:
        print(manifest(options, options.command))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return 0


def manifest(options: argparse.Namespace, command: list[str]) -> str:
    """Returns the documents of a job, as YAML.

    Args:
        command: The script, in the image, and its arguments.
    """
    if not options.image:
        raise UsageError("name the image that has the script: --image example/train:1")
    name = options.name
    if not (name.isascii() and name.replace("-", "").isalnum() and name == name.lower()):
        raise UsageError(
            "a name has lower-case letters, digits and '-' in it, and begins and ends with one of "
            f"the first two. Received: --name={name}"
        )
    for flag, (pattern, example) in _QUANTITIES.items():
        value = getattr(options, flag)
        if not re.fullmatch(pattern, value):
            raise UsageError(
                f"--{flag} is a quantity of Kubernetes, such as {example}. "
                f"Received: --{flag}={value}"
            )
    chief = flags.chief_of(options)
    least, workers = flags.workers_of(options.workers)
    counts = {"chief": int(chief), "worker": workers or 0, "ps": options.ps}
    # Refused here as by `run`.
    flags.variables(options, {"workers": counts["worker"], "ps": options.ps, "chief": chief})
    if least is not None:
        flags.check_range(options, chief)
        if not options.jobset:
            raise UsageError(
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


def _parser() -> flags.Parser:
    parser = flags.Parser(_USAGE)
    parser.text(
        "workers",
        "Number of workers; with --jobset also MIN:MAX, of which MIN are started and others come "
        "and go with their Job's parallelism.",
        "2",
    )
    flags.add_roles(parser)
    parser.text("image", "Image that has the script.")
    parser.text("name", "Name of the Job and the service.", "train")
    parser.switch(
        "jobset",
        "Whether the manifest is that of a JobSet, which its controller restarts as a whole.",
    )
    parser.text("cpus", "Processors of each pod.", "4")
    parser.text("memory", "Memory of each pod.", "8Gi")
    parser.number("gpus", int, "GPUs of each pod (NVIDIA's).", 0)
    parser.number("max_restarts", int, "How often all tasks may fail.", 3)
    parser.text(
        "backup_claim",
        "A PersistentVolumeClaim that all pods can write, which is mounted at /backups.",
    )
    flags.add_strategy(parser)
    return parser
