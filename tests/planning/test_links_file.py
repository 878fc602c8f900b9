"""Files of measured links: what they say of a ring, and those that do not fit."""

import itertools
import json

import pytest

from keras_psplus import planning
from keras_psplus.all_reduce.collectives import operations
from keras_psplus.cluster.config import TaskConfig, task_name
from keras_psplus.planning import Link, Links

HOSTS = ["a", "b", "c"]
LINKS = Links(HOSTS, {(0, 1): Link(0.2, 1e9), (0, 2): Link(0.4, 2e8), (1, 2): Link(3.0, 5e8)})


def row(*hosts, latency_ms=0.5, bits_per_second=1e9):
    return {"hosts": list(hosts), "latency_ms": latency_ms, "bits_per_second": bits_per_second}


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "links.json"
    path.write_text(json.dumps(LINKS.as_dict()))
    assert planning.read_links(path) == LINKS


def test_pairs_in_any_order(tmp_path):
    rows = [row("c", "b"), row("b", "a"), row("c", "a", latency_ms=0, bits_per_second=5)]
    found = planning.parse_links(json.dumps({"hosts": HOSTS, "links": rows}), "here")
    assert found.links == {(0, 1): (0.5, 1e9), (0, 2): (0, 5), (1, 2): (0.5, 1e9)}


def test_a_ring_is_as_slow_as_its_slowest_link():
    assert LINKS.slowest_of_ring == Link(3.0, 2e8)
    pair = Links(HOSTS[:2], {(0, 1): Link(0.2, 1e9)})
    assert pair.slowest_of_ring == Link(0.2, 1e9)
    # Of four hosts in two racks, a link that no neighbours use does not count.
    links = {(i, j): Link(0.1, 1e9) for i in range(4) for j in range(i + 1, 4)}
    links[0, 2] = Link(9.0, 1e6)
    assert Links([*"abcd"], links).slowest_of_ring == Link(0.1, 1e9)


@pytest.mark.parametrize("first", ["worker", "chief"])
def test_a_ring_goes_round_tasks_as_tensorflow_does(first):
    cluster = {"worker": [f"h{i}:1" for i in range(12)]}
    if first == "chief":
        cluster["chief"] = ["h:1"]
    task = TaskConfig(cluster, first, 0)
    hosts = [task_name(job, index) for job, index, _ in task.tasks()]
    assert hosts[0] == f"{first}-0"
    near = {pair: Link(0.1, 1e9) for pair in itertools.combinations(range(len(hosts)), 2)}
    names = operations.names_of(task, 1)
    assert Links(hosts, near).ring == operations.ranks_by_place(names)
    # Worker 10 comes before worker 2, and so is no neighbour of worker 9.
    after_nine = near | {(hosts.index("worker-9"), hosts.index("worker-10")): Link(9.0, 1e6)}
    assert Links(hosts, after_nine).slowest_of_ring == Link(0.1, 1e9)
    before_two = near | {(hosts.index("worker-2"), hosts.index("worker-11")): Link(9.0, 1e6)}
    assert Links(hosts, before_two).slowest_of_ring == Link(9.0, 1e6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is what `keras-psplus doctor --links --json` prints.*JSONDecodeError"),
        ("[]", "is what `keras-psplus doctor --links --json` prints"),
        ({"hosts": HOSTS}, "KeyError: 'links'"),
        ({"hosts": HOSTS, "links": [{"hosts": ["a", "b"]}]}, "KeyError: 'latency_ms'"),
        ({"hosts": "ab", "links": []}, '"hosts" is a list of names'),
        ({"hosts": ["a"], "links": []}, "two hosts or more"),
        ({"hosts": ["a", "a"], "links": []}, "each named once"),
        ({"hosts": HOSTS, "links": [row("a", "d")]}, "'d' is not among \"hosts\""),
        ({"hosts": HOSTS, "links": [row("a", "a")]}, "a link is between two hosts"),
        ({"hosts": HOSTS, "links": [row("a", "b", "c")]}, "a link is between two hosts"),
        ({"hosts": HOSTS, "links": [row("a", [])]}, "is not among"),
        ({"hosts": HOSTS, "links": [row("a", "b"), row("b", "a")]}, "b and a are there twice"),
        ({"hosts": HOSTS, "links": [row("a", "b")]}, "a and c are missing, and 1 other pair"),
        ({"hosts": HOSTS, "links": [row("a", "b", latency_ms=-1)]}, "is 0 or more, and not -1"),
        ({"hosts": HOSTS, "links": [row("a", "b", bits_per_second=0)]}, "is above 0, and not 0"),
        ({"hosts": HOSTS, "links": [row("a", "b", bits_per_second="1gbit")]}, "not '1gbit'"),
        ({"hosts": HOSTS, "links": [row("a", "b", latency_ms=True)]}, "not True"),
        ('{"hosts": ["a", "b"], "links": [{"hosts": ["a", "b"], "latency_ms": NaN, '
         '"bits_per_second": 1}]}', "not nan"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit(text, message, tmp_path):
    path = tmp_path / "links.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(ValueError, match=message) as error:
        planning.read_links(path)
    assert str(error.value).endswith(f"Received: {path}")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: .* Received: "):
        planning.read_links(tmp_path / "none.json")
