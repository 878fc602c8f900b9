"""Which lines of a task's output are left to its log file."""

import pytest

from keras_psplus.cluster import console
from tests.support.tables import for_each

STARTING = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795460916.566899   25504 port.cc:153] oneDNN custom operations are on.
I0000 00:00:1795460916.567327   25504 cudart_stub.cc:31] Could not find cuda drivers on your machine
I0000 00:00:1795460916.686492   25504 cpu_feature_guard.cc:227] This TensorFlow binary is optimized
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the
E0000 00:00:1795460922.460301   25504 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA
2024-11-23 18:58:38.123456: E external/xla/cuda_fft.cc:477] Unable to register cuFFT factory: Att
2024-11-23 18:58:38.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.
I0000 00:00:1795460922.564498   26093 coordination_service.cc:505] Example stragglers:
/job:worker/replica:0/task:0
I0000 00:00:1795461346.675355   14557 eager_service_impl.cc:355] SessionOptions: goo.gle/debugproto
device_count {
  key: "CPU"
  value: 1
}
allow_soft_placement: true
experimental {
  collective_group_leader: "/job:ps/replica:0/task:0"
}

E0000 00:00:1795460925.975925   26102 ring_alg.cc:291] Aborting RingGather with UNAVAILABLE: Socket
Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling
:UNKNOWN:Error received from peer  {grpc_message:"Socket closed", grpc_status:14}
W0000 00:00:1795460925.979953   26324 local_rendezvous.cc:412] Local rendezvous is aborting with
The error could be from a previous operation. Restart your program to reset.
\t [[{{function_node __inference_one_step_on_data_567}}{{node CollectiveGatherV2}}]]
\t [[sgd/concat/_6]]
"""
SHOWN = """\
Epoch 1/3
keras_psplus: data over 2 worker(s)
E0000 00:00:1795460922.460301   25504 gpu_device.cc:52] failed to allocate 3 GiB
F0000 00:00:1795460922.460301   25504 tensor.cc:52] Check failed: dtype() == expected_dtype
Additional GRPC error information from remote target is what my script says

value: 3
WARNING:tensorflow:5 out of the last 5 calls triggered tf.function retracing
UserWarning: something
"""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(console, "_GPU_DRIVER", str(tmp_path / "driver"))


def test_what_tensorflow_says_of_itself():
    is_noise = console.NoiseFilter().is_noise
    assert [line for line in STARTING.splitlines() if not is_noise(line)] == []


def test_everything_else_is_shown():
    # After a line of noise, whose second line might follow.
    is_noise = console.NoiseFilter().is_noise
    assert is_noise(STARTING.splitlines()[1])
    assert [line for line in SHOWN.splitlines() if is_noise(line)] == []


def test_errors_of_cuda_where_there_is_a_gpu(tmp_path):
    (tmp_path / "driver").touch()
    (line,) = [line for line in STARTING.splitlines() if "cuInit" in line]
    assert not console.NoiseFilter().is_noise(line)


@for_each(
    "before, line",
    [
        (
            "\r 1/10 \x1b[32m━\x1b[0m - loss: 1.7163e-04",
            "E0000 00:00:1.9   2 ring_alg.cc:291] x",
        ),
        ("\r 1/10 ━ 1s\b\b\b\b", "keras_psplus: worker-0 has waited"),
        ("no newline", "2024-11-23 18:58:38.123456: W tensorflow/core/port.cc:153] x"),
    ],
)
def test_lines_within_lines(before, line):
    assert console.log_line_in(before + line) == len(before)
    assert console.log_line_in(line) is None


def test_a_line_that_speaks_of_the_library_is_one():
    assert console.log_line_in("see keras_psplus: the manual") is None
