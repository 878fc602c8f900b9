"""What docs/launcher.md has for Slurm and Kubernetes makes a TF_CONFIG for each task."""

import os
import re
import subprocess
import textwrap

import pytest

from keras_psplus.cluster.config import read_task_config
from tests.docs import pages

BLOCKS = pages.blocks(pages.ROOT / "docs" / "launcher.md")


def block(language):
    (found,) = [block.text for block in BLOCKS if block.language == language]
    return found


@pytest.fixture
def bash(tmp_path):
    """Runs a script where `python` prints TF_CONFIG, beside stand-ins for Slurm's commands."""
    stand_ins = {
        "python": 'printf %s "$TF_CONFIG"',
        "scontrol": "printf 'node1\\nnode2\\n'",
        "srun": 'exec "$@"',
    }
    for name, line in stand_ins.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{line}\n")
        path.chmod(0o755)

    def run(script, **variables):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        process = subprocess.run(
            ["bash", "-c", script], env=env, capture_output=True, text=True, check=True, timeout=30
        )
        return read_task_config({"TF_CONFIG": process.stdout})

    return run


@pytest.mark.parametrize("index", [0, 1])
def test_slurm(bash, index):
    config = bash(block("bash"), SLURM_JOB_NODELIST="node[1-2]", SLURM_PROCID=str(index))
    assert config.cluster == {"worker": ("node1:2222", "node2:2222")}
    assert config.name == f"worker-{index}"


@pytest.mark.parametrize("index", [0, 1])
def test_kubernetes(bash, index):
    manifest = block("yaml")
    (script,) = re.findall(r"^ +- \|\n(.*)", manifest, re.MULTILINE | re.DOTALL)
    config = bash(textwrap.dedent(script), HOSTNAME=f"train-{index}")
    replicas = int(re.search(r"replicas: (\d+)", manifest)[1])
    assert config.cluster == {"worker": tuple(f"train-{i}.train:2222" for i in range(replicas))}
    assert config.name == f"worker-{index}"
