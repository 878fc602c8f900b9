"""The lab as a whole: a few tiny launches, and emulated hosts where they can be made."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

import bench
import pytest
from lab import job, loopback, meter, names, wire

from tests.lab import netlab


def test_mistakes_are_said(tmp_path, capsys):
    for argv, message in [
        (["--rates", "fast"], "A rate is '100mbit'"),
        (["--workers", "0"], "at least 1"),
        (["--uplink", "1gbit"], "give --racks as well"),
        (["--racks", "2", "--uplink", "slow"], "A rate is '100mbit'"),
        (["--racks", "3", "--workers", "2"], "each rack needs a worker"),
        (["--list", "--only", "nothing_of_the_kind"], "No method fits"),
        (["--report", "--out", str(tmp_path / "none.json")], "no file of results"),
    ]:
        with pytest.raises(SystemExit):
            bench.main(argv)
        assert message in capsys.readouterr().err


def run_job(*codes, timeout=30):
    with loopback.Loopback(len(codes)) as lab:
        return job.run(lab, [[sys.executable, "-c", code] for code in codes], timeout, leader=0)


def test_the_task_that_failed_first_is_shown():
    waits = "import time; print('waiting', flush=True); time.sleep(60)"
    fails = "print('many words'); raise ValueError('the reason')"
    results, error = run_job(waits, fails)
    assert results == [] and "waiting" not in error
    assert "ValueError: the reason\ntask 1: exit code 1" in error
    # Even without an error, a leader that ends has not led to the end.
    assert run_job("print('bye')", waits)[1] == "bye\ntask 0: exit code 0"
    assert run_job(waits, "", timeout=1)[1].endswith("task 0: not done in 1 s")


def test_figures_before_a_failure_are_kept():
    results, error = run_job(f"print({meter.RESULT!r} + '[1, 2]'); raise SystemExit(7)")
    assert results == [[1, 2]] and error.endswith("exit code 7")


RECEIVES = """
import socket
server = socket.create_server(("", 2222))
print("up", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16): pass
"""
SENDS = """
import socket, sys
host, port = sys.argv[1].split(":")
socket.create_connection((host, int(port))).sendall(bytes(1_000_000))
"""


def send(lab, sender, receiver):
    """Has a host send another 1 MB."""
    argv = [sys.executable, "-c", RECEIVES]
    server = lab.start(receiver, argv, stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"up\n"
    client = lab.start(sender, [sys.executable, "-c", SENDS, lab.address(receiver)])
    assert client.wait(30) == server.wait(30) == 0


@pytest.fixture
def emulated_hosts():
    problem = netlab.why_not(rate=1e9)
    if problem is not None:
        pytest.skip(f"no emulated hosts here: {problem}")


def test_emulated_hosts_count_what_is_sent(emulated_hosts):
    with netlab.Lab(2) as lab:
        for rate in (1e9, 1e8, None, 1e9):  # also changed, taken off and set anew
            lab.set_rate(rate)
        send(lab, 1, 0)
        sent, _ = wire.traffic(lab.counters, lab.device(1))
        back, received = wire.traffic(lab.counters, lab.device(0))
        assert 1_000_000 < sent < 1_100_000 and back < 100_000
        assert 1_000_000 < received < 1_100_000
        assert lab.uplinks == []


SENDS_FOR_EVER = """
import socket
connection = socket.create_server(("", 2222)).accept()[0]
while True:
    connection.sendall(bytes(1 << 20))
"""
RECEIVES_FOR_EVER = """
import socket, sys, time
host, port = sys.argv[1].split(":")
while True:
    try:
        connection = socket.create_connection((host, int(port)))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
while connection.recv(1 << 20):
    pass
"""


@pytest.mark.extended
def test_a_busy_link_that_becomes_slow_goes_on(emulated_hosts):
    with netlab.Lab(2) as lab:
        lab.start(0, [sys.executable, "-c", SENDS_FOR_EVER])
        lab.start(1, [sys.executable, "-c", RECEIVES_FOR_EVER, lab.address(0)])

        def wait_for_more(what):
            begin, end = sent(), time.monotonic() + 30
            while sent() < begin + 1_000_000:
                assert time.monotonic() < end, what
                time.sleep(0.02)

        def sent():
            return wire.traffic(lab.counters, lab.device(0))[0]

        for round_number in range(8):
            for rate in (None, 1e9, 1e8):
                lab.set_rate(rate)
                wait_for_more(f"stuck at {rate} in round {round_number}")


def test_uplinks_count_what_leaves_a_rack(emulated_hosts):
    with netlab.Lab(5, racks=2, uplink=1e8) as lab:
        lab.set_rate(1e9)
        assert [lab.rack(rank) for rank in range(5)] == [0, 0, 0, 1, 1]

        def sent():
            return [wire.traffic(lab.counters, uplink)[1] for uplink in lab.uplinks]

        send(lab, 0, 2)
        assert max(sent()) < 100_000
        send(lab, 0, 4)
        first, second = sent()
        assert 1_000_000 < first < 1_200_000 and second < 100_000
        # What the others send comes over the same link.
        assert wire.traffic(lab.counters, lab.uplinks[1])[0] == pytest.approx(first, abs=50_000)


FINDS_ITSELF = "import socket; print(socket.gethostbyname(socket.gethostname()))"


def test_a_host_finds_itself_by_the_machine_s_name(emulated_hosts):
    before = pathlib.Path("/etc/hosts").read_text()
    with netlab.Lab(2) as lab:
        for rank in range(2):
            command = [sys.executable, "-c", FINDS_ITSELF]
            command = names.resolving(command, lab.address(rank))
            process = lab.start(rank, command, stdout=subprocess.PIPE)
            found, _ = process.communicate(timeout=30)
            assert found.decode().strip() == lab.address(rank).partition(":")[0]
    assert pathlib.Path("/etc/hosts").read_text() == before


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_keras_on_jax(tmp_path, emulated_hosts):
    python = os.environ.get("LAB_JAX") or (importlib.util.find_spec("jax") and sys.executable)
    if not python:
        pytest.skip("no JAX here: set LAB_JAX to a Python with `pip install jax keras`")
    out = tmp_path / "out.json"
    argv = ["--size=tiny", "--workers=2", "--rates=loopback", "--seconds=0.2", f"--out={out}"]
    bench.main([*argv, "--jax", python, "--only", "jax/*"])
    content = json.loads(out.read_text())
    assert " with keras 3." in content["versions"]["jax"]
    results = {(r["work"], r["method"]): r for r in content["results"]}
    assert set(results) == {(w, m) for w in ("dense", "sparse") for m in ("alone", "data_parallel")}
    assert not any("error" in result for result in results.values()), results
    # Gradients of 11 and of 66 kB, as the table's is sent whole; what is sent crosses one link.
    for work, least in (("dense", 11_000), ("sparse", 64_000)):
        assert results[work, "data_parallel"]["sent"]["worker"] > least
        assert results[work, "alone"]["sent"]["worker"] < 1_000


def test_rates():
    assert wire.parse_rate("100mbit") == 1e8 and wire.parse_rate("2.5gbit") == 2.5e9
    assert wire.parse_rate("loopback") is None
    with pytest.raises(ValueError, match="Received: '1gbps'"):
        wire.parse_rate("1gbps")
