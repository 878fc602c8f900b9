"""The cluster by the variables of Slurm, Kubernetes, MPI and torchrun, and what is refused."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus.cluster.config import ClusterConfigError
from keras_psplus.cluster.discovery import find, launchers
from keras_psplus.cluster.discovery.find import find_ranks, find_task_config
from tests.support.tables import for_each

# As `srun -N2 --ntasks-per-node=2` of Slurm 22.05 sets them, for its second process.
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "n1",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host1",
    "MASTER_PORT": "29500",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
INDEXED_JOB = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "train-1",
    "KERAS_PSPLUS_SUBDOMAIN": "peers",
    "KERAS_PSPLUS_LAYOUT": "worker:2",
}


def workers_of(environ):
    config = find_task_config(dict(environ))
    return config.name, list(config.cluster["worker"])


def test_nothing_is_no_cluster():
    environ = {}
    assert find_task_config(environ) is None
    assert environ == {}


def test_a_step_of_slurm():
    name, addresses = workers_of(SLURM)
    assert name == "worker-1"
    port = int(addresses[0].partition(":")[2])
    assert addresses == [f"n{n}:{port + i}" for n in (1, 2) for i in (0, 1)]
    # Another job's tasks on the same nodes do not meet these; one step after the other may.
    _, others = workers_of(SLURM | {"SLURM_JOB_ID": "13"})
    assert not set(addresses) & set(others)


def test_a_step_of_slurm_that_goes_round_the_nodes():
    cyclic = {"SLURM_DISTRIBUTION": "cyclic", "SLURMD_NODENAME": "n2", "SLURM_LOCALID": "0"}
    name, addresses = workers_of(SLURM | cyclic)
    assert name == "worker-1"
    assert [address.partition(":")[0] for address in addresses] == ["n1", "n2", "n1", "n2"]


def test_a_heterogeneous_step_of_slurm():
    config = find_task_config(
        SLURM
        | {"SLURM_STEP_NODELIST": "a,b[07-08]", "SLURM_STEP_TASKS_PER_NODE": "1,2,1"}
        | {"SLURMD_NODENAME": "b07", "SLURM_LOCALID": "0"}
        | {"KERAS_PSPLUS_LAYOUT": "chief:1,worker:2,ps:1"}
    )
    assert config.name == "worker-0"
    hosts = {job: [a.partition(":")[0] for a in own] for job, own in config.cluster.items()}
    assert hosts == {"chief": ["a"], "worker": ["b07", "b07"], "ps": ["b08"]}


RANGE = {
    "KERAS_PSPLUS_LAYOUT": "chief:1,ps:1,worker:3",
    "KERAS_PSPLUS_MIN_WORKERS": "1",
    "KERAS_PSPLUS_HOSTS": "n1,n1,n1,n2,n3",
}


def of_step(step, nodes, rank, first=0):
    """Variables of a process of a step with one process for each of some nodes."""
    return RANGE | {
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": str(step),
        "SLURM_STEP_NUM_TASKS": str(len(nodes)),
        "SLURM_STEP_NODELIST": ",".join(dict.fromkeys(nodes)),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(str(nodes.count(n)) for n in dict.fromkeys(nodes)),
        "SLURM_PROCID": str(rank),
        "KERAS_PSPLUS_FIRST_RANK": str(first),
    }


def test_further_steps_of_slurm_join_a_job_of_a_range():
    processes = [of_step(0, ["n1"] * 3, rank) for rank in range(3)]
    processes += [of_step(1, ["n2"], 0, first=3), of_step(2, ["n3"], 0, first=4)]
    together = [of_step(1, ["n2", "n3"], rank, first=3) for rank in range(2)]
    found = [find_task_config(dict(environ)) for environ in processes + together]
    names = ["chief-0", "ps-0", "worker-0", "worker-1", "worker-2"]
    assert [config.name for config in found] == [*names, "worker-1", "worker-2"]
    assert all(config.cluster == found[0].cluster for config in found)
    hosts = [address.partition(":")[0] for address in found[0].cluster["worker"]]
    assert hosts == ["n1", "n2", "n3"]
    # A job of a fixed number of workers has all of its processes in one step.
    fixed = {name: text for name, text in processes[0].items() if "MIN_WORKERS" not in name}
    del fixed["KERAS_PSPLUS_HOSTS"]
    with pytest.raises(ClusterConfigError, match="has 5 tasks, but the job has 3 processes"):
        find_task_config(fixed)


def test_one_process_of_slurm_trains_alone():
    alone = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    assert find_task_config(SLURM | alone) is None


def test_torchrun_on_one_host():
    assert workers_of(TORCHRUN) == ("worker-1", ["host1:29501", "host1:29502"])


def test_hosts_that_a_launcher_does_not_tell():
    given = TORCHRUN | {"WORLD_SIZE": "4", "KERAS_PSPLUS_HOSTS": "h1,h2"}
    assert workers_of(given) == (
        "worker-1",
        ["h1:29501", "h1:29502", "h2:29501", "h2:29502"],
    )
    given |= {"KERAS_PSPLUS_HOSTS": "h1,h2,[::3],h4", "KERAS_PSPLUS_PORT": "2222"}
    assert workers_of(given)[1] == ["h1:2222", "h2:2222", "[::3]:2222", "h4:2222"]


def test_mpi_on_one_host():
    name, addresses = workers_of(MPI)
    assert name == "worker-1"
    assert {address.partition(":")[0] for address in addresses} == {"127.0.0.1"}
    assert len(set(addresses)) == 2


def test_pods_of_an_indexed_job():
    assert workers_of(INDEXED_JOB) == ("worker-1", ["train-0.peers:2222", "train-1.peers:2222"])


def test_what_is_found_is_kept_in_tf_config():
    environ = dict(TORCHRUN)
    config = find_task_config(environ)
    assert json.loads(environ["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}
    assert find_task_config(environ) == config


def test_tf_config_counts_more():
    given = {
        "TF_CONFIG": json.dumps(
            {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
        )
    }
    assert find_task_config(SLURM | given).address == "a:1"


def test_launchers_that_agree():
    # srun --mpi=pmi2 sets both; Slurm knows the hosts.
    found = find_ranks(SLURM | {"PMI_RANK": "1", "PMI_SIZE": "4"})
    assert found.source == "Slurm (job 12, step 0)"


def test_the_evaluator_is_beside_the_cluster():
    given = TORCHRUN | {"KERAS_PSPLUS_LAYOUT": "worker:1,evaluator:1"}
    config = find_task_config(given)
    assert (config.name, config.address) == ("evaluator-0", None)
    assert config.cluster == {"worker": ("host1:29501",)}


def test_none_is_for_those_that_train_alone():
    for environ in (SLURM, TORCHRUN, MPI, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}):
        assert find_task_config(environ | {"KERAS_PSPLUS_CLUSTER": "none"}) is None


WRONG = {
    "slurm without srun": (
        {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "2"},
        "has 2 tasks, but this process was not started by srun",
    ),
    "half a rank": ({"RANK": "1"}, "RANK is set, but WORLD_SIZE is not"),
    "half a size": ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not"),
    "rank out of range": (TORCHRUN | {"RANK": "2"}, "RANK must be a whole number from 0 to 1"),
    "hosts unknown": (
        TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ""},
        "Set KERAS_PSPLUS_HOSTS",
    ),
    "hosts with ports": (
        TORCHRUN | {"KERAS_PSPLUS_HOSTS": "a:1,b:2"},
        "must name hosts without ports.*'a:1' is no host",
    ),
    "hosts that are none": (TORCHRUN | {"KERAS_PSPLUS_HOSTS": "a/b,c"}, "'a/b' is no host"),
    "nodes unknown": (
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"},
        "process 1 of 4, but not on which hosts the others are. Set KERAS_PSPLUS_HOSTS",
    ),
    "hosts do not fit": (
        TORCHRUN | {"KERAS_PSPLUS_HOSTS": "a,b,c"},
        "one host for each of the 2 processes",
    ),
    "contradiction": (
        SLURM | TORCHRUN,
        "by Slurm .job 12, step 0. this is 1 of 4, and by RANK .* this is 1 of 2.*"
        "Set KERAS_PSPLUS_CLUSTER",
    ),
    "unknown launcher": ({"KERAS_PSPLUS_CLUSTER": "lsf"}, "must be one of slurm, kubernetes"),
    "layout of others": (
        TORCHRUN | {"KERAS_PSPLUS_LAYOUT": "worker:2,ps:1"},
        "has 3 tasks, but the job has 2 processes",
    ),
    "layout without ranks": (
        {"KERAS_PSPLUS_LAYOUT": "worker:2"},
        "nothing says which of them this process is",
    ),
    "layout of nobody": (TORCHRUN | {"KERAS_PSPLUS_LAYOUT": "ps:2"}, "nothing would train"),
    "layout with a typo": (TORCHRUN | {"KERAS_PSPLUS_LAYOUT": "wroker:2"}, "'wroker' is none of"),
    "two chiefs": (TORCHRUN | {"KERAS_PSPLUS_LAYOUT": "chief:2"}, "at most one chief"),
    "pods unknown": (
        {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1"},
        "does not say how many pods",
    ),
    "pods too many": (INDEXED_JOB | {"JOB_COMPLETION_INDEX": "2"}, "the layout has 2 tasks"),
    "pods of another role": (
        INDEXED_JOB | {"KERAS_PSPLUS_ROLE": "ps"},
        "This is pod 1 of the ps tasks of a JobSet, but the layout has 0 of them",
    ),
    "pods of a JobSet without names": (
        INDEXED_JOB | {"KERAS_PSPLUS_ROLE": "worker"},
        "does not end with -worker-0-1",
    ),
    "pods without names": (INDEXED_JOB | {"HOSTNAME": "train"}, "does not end with -1"),
    "slurm by planes": (
        SLURM | {"SLURM_DISTRIBUTION": "plane=2"},
        "Pass `--distribution=block` to srun",
    ),
    "slurm on another node": (SLURM | {"SLURMD_NODENAME": "n2"}, "Pass `--distribution=block`"),
    "slurm's counts": (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2"}, "do not go together"),
    "more workers than the range": (
        RANGE | TORCHRUN | {"KERAS_PSPLUS_FIRST_RANK": "4"},
        "KERAS_PSPLUS_FIRST_RANK must be a whole number from 0 to 3",
    ),
    "hosts of those that join": (
        {n: t for n, t in (RANGE | TORCHRUN).items() if n != "KERAS_PSPLUS_HOSTS"},
        "process 1 of 5, but not on which hosts the others are. Set KERAS_PSPLUS_HOSTS",
    ),
    "port": (TORCHRUN | {"KERAS_PSPLUS_PORT": "http"}, "KERAS_PSPLUS_PORT must be a whole number"),
}


@for_each("name", WRONG)
def test_what_is_wrong_is_refused(name):
    environ, message = WRONG[name]
    given = dict(environ)
    with pytest.raises(ClusterConfigError, match=f"(?s){message}.*Received: ") as raised:
        find_task_config(given)
    assert given == environ
    assert not re.search(r"\bNone\b", str(raised.value))


COUNTS = st.fixed_dictionaries(
    {"worker": st.integers(1, 9)},
    optional={"chief": st.just(1), "ps": st.integers(1, 5), "evaluator": st.just(1)},
)


@given(COUNTS)
def test_every_rank_is_another_task_of_one_cluster(counts):
    size = sum(counts.values())
    addresses = [f"h{i}:1" for i in range(size)]
    found = [launchers.task_config(counts, addresses, rank) for rank in range(size)]
    assert len({config.name for config in found}) == size
    assert all(config.cluster == found[0].cluster for config in found)
    for rank, config in enumerate(found):
        assert config.address in (addresses[rank], None)
    assert launchers.parse(launchers.text_of(counts)) == counts


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans())
def test_every_process_has_its_host(counts, cyclic):
    hosts = [f"h{i}" for i in range(len(counts))]
    found = launchers.per_host(counts, hosts, cyclic)
    assert [found.count(host) for host in hosts] == counts
    assert found[0] == "h0"


def test_a_proxy_is_kept_off_the_clusters_addresses(caplog):
    cluster = {"worker": ["10.0.0.1:1", "10.0.0.2:1"], "ps": ["[fd00::1]:2", "other.host:3"]}
    config = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})}
    for before, expected in [
        ({}, None),
        ({"http_proxy": ""}, None),
        ({"http_proxy": "p:1"}, "10.0.0.1,10.0.0.2,fd00::1,other.host"),
        (
            {"https_proxy": "p:1", "no_proxy": "localhost, .Host"},
            "localhost,.Host,10.0.0.1,10.0.0.2,fd00::1",
        ),
        # Where this one is set, gRPC does not look at the other.
        (
            {"grpc_proxy": "p:1", "no_grpc_proxy": "a", "no_proxy": "10.0.0.1,10.0.0.2"},
            "a,10.0.0.1,10.0.0.2,fd00::1,other.host",
        ),
        ({"http_proxy": "p:1", "no_proxy": "1,2,host"}, None),
    ]:
        environ = before | config
        find_task_config(environ)
        assert environ.get("no_grpc_proxy", before.get("no_grpc_proxy")) == expected
        assert environ.get("no_proxy") == before.get("no_proxy")
        said = "without it (no_grpc_proxy has 10.0.0.1, 10.0.0.2" in caplog.text
        caplog.clear()
        assert said == (expected is not None)
    assert find.proxy_of({"http_proxy": "p:1", "grpc_proxy": "p:2"}) == "grpc_proxy"
    # Under a launcher's variables as well; each process sets it, the chief says so.
    environ = MPI | {"http_proxy": "p:1"}
    find_task_config(environ)
    assert environ["no_grpc_proxy"] == "127.0.0.1"
    assert "http_proxy" not in caplog.text
