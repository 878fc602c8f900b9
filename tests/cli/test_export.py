"""What `export kubernetes` prints is valid, and its pods find their cluster."""

import json
import pathlib

import jsonschema
import kubernetes_validate
import pytest
import yaml

from keras_psplus.cli import main
from keras_psplus.cluster.discovery.find import find_task_config

VERSION = "1.29"
FLAGS = ["--image", "example/train:1"]
JOBSET_SCHEMA = json.loads(pathlib.Path(__file__).with_name("jobset_schema.json").read_text())


def export(capsys, *argv):
    assert main.main(["export", "kubernetes", *argv, "/app/train.py", "--epochs", "3"]) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    for document in documents:
        validate(document)
    return {document["kind"]: document for document in documents}


def validate(document):
    if document["kind"] != "JobSet":
        kubernetes_validate.validate(document, VERSION, strict=True)
        return
    jsonschema.validate(document, JOBSET_SCHEMA)
    for job in jobs_of(document):
        kubernetes_validate.validate(job, VERSION, strict=True)


def jobs_of(jobset):
    """The Jobs that the controller makes of a JobSet."""
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": f"{jobset['metadata']['name']}-{replicated['name']}-0"},
            "spec": replicated["template"]["spec"],
        }
        for replicated in jobset["spec"]["replicatedJobs"]
        for _ in range(replicated["replicas"])
    ]


def environment(job, index):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    found = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    name = job["metadata"]["name"]
    return found | {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{name}-{index}"}


@pytest.mark.parametrize(
    ("flags", "tasks"),
    [
        (["--workers", "3"], ["worker-0", "worker-1", "worker-2"]),
        (
            ["--workers=2", "--ps=1", "--strategy=async_parameter_server", "--gpus=1"],
            ["chief-0", "worker-0", "worker-1", "ps-0"],
        ),
        (
            ["--workers=2", "--strategy=pipeline", "--backup_claim=backups"],
            ["chief-0", "worker-0", "worker-1"],
        ),
    ],
)
def test_pods_find_their_cluster(capsys, flags, tasks):
    documents = export(capsys, *FLAGS, "--name=lab", *flags)
    job, service = documents["Job"]["spec"], documents["Service"]
    assert job["completions"] == job["parallelism"] == len(tasks)
    assert job["template"]["spec"]["subdomain"] == service["metadata"]["name"] == "lab"
    configs = [find_task_config(environment(documents["Job"], i)) for i in range(len(tasks))]
    assert [config.name for config in configs] == tasks
    assert all(config.cluster == configs[0].cluster for config in configs)
    port = service["spec"]["ports"][0]["port"]
    assert [config.address for config in configs] == [
        f"lab-{i}.lab:{port}" for i in range(len(tasks))
    ]


# By flags: the tasks, which of them end the job well, and how many pods of each may fail alone.
JOBSETS = {
    "--workers=2": (["worker-0", "worker-1"], ["worker"], [0]),
    "--workers=2 --ps=1 --nochief --strategy=hybrid": (
        ["worker-0", "worker-1", "ps-0"],
        ["worker"],
        [0, 0],
    ),
    "--workers=2 --ps=2 --strategy=async_parameter_server": (
        ["chief-0", "worker-0", "worker-1", "ps-0", "ps-1"],
        ["chief"],
        [0, 8, 0],
    ),
    # What the script makes is not known.
    "--workers=1 --ps=1": (["chief-0", "worker-0", "ps-0"], ["chief", "worker"], [0, 4, 0]),
    "--workers=2 --strategy=pipeline": (
        ["chief-0", "worker-0", "worker-1"],
        ["chief"],
        [0, 0],
    ),
}


@pytest.mark.parametrize("flags", JOBSETS)
def test_pods_of_a_jobset_find_their_cluster(capsys, flags):
    tasks, ends, failures = JOBSETS[flags]
    documents = export(capsys, *FLAGS, "--jobset", "--name=lab", "--max_restarts=4", *flags.split())
    assert sorted(documents) == ["JobSet", "NetworkPolicy", "Secret"]
    jobset = documents["JobSet"]["spec"]
    assert jobset["failurePolicy"]["maxRestarts"] == 4
    assert jobset["successPolicy"]["targetReplicatedJobs"] == ends
    jobs = jobs_of(documents["JobSet"])
    assert [job["spec"]["backoffLimit"] for job in jobs] == failures
    configs = [
        find_task_config(environment(job, index))
        for job in jobs
        for index in range(job["spec"]["completions"])
    ]
    assert [config.name for config in configs] == tasks
    assert all(config.cluster == configs[0].cluster for config in configs)
    # As JobSet names its pods.
    assert [config.address for config in configs] == [
        f"lab-{task.replace('-', '-0-')}.{jobset['network']['subdomain']}:2222" for task in tasks
    ]
    selector = documents["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert selector == {"jobset.sigs.k8s.io/jobset-name": "lab"}


def test_workers_of_a_range_come_and_go_with_the_parallelism_of_their_job(capsys):
    flags = ["--workers=1:3", "--ps=1", "--strategy=async_parameter_server", "--max_restarts=2"]
    documents = export(capsys, *FLAGS, "--jobset", "--name=lab", *flags)
    jobs = {job["metadata"]["name"]: job for job in jobs_of(documents["JobSet"])}
    counts = {n: (j["spec"]["parallelism"], j["spec"]["completions"]) for n, j in jobs.items()}
    assert counts == {"lab-chief-0": (1, 1), "lab-worker-0": (1, 3), "lab-ps-0": (1, 1)}
    assert jobs["lab-worker-0"]["spec"]["backoffLimit"] == 6
    environments = [environment(jobs["lab-worker-0"], index) for index in range(3)]
    environments.append(environment(jobs["lab-chief-0"], 0))
    assert {each["KERAS_PSPLUS_MIN_WORKERS"] for each in environments} == {"1"}
    configs = [find_task_config(dict(each)) for each in environments]
    assert [config.name for config in configs] == ["worker-0", "worker-1", "worker-2", "chief-0"]
    assert all(config.cluster == configs[-1].cluster for config in configs)
    # The command that the manifest names.
    flags = ["export", "kubernetes", *FLAGS, "--jobset", "--name=lab", *flags, "/app/train.py"]
    assert main.main(flags) == 0
    (patch,) = [line for line in capsys.readouterr().out.splitlines() if "kubectl patch" in line]
    assert "job lab-worker-0 " in patch
    assert json.loads(patch.partition("-p ")[2].strip("'")) == {"spec": {"parallelism": 3}}


def test_what_the_flags_ask_for(capsys):
    flags = ["--gpus=2", "--backup_claim=backups", "--compression=int8", "--strategy=all_reduce"]
    documents = export(capsys, *FLAGS, *flags)
    pod = documents["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == [
        *("keras-psplus", "exec", "--strategy=all_reduce", "--compression=int8"),
        *("/app/train.py", "--epochs", "3"),
    ]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "backups"
    assert pod["restartPolicy"] == "Never"
    assert len(documents["Secret"]["stringData"]["token"]) == 32
    selector = documents["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert selector == {"batch.kubernetes.io/job-name": "train"}


def test_each_job_has_its_own_token(capsys):
    tokens = {export(capsys, *FLAGS)["Secret"]["stringData"]["token"] for _ in range(2)}
    assert len(tokens) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nomad"], "what can be exported is `kubernetes`"),
        (["kubernetes", "train.py"], "--image"),
        (["kubernetes", *FLAGS], "name the script"),
        (["kubernetes", *FLAGS, "--name=My_Job", "train.py"], "--name=My_Job"),
        (["kubernetes", *FLAGS, "--ps=1", "--strategy=all_reduce", "train.py"], "leave out --ps"),
        (["kubernetes", *FLAGS, "--ps=1", "--workers=1:3", "train.py"], "add --jobset"),
        (["kubernetes", *FLAGS, "--workers=1:3", "--jobset", "train.py"], "add --ps 1"),
        (["kubernetes", *FLAGS, "--workers=3:1", "--jobset", "train.py"], "at least the first"),
        (["kubernetes", "--image", "i", "--memory", "8Gb", "t.py"], "Received: --memory=8Gb"),
    ],
)
def test_a_wrong_command_line_is_refused(capsys, argv, message):
    assert main.main(["export", *argv]) == 2
    assert message in capsys.readouterr().err
