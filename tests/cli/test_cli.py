import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import tensorflow as tf

import keras_psplus
from keras_psplus import catalogue, versions
from keras_psplus.cli import bench, doctor, main, run
from keras_psplus.cli.flags import show_failure
from keras_psplus.cluster.launcher.task_ends import ClusterResult
from keras_psplus.cluster.ports import free_ports
from keras_psplus.cluster.process.signals import GRACE_VARIABLE


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("KERAS_PSPLUS_STRATEGY", raising=False)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import sys\nprint('args', sys.argv[1:])\n")
    return str(path)


def dry_run(capsys, *argv):
    """Runs `run`; returns for each task its environment variables and command."""
    assert main.main(["run", *argv]) == 0
    tasks = {}
    lines = capsys.readouterr().out.splitlines()
    for comment, command in zip(lines[::2], lines[1::2], strict=True):
        words = shlex.split(command)
        first = next(number for number, word in enumerate(words) if "python" in word.split("=")[0])
        variables = dict(word.split("=", 1) for word in words[:first])
        tasks[comment.split()[1]] = (variables, words[first:])
    return tasks


def test_help(capsys):
    assert main.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("run", "serve", "doctor", "bench"))
    for command in ("run", "serve", "doctor"):
        assert main.main([command, "--help"]) == 0
        assert f"usage: keras-psplus {command}" in capsys.readouterr().out


def test_run_help_explains_every_flag(capsys):
    main.main(["run", "-h"])
    out = capsys.readouterr().out
    for flag in ("workers", "ps", "chief", "strategy", "log_dir", "timeout", "dry_run", "hosts"):
        assert flag in out
    assert max(map(len, out.splitlines())) <= 100
    # The six most used come first.
    flags = re.findall(r"^  --(?:\[no\])?(\w+)", out, re.M)
    assert set(flags[:6]) == {"workers", "ps", "strategy", "hosts", "max_restarts", "log_dir"}
    assert "\nfailures and time:\n" in out


def test_run_help_names_entries_that_there_are(capsys):
    main.main(["run", "-h"])
    named = re.findall(r"--strategy (\w+)", capsys.readouterr().out)
    assert len(named) > 1 and set(named) <= set(catalogue.ENTRIES)


def test_run_lists_the_entries(capsys):
    assert main.main(["run", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    found = dict(line.split(maxsplit=1) for line in lines if not line.startswith(" "))
    assert list(found) == list(catalogue.ENTRIES)
    assert found["hybrid"].startswith("Large embeddings on parameter servers")


def test_what_the_strategy_is_made_with(capsys, script, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("def strategy(compression=None, updates=None):\n    pass\n")
    flags = ["--compression=powersgd:2", "--updates", "local_sgd:8", "--dry_run", script]
    for strategy in ("all_reduce", mine):
        (variables, _) = dry_run(capsys, f"--strategy={strategy}", *flags)["worker-1"]
        assert variables["KERAS_PSPLUS_COMPRESSION"] == "powersgd:2"
        assert variables["KERAS_PSPLUS_UPDATES"] == "local_sgd:8"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--ps 1 --strategy all_reduce", "leave out --ps, or take one of accumulated_parameter"),
        ("--ps 1 --strategy single", "has no use for parameter servers"),
        ("--strategy async_parameter_server", "server needs parameter servers: add --ps 1"),
        ("--strategy hybrid", "hybrid needs parameter servers: add --ps 1"),
        ("--ps 1 --nochief --strategy sync_parameter_server", "leave out --nochief"),
        ("--ps 1 --workers 0 --strategy sync_parameter_server", "needs a chief and workers"),
        ("--compression lzma", '--compression must be one of "bf16"'),
        ("--compression topk", "Received: --compression=topk"),
        ("--compression powrsgd:4", "Did you mean 'powersgd:4'? Received: --compression=powrsgd:4"),
        ("--updates locl_sgd:8", "Did you mean 'local_sgd:8'?"),
        ("--updates diloco", '--updates must be one of "accumulate:4"'),
        ("--updates diloco:x", "Received: --updates=diloco:x"),
        ("--strategy all_reduce_int8 --compression bf16", "take --strategy all_reduce, which"),
        ("--strategy diloco --updates diloco:100", "take --strategy all_reduce, which does not"),
        ("--strategy single --compression bf16", "single has no `compression`"),
        ("--strategy zero --compression bf16", "zero has state in shares, without `compression`"),
        (
            "--ps 1 --strategy async_parameter_server --updates diloco:9",
            "all_reduce without --ps",
        ),
        (
            "--ps 1 --strategy sync_parameter_server --updates accumulate:2",
            "need --strategy async_parameter_s",
        ),
        ("--ps 1 --strategy stale_sync_parameter_server --updates local_sgd:2", "takes no updates"),
        ("--ps 1 --strategy hybrid --updates local_sgd:2", "takes accumulate alone"),
        ("--timeout nan", "--timeout must be a finite number. Received: --timeout=nan"),
        ("--timeout inf", "Received: --timeout=inf"),
        ("--workers 70000", "one machine starts at most 1000 tasks. Received: --workers=70000"),
        ("--workers 3:1 --ps 1", "the second at least the first. Received: --workers=3:1"),
        ("--workers 0:1 --ps 1", "at least 1"),
        ("--workers 1: --ps 1", "as in 1:3. Received: --workers=1:"),
        ("--workers 1:2", "add --ps 1, or give --workers one number. Received: --workers=1:2"),
        ("--workers 1:2 --ps 1 --nochief", "Received: --workers=1:2, --ps=1, --nochief"),
        ("--workers 1:2 --ps 1 --strategy hybrid", "hybrid needs all of its workers"),
        ("--workers 1:1000 --ps 1", "at most 1000 tasks. Received: --workers=1:1000"),
        ("--hosts=", "--hosts needs a value. Received: --hosts=''"),
        ("--compression=", "--compression needs a value"),
        ("--strategy all_redcue", "Did you mean 'all_reduce'?"),
        ("--hosts a,b/c", "'b/c' cannot be used as a host: an address is host:port"),
        ("--hosts a,", "'' cannot be used as a host"),
        ("--hosts me@::1,b", "write an IPv6 host in brackets: [::1]:2222. Received: me@::1,b"),
        ("--hosts a,b --ps 1", "1 ps and a chief leave no host for a worker"),
        ("--hosts a,b --hostfile f", "name the same: leave out one"),
        ("--hostfile no_file", "the file of hosts cannot be read"),
        ("--hosts a,b --warm", "--warm starts tasks of this machine alone"),
        ("--ssh ssh", "--ssh goes with --hosts. Received: --ssh=ssh"),
        ("--hosts a,A", "worker-0 and worker-1 have the same address 'A:2222'"),
    ],
)
def test_flags_that_do_not_go_together(flags, message, capsys, script):
    assert main.main(["run", *flags.split(), script]) == 2
    error = capsys.readouterr().err
    assert message in error and "Received: " in error, error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "usage: keras-psplus COMMAND"),
        (["runn"], "no command 'runn'"),
        (["run"], "name the script"),
        (["run", "no_such.py"], "no script 'no_such.py'"),
        (["run", "--workrs", "2", "SCRIPT"], "Did you mean: --workers?"),
        (["run", "-n", "2", "SCRIPT"], "Did you mean: --workers? Received: -n"),
        (["run", "-np", "2", "SCRIPT"], "Did you mean: --workers?"),
        (["run", "--nproc_per_node=2", "SCRIPT"], "Did you mean: --workers?"),
        (["run", "-H", "a,b", "SCRIPT"], "Did you mean: --hosts?"),
        (["doctor", "-n", "2"], "no such flag. Received: -n"),
        (["run", "--workers", "two", "SCRIPT"], "workers"),
        (["run", "--workers", "-1", "SCRIPT"], "workers"),
        (["run", "--workers", "0", "SCRIPT"], "at least one worker"),
        (["run", "--strategy", "no_such", "SCRIPT"], "no entry 'no_such'"),
        (["run", "--hosts", "a,b", "--workers", "3", "SCRIPT"], "3 tasks"),
        (["run", "--max_restarts", "-1", "SCRIPT"], "Received: --max_restarts=-1"),
        (["run", "--grace", "-1", "SCRIPT"], "Received: --grace=-1"),
        (["run", "--grace", "soon", "SCRIPT"], "Received: --grace=soon"),
        (["exec", "--grace", "-1", "SCRIPT"], "Received: --grace=-1"),
        (["exec", "--grace", "nan", "SCRIPT"], "Received: --grace=nan"),
        (["add-worker"], "name one job"),
        (["add-worker", "1", "--hosts", "h1"], "by the process id of its launcher"),
        (["add-worker", "1", "2"], "Received: 1 2"),
        (["add-worker", "no job"], "Received: no job"),
        (["serve"], "serve needs a TF_CONFIG"),
        (["serve", "more"], "no arguments"),
        (["doctor", "more"], "no arguments"),
        (["doctor", "--hosts", "a,A"], "have the same address 'A:2222'"),
        (["doctor", "--hostfile", "no_file"], "the file of hosts cannot be read"),
        (["doctor", "--hosts", "a", "--ssh", "ssh '"], "--ssh is no command: No closing"),
        (["doctor", "--nope"], "nope"),
    ],
)
def test_usage_errors_exit_with_2(argv, message, capsys, script):
    argv = [script if word == "SCRIPT" else word for word in argv]
    assert main.main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err + captured.out


@pytest.mark.parametrize("flags", [[], ["--grace", "2.5"], ["--grace=0"]])
def test_exec_tells_the_script_its_grace(flags, monkeypatch, script):
    monkeypatch.setenv(GRACE_VARIABLE, "7")
    monkeypatch.setattr(os, "execv", lambda path, argv: None)
    main.main(["exec", *flags, script])
    given = flags[-1].partition("=")[2] or flags[-1] if flags else "7"
    assert os.environ[GRACE_VARIABLE] == given


def test_dry_run_prints_every_task(capsys, script, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("")
    flags = ["--workers", "2", "--ps=1", f"--strategy={mine}", "--dry-run"]
    tasks = dry_run(capsys, *flags, script, "--workers", "9", "--help")
    assert list(tasks) == ["chief-0", "worker-0", "worker-1", "ps-0"]
    clusters = set()
    for name, (variables, command) in tasks.items():
        config = json.loads(variables["TF_CONFIG"])
        clusters.add(json.dumps(config["cluster"]))
        assert name == f"{config['task']['type']}-{config['task']['index']}"
        assert variables["KERAS_PSPLUS_STRATEGY"] == str(mine)
        assert command == [sys.executable, script, "--workers", "9", "--help"]
    assert len(clusters) == 1


def test_layout_defaults(capsys, script):
    assert list(dry_run(capsys, "--dry_run", script)) == ["worker-0", "worker-1"]
    assert list(dry_run(capsys, "--dry_run", "--nochief", "--workers=1", "--ps=1", script)) == [
        "worker-0",
        "ps-0",
    ]
    assert list(dry_run(capsys, "--dry_run", "--chief", "--workers=1", script)) == [
        "chief-0",
        "worker-0",
    ]


def test_hosts_are_printed_by_a_dry_run(capsys, script):
    flags = ["--dry_run", "--hosts", "a,me@b:2299,c", "--ps", "1", script]
    tasks = dry_run(capsys, *flags)
    variables, command = tasks["worker-0"]
    assert json.loads(variables["TF_CONFIG"])["cluster"] == {
        "chief": ["a:2222"],
        "worker": ["b:2299"],
        "ps": ["c:2222"],
    }
    assert command == ["python", script]
    # One for all tasks, and another one for each job.
    tokens = {variables["KERAS_PSPLUS_JOB_TOKEN"] for variables, _ in tasks.values()}
    others = dry_run(capsys, *flags)
    tokens |= {variables["KERAS_PSPLUS_JOB_TOKEN"] for variables, _ in others.values()}
    assert len(tokens) == 2 and min(map(len, tokens)) == 32


def test_flags_behind_the_script_are_named(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    script = tmp_path / "own.py"
    script.write_text("print('ran')\n")
    said = "keras-psplus: --ps, --workers: behind the script, and so passed to it"
    argv = ["run", "--workers=1", str(script), "--workers", "2", "--ps=1", "--epochs"]
    assert main.main(argv) == 0
    assert said in capsys.readouterr().err
    script.write_text("# has flags --workers and --ps\n")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert main.main(argv) == 0
    text = capsys.readouterr().err
    assert "behind the script" not in text and "keras-psplus: KERAS_BACKEND=jax: " in text


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_run_without_streams(closed, script, tmp_path):
    command = f"{sys.executable} -OO -m keras_psplus run --workers=1 --log_dir={tmp_path} {script}"
    assert subprocess.run(["sh", "-c", f"{command} {closed}"], timeout=60).returncode == 0
    assert (tmp_path / "worker-0.log").read_text() == "args []\n"


def test_version(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"keras-psplus {keras_psplus.__version__}\n"


def test_run_passes_arguments_and_success(capsys, script, tmp_path):
    logs = tmp_path / "logs"
    assert main.main(["run", "--workers=2", f"--log_dir={logs}", script, "--x", "1"]) == 0
    out = capsys.readouterr().out
    assert "[worker-0] args ['--x', '1']" in out and "[worker-1] args ['--x', '1']" in out
    assert (logs / "worker-1.log").read_text() == "args ['--x', '1']\n"


def test_run_shows_the_first_failures_traceback_last(tmp_path, capfd):
    script = tmp_path / "fail.py"
    script.write_text(
        "import json, os, time\n"
        "index = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        "time.sleep(0.8 * (1 - index))\n"
        "try:\n    raise KeyError('first part')\n"
        "except KeyError:\n    pass\n"
        "raise ValueError(f'from {index}')\n"
    )
    assert main.main(["run", "--workers=2", f"--log_dir={tmp_path}", str(script)]) == 1
    err = capfd.readouterr().err
    assert err.rstrip().endswith("ValueError: from 1")
    assert "worker-1 failed first:\nTraceback" in err
    assert "worker-1: exit code 1, first to fail" in err and f"logs: {tmp_path}" in err


def failure_of(tmp_path, capsys, codes, **logs):
    """Shows the end of a job whose worker 0 has failed first; returns what is written."""
    paths = {name: tmp_path / name for name in codes}
    for name, path in paths.items():
        path.write_text(logs.get(name.replace("-", "_"), ""))
    show_failure(ClusterResult(codes, paths, first_failure="worker-0"), tmp_path, 0.0)
    return capsys.readouterr().err


def test_a_killed_tasks_own_last_lines_are_shown(tmp_path, capsys):
    noise = "2026-11-23 18:58:38.123456: I tensorflow/core/platform/port.cc:153] text\n" * 30
    log = "epoch 1 done\n" + noise
    said = failure_of(tmp_path, capsys, {"worker-0": -9}, worker_0=log)
    assert said.endswith("worker-0 failed first:\nepoch 1 done\n")
    # There may be nothing else.
    said = failure_of(tmp_path, capsys, {"worker-0": -9}, worker_0=noise)
    assert said.count("port.cc") == 20


def test_a_worker_whose_script_had_ended_is_named(tmp_path, capsys):
    lost = "Traceback (most recent call last)\nPeerLostError: worker-1 (h:1) stopped answering\n"
    for code, is_said in ((0, True), (1, False)):
        codes = {"worker-0": 1, "worker-1": code}
        said = failure_of(tmp_path, capsys, codes, worker_0=lost)
        assert ("worker-1: the script had ended there with exit code 0" in said) == is_said


def test_calls_of_other_libraries_are_named(tmp_path, capsys):
    script = tmp_path / "other.py"
    text = (
        "def main():\n"
        "    # tf.distribute.MirroredStrategy()\n"
        "    strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
        "    hvd.init()\n"
    )
    script.write_text(text + "    strategy = psp.strategy_from_env()\n")
    assert main.main(["run", "--workers=2", str(script)]) == 0
    err = capsys.readouterr().err
    assert f"{script}:3: tf.distribute.MultiWorkerMirroredStrategy(...) does not have" in err
    assert f"{script}:4: hvd.init(...)" in err and ":2:" not in err
    assert err.count("`strategy = keras_psplus.MultiWorkerMirroredStrategy()`") == 2
    # Each task would train alone, or fail within TensorFlow.
    script.write_text(f"import keras\n{text}")
    assert main.main(["run", "--workers=2", str(script)]) == 2
    assert f"{script}:4: tf.distribute.MultiWorkerMirroredStrategy(...)" in capsys.readouterr().err
    # One task, and Keras 2, do not.
    script.write_text(text)
    assert main.main(["run", "--workers=1", str(script)]) == 0
    script.write_text(f"# import tf_keras\n{text}")
    assert main.main(["run", "--workers=2", str(script)]) == 0
    assert "does not have" not in capsys.readouterr().err


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_run_ends_as_the_job_does_if_nobody_takes_its_output(full, tmp_path):
    script = tmp_path / "much.py"
    script.write_text("print('x' * 99_999)\nprint('y' * 99_999)\nraise ValueError('the cause')\n")
    command = [sys.executable, "-m", "keras_psplus", "run", "--workers=1", f"--log_dir={tmp_path}"]
    with open("/dev/full", "w") as device:
        files = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: device}
        ended = subprocess.run([*command, script], text=True, timeout=60, **files)
    assert ended.returncode == 1
    assert (tmp_path / "worker-0.log").read_text().endswith("ValueError: the cause\n")
    if full == "stdout":
        assert ended.stderr.count("cannot write to the standard output ([Errno 28]") == 1
        assert ended.stderr.endswith("ValueError: the cause\n")


def test_logs_that_cannot_be_written(script, capsys, tmp_path):
    assert main.main(["run", f"--log_dir={script}/logs", script]) == 2
    error = capsys.readouterr().err
    assert "logs cannot be written: [Errno 20]" in error and "with --log_dir" in error


def test_run_times_out(tmp_path, capfd):
    script = tmp_path / "sleep.py"
    script.write_text("import time\ntime.sleep(100)\n")
    argv = ["run", "--workers=1", "--timeout=0.7", f"--log_dir={tmp_path}", str(script)]
    assert main.main(argv) == 124
    assert "time-out of 0.7 s" in capfd.readouterr().err


def test_run_starts_a_failed_job_again(tmp_path, capfd):
    script = tmp_path / "twice.py"
    script.write_text(
        "import os, sys\n"
        "attempt = os.environ['KERAS_PSPLUS_RESTART']\n"
        "if attempt == '1':\n    raise ValueError(f'in attempt {attempt}')\n"
        "sys.exit(5)\n"
    )
    argv = ["run", "--workers=1", "--max_restarts=1", f"--log_dir={tmp_path}", str(script)]
    assert main.main(argv) == 1
    captured = capfd.readouterr()
    assert (
        "keras-psplus: worker-0 has failed (exit code 5); restart 1 of 1 begins in 1 s\n"
        in captured.out
    )
    assert "worker-0 has failed (exit code 1); no restart of 1 is left" in captured.out
    assert captured.err.rstrip().endswith("ValueError: in attempt 1")


def test_ctrl_c_ends_the_command(tmp_path):
    script = tmp_path / "sleep.py"
    script.write_text("import time\nprint('started', flush=True)\ntime.sleep(100)\n")
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "keras_psplus",
            "run",
            "--workers=2",
            "--max_restarts=3",
            f"--log_dir={tmp_path}",
            script,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        try:
            assert [command.stdout.readline().split()[1] for _ in range(2)] == ["started"] * 2
            command.send_signal(signal.SIGINT)
            assert command.wait(30) == 130
            assert "ended by signal 2" in command.stderr.read()
            assert "restart" not in command.stdout.read()
        finally:
            command.kill()


def test_the_launcher_does_not_import_tensorflow():
    modules = [
        "keras_psplus.catalogue",
        "keras_psplus.cli.run",
        "keras_psplus.cluster.config",
        "keras_psplus.cluster.ports",
        "keras_psplus.cluster.processes",
    ]
    # As a namespace package: whether `import keras_psplus` itself is quick is tested elsewhere.
    code = (
        "import importlib, sys, types\n"
        "package = types.ModuleType('keras_psplus')\n"
        f"package.__path__ = [{os.path.dirname(os.path.dirname(run.__file__))!r}]\n"
        "sys.modules['keras_psplus'] = package\n"
        f"[importlib.import_module(name) for name in {modules}]\n"
        "assert not {'tensorflow', 'keras'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_doctor_without_a_cluster(capfd, monkeypatch):
    from keras_psplus import native

    monkeypatch.setattr(native, "build", lambda: pytest.fail("nobody has asked for that"))
    monkeypatch.setattr(native, "is_built", lambda: False)
    lines = b"I0000 00:00:1.2 3 a.cc:1] of TensorFlow\nsomething else\n"
    devices = tf.config.list_physical_devices

    def list_devices():
        os.write(2, lines)
        return devices()

    monkeypatch.setattr(tf.config, "list_physical_devices", list_devices)
    assert main.main(["doctor"]) == 0
    out, err = capfd.readouterr()
    assert "of TensorFlow" not in out + err and "not compiled yet" in out
    assert out.index("TensorFlow says\n  something else") > out.index("trains alone")
    for text in (
        "python",
        "tensorflow",
        "keras",
        "numpy",
        "cores",
        "GiB free",
        "CPU:0",
        "C++ kernels",
    ):
        assert text in out
    assert "this process trains alone" in out and "No problem found." in out


def test_doctor_names_unreachable_tasks(capsys, monkeypatch):
    first, second = free_ports(2)
    config = {
        "cluster": {"worker": [f"127.0.0.1:{first}", f"127.0.0.1:{second}"]},
        "task": {"type": "worker", "index": 0},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_grpc_proxy", "")  # is set in the end
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert main.main(["doctor", "--nodevices", "--timeout=2"]) == 1
    out = capsys.readouterr().out
    assert "this process: port is free" in out
    assert "worker-1 cannot be reached: connection refused" in out
    assert "Slurm" in out and "77" in out and "Kubernetes" in out
    assert "http_proxy; tasks talk to each other without it" in out
    assert "1 problem(s)" in out


def test_doctor_shows_a_broken_tf_config(capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    assert main.main(["doctor", "--nodevices"]) == 1
    assert "not valid JSON" in capsys.readouterr().out


@pytest.mark.parametrize(
    "tf_config, message",
    [
        ("", "needs a cluster of at least two workers.* Received: TF_CONFIG="),
        ("{", "TF_CONFIG is not valid JSON"),
        (
            '{"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}, '
            '"task": {"type": "ps", "index": 0}}',
            "--links measures workers. Received: ps-0",
        ),
    ],
)
def test_doctor_measures_links_of_workers_only(tf_config, message, capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config)
    assert main.main(["doctor", "--links"]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_json_of_doctor_is_of_hooks_or_links(capsys):
    assert main.main(["doctor", "--json"]) == 2
    assert "goes with --hooks and --links. Received: --json" in capsys.readouterr().err


def test_doctor_refuses_other_backends(capsys, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert doctor.main(["--nodevices"]) == 1
    assert "KERAS_BACKEND=jax" in capsys.readouterr().out


def test_doctor_knows_nightly_builds(capsys, monkeypatch):
    found = {"keras-nightly": "3.17.0.dev2026", "tf-nightly": "2.21.0.dev2025", "numpy": "2.4"}

    def version(name):
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert doctor.main(["--nodevices"]) == 1
    out = capsys.readouterr().out
    assert "3.17.0.dev2026" in out and "2.21.0.dev2025" in out
    assert "not installed" not in out
    assert "1 problem(s)" in out and "This Keras is newer than keras_psplus" in out
    found.clear()
    monkeypatch.setattr(versions.importlib, "import_module", no_module)
    assert doctor.main(["--nodevices"]) == 1
    out = capsys.readouterr().out
    assert "keras_psplus needs TensorFlow" in out and "keras_psplus needs Keras" in out


def no_module(name):
    raise ModuleNotFoundError(name)


def test_doctor_says_what_does_not_fit(capsys, monkeypatch):
    def load():
        raise ImportError("keras_psplus does not fit this Keras")

    monkeypatch.setattr(doctor.keras_psplus, "_load", load)
    assert doctor.main([]) == 1
    assert "1. keras_psplus does not fit this Keras" in capsys.readouterr().out


def test_bench_runs_the_checkouts_script(tmp_path, capfd):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bench.py").write_text(
        "import sys\nprint(sys.argv[1:])\nsys.exit(5)\n"
    )
    assert bench.main(["--steps", "3"], checkout=tmp_path) == 5
    assert "['--steps', '3']" in capfd.readouterr().out


def test_bench_says_where_the_benchmarks_are(tmp_path, capsys):
    assert bench.main([], checkout=tmp_path) == 2
    assert "Get a checkout" in capsys.readouterr().err
    assert bench.main(["--help"], checkout=tmp_path) == 0
    assert "get a checkout" in capsys.readouterr().out
