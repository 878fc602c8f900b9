import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_psplus.cluster.config import (
    JOB_TYPES,
    ClusterConfigError,
    TaskConfig,
    read_task_config,
    split_address,
)
from tests.support.tables import for_each

WORKERS = {"worker": ["h1:2222", "h2:2222"]}


def read(cluster, task):
    return read_task_config({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})


@for_each("value", [None, "", "  ", "{}", '{"cluster": {}}', '{"task": {}}'])
def test_no_cluster_is_none(value):
    assert read_task_config({} if value is None else {"TF_CONFIG": value}) is None


def test_reads_os_environ_by_default(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": WORKERS, "task": _worker(1)}))
    assert read_task_config().name == "worker-1"


def test_task_of_a_cluster_with_every_job():
    config = read(
        {"ps": ["p:1"], "worker": ["a:1", "b:1"], "chief": ["c:1"]}, {"type": "worker", "index": 1}
    )
    assert config.name == "worker-1"
    assert config.device == "/job:worker/replica:0/task:1"
    assert config.address == "b:1"
    assert config.tasks() == [
        ("chief", 0, "c:1"),
        ("worker", 0, "a:1"),
        ("worker", 1, "b:1"),
        ("ps", 0, "p:1"),
    ]
    assert config.peers(("chief", "worker")) == [("chief", 0, "c:1"), ("worker", 0, "a:1")]
    assert (config.num_workers, config.num_ps, config.is_chief) == (3, 1, False)
    assert "worker-1" in config.describe() and "this task" in config.describe()


def test_worker_0_is_chief_without_a_chief():
    assert read(WORKERS, _worker(0)).is_chief
    assert not read(WORKERS, _worker(1)).is_chief
    assert not read({**WORKERS, "chief": ["c:1"]}, _worker(0)).is_chief


def test_evaluator_is_beside_the_cluster():
    config = read(WORKERS, {"type": "evaluator", "index": 0})
    assert (config.name, config.address, config.is_chief) == ("evaluator-0", None, False)
    assert len(config.peers()) == 2


BAD = [
    ("not json", "not valid JSON"),
    ('{"cluster": ', "column"),
    ("[1]", "JSON object"),
    (({"worker": "h1:1"}, _w := {"type": "worker", "index": 0}), "list"),
    ((["h1:1"], _w), "'cluster' should be an object"),
    (({"worker": ["h1:1"], "trainer": ["h2:1"]}, _w), "'trainer' is none of"),
    (({"master": ["h1:1"]}, _w), "called 'chief'"),
    (({"chief": ["a:1", "b:1"]}, _w), "at most one chief"),
    (({"worker": []}, _w), "no tasks"),
    (({"ps": ["h1:1"]}, {"type": "ps", "index": 0}), "neither a chief nor a worker"),
    (({"worker": ["h1"]}, _w), "host:port"),
    (({"worker": ["h1:"]}, _w), "number from 1 to 65535"),
    (({"worker": [":1"]}, _w), "host:port"),
    (({"worker": ["h1:0"]}, _w), "number from 1 to 65535"),
    (({"worker": ["h1:70000"]}, _w), "number from 1 to 65535"),
    (({"worker": ["h1:http"]}, _w), "number from 1 to 65535"),
    (({"worker": ["grpc://h1:1"]}, _w), "scheme"),
    (({"worker": ["::1:22"]}, _w), "brackets"),
    (({"worker": ["h 1:22"]}, _w), "host:port"),
    (({"worker": [22]}, _w), "not a string"),
    (({"worker": ["h1:1", "h1:1"]}, _w), "worker-0 and worker-1 have the same address"),
    (({"worker": ["h1:1"], "ps": ["H1:1"]}, _w), "worker-0 and ps-0 have the same address"),
    (({"worker": ["h1:1"], "evaluator": ["h2:1"]}, _w), "outside the cluster"),
    ((WORKERS, None), "'task' is missing"),
    ((WORKERS, {"index": 0}), "no 'type'"),
    ((WORKERS, {"type": "ps", "index": 0}), "not in the cluster"),
    ((WORKERS, {"type": "worker"}), "no 'index'"),
    ((WORKERS, {"type": "worker", "index": "1"}), "without quotes"),
    ((WORKERS, {"type": "worker", "index": True}), "without quotes"),
    ((WORKERS, {"type": "worker", "index": 1.0}), "without quotes"),
    ((WORKERS, {"type": "worker", "index": 2}), "tasks 0 to 1"),
    ((WORKERS, {"type": "worker", "index": -1}), "out of range"),
    ((WORKERS, {"type": "evaluator", "index": -1}), "starts at 0"),
]


@for_each("value, message", BAD)
def test_mistakes_are_named(value, message):
    text = (
        value
        if isinstance(value, str)
        else json.dumps(dict(zip(("cluster", "task"), value, strict=True)))
    )
    with pytest.raises(ClusterConfigError) as error:
        read_task_config({"TF_CONFIG": text})
    assert message in str(error.value)
    assert f"Received: TF_CONFIG={text}" in str(error.value)


@for_each(
    "text, message",
    [
        ("[" * 100_000, "it is nested too deeply"),
        ('{"cluster":' * 100_000, "it is nested too deeply"),
        ('{"task": {"index": ' + "1" * 5000 + "}}", "Exceeds the limit"),
        (
            json.dumps({"cluster": {"worker": [f"{'a' * 64}:1"]}, "task": _w}),
            "is wrong: its host name cannot be looked up: ",
        ),
        (
            json.dumps({"cluster": {"worker": ["host..com:1"]}, "task": _w}),
            "is wrong: its host name cannot be looked up: ",
        ),
        (
            json.dumps({"cluster": {"worker": ["a\0b:1"]}, "task": _w}),
            "is wrong: an address",
        ),
        (
            json.dumps({"cluster": {"worker": ["\udc80:1"]}, "task": _w}),
            "is wrong: its host name cannot be looked up: ",
        ),
    ],
)
def test_what_neither_json_nor_the_resolver_can_read_is_refused(text, message):
    with pytest.raises(ClusterConfigError, match=message) as error:
        read_task_config({"TF_CONFIG": text})
    assert "Received: TF_CONFIG=" in str(error.value) and len(str(error.value)) < 2000
    str(error.value).encode()


def test_long_values_are_shortened_in_the_message():
    with pytest.raises(ClusterConfigError) as error:
        read_task_config({"TF_CONFIG": "x" * 10_000})
    assert len(str(error.value)) < 1500


names = st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True).filter(lambda n: ".." not in n)
hosts = names | st.just("[::1]")
addresses = st.tuples(hosts, st.integers(1, 65535)).map(lambda pair: f"{pair[0]}:{pair[1]}")


@st.composite
def configs(draw):
    counts = [draw(st.integers(0, 1)), draw(st.integers(0, 4)), draw(st.integers(0, 3))]
    if not counts[0] + counts[1]:
        counts[1] = 1
    total = sum(counts)
    listed = iter(draw(st.lists(addresses, min_size=total, max_size=total, unique=True)))
    cluster = {
        job: tuple(next(listed) for _ in range(count))
        for job, count in zip(JOB_TYPES, counts, strict=True)
        if count
    }
    job = draw(st.sampled_from(sorted(cluster)))
    return TaskConfig(cluster, job, draw(st.integers(0, len(cluster[job]) - 1)))


@given(configs())
@settings(max_examples=15)
def test_round_trip(config):
    assert read_task_config({"TF_CONFIG": config.to_tf_config()}) == config
    assert len(config.peers()) == len(config.tasks()) - 1


@given(addresses)
def test_split_address_takes_valid_ones_apart(address):
    host, port = split_address(address)
    assert address in (f"{host}:{port}", f"[{host}]:{port}")


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused_as_a_config_error(text):
    try:
        read_task_config({"TF_CONFIG": text})
    except ClusterConfigError as error:
        assert "Received:" in str(error)


def _worker(index):
    return {"type": "worker", "index": index}
