"""`PipelineStrategy`: a model in stages, each on another worker or device."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_psplus import activation, catalogue, compression
from keras_psplus.arguments import flag, seconds, whole_number
from keras_psplus.cluster import config, preflight, serving
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.discovery import find
from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.cluster.process import tuning
from keras_psplus.cluster.serving import ServerLease
from keras_psplus.communication import Communication
from keras_psplus.compression import Compressor, methods
from keras_psplus.core import live, plan
from keras_psplus.core.jobs import failure
from keras_psplus.core.strategy_engine import StrategyBase
from keras_psplus.pipeline import schedule
from keras_psplus.pipeline.context import PipelineContext, StageTimes
from keras_psplus.pipeline.engine import PipelineEngine, StallProbe, Watch
from keras_psplus.pipeline.replicas import Copies
from keras_psplus.pipeline.splitter import Splitter, Variables
from keras_psplus.pipeline.stages import PipelineExtended, Stages
from keras_psplus.pipeline.traffic import PipelineTraffic


def read_task() -> config.TaskConfig | None:
    """Reads `TF_CONFIG`; None if there is none."""
    task = find.find_task_config()
    if task is None:
        return None
    find.refuse_evaluator("PipelineStrategy", task)
    for job in ("chief", "worker"):
        if job not in task.cluster:
            raise config.ClusterConfigError(
                f"PipelineStrategy needs at least one `{job}` task: a chief that runs the script, "
                "and one worker for each stage, as `keras-psplus run --workers 2 --strategy "
                f"pipeline` starts them. Received: {task.describe()}"
            )
    if "ps" in task.cluster:
        raise config.ClusterConfigError(
            "PipelineStrategy has no parameter servers: each stage's variables are on its worker. "
            f"Leave `ps` out of TF_CONFIG (`--ps 0`). Received: {task.describe()}"
        )
    return task


def local_devices() -> list[str]:
    """Names of this process's GPUs or CPU devices; of a plan, its CPU repeated."""
    request = plan.read()
    if request is not None and request.stages is not None:
        return ["/job:localhost/replica:0/task:0/device:CPU:0"] * request.stages
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    job = "/job:localhost/replica:0/task:0"
    return [
        f"{job}/device:{tf.DeviceSpec.from_string(device.name).device_type}:{i}"
        for i, device in enumerate(devices)
    ]


def devices_of_workers(count: int) -> list[str]:
    names = {device.name for device in tf.config.list_logical_devices()}
    workers = [f"/job:worker/replica:0/task:{i}/device:" for i in range(count)]
    return [f"{one}GPU:0" if f"{one}GPU:0" in names else f"{one}CPU:0" for one in workers]


# Checks of `PipelineStrategy`'s own arguments.


_FOR_ACTIVATIONS = (
    'None, "bf16", "fp16", "int8", `Cast`, `Int8`, or a compressor of your own with '
    "`supports_values = True`"
)

_FOR_GRADIENTS = (
    'None, "bf16", "fp16", `Cast` without `error_feedback`, or a dict from patterns of variables\' '
    "paths to these"
)


def check_stages(stages: Any) -> list[list[str]] | None:
    """Returns the patterns of each stage's layers; None for `"auto"` and `"flops"`."""
    if isinstance(stages, str) and stages in ("auto", "flops"):
        return None
    is_list = isinstance(stages, (list, tuple)) and len(stages) > 0
    lists = [[one] if isinstance(one, str) else one for one in stages] if is_list else []
    fits = is_list and all(
        isinstance(one, (list, tuple)) and one and all(isinstance(p, str) and p for p in one)
        for one in lists
    )
    if not fits:
        raise ValueError(
            '`stages` must be "auto", "flops", or a list with a list of patterns of layer names '
            'for each stage, such as [["embedding", "block_0*"], ["block_1*", "head"]]. '
            f"Received: {stages!r}"
        )
    return [list(one) for one in lists]


def check_count(patterns: list[list[str]] | None, count: int, pipelines: int = 1) -> None:
    if count % pipelines:
        few, many = count // pipelines * pipelines, -(-count // pipelines) * pipelines
        fitting = f"{many} workers" if few == 0 else f"{few} or {many} workers"
        raise ValueError(
            f"{count} workers or devices cannot be divided over {pipelines} pipelines, each of "
            f"which has as many stages: start {fitting}, or pass another `pipelines`. "
            f"Received: pipelines={pipelines}"
        )
    if patterns is not None and len(patterns) * pipelines != count:
        of_each = f" of each of the {pipelines} pipelines" if pipelines > 1 else ""
        raise ValueError(
            f"`stages` describes {len(patterns)} stages, and there are {count} workers or devices: "
            f"one is needed for each stage{of_each}. Received: stages={patterns}"
        )


def check_schedule(given: Any, pipelines: int) -> str:
    if not isinstance(given, str) or given not in schedule.NAMES:
        names = ", ".join(f'"{name}"' for name in schedule.NAMES)
        raise ValueError(f"`schedule` must be one of {names}. Received: schedule={given!r}")
    if given == schedule.PIPEDREAM and pipelines > 1:
        raise ValueError(
            '`schedule="pipedream"` has one pipeline, as the weights of two batches that are under '
            'way differ. Pass `schedule="1f1b"` for several pipelines. '
            f"Received: schedule={given!r}, pipelines={pipelines}"
        )
    return given


def check_gradient_compression(given: Any, pipelines: int) -> compression.Compressor | None:
    compressor = compression.get(given, allowed=_FOR_GRADIENTS)
    if compressor is not None and pipelines == 1:
        raise ValueError(
            "`compression` is for gradients that pipelines send each other, and there is one "
            "pipeline. Pass `pipelines=2` or more, or `activation_compression` for what stages "
            f"send each other. Received: compression={given!r}, pipelines=1"
        )
    for one in methods.each(compressor):
        if not isinstance(one, compression.Cast) or one.error_feedback:
            raise ValueError(
                "`compression` casts the gradients that pipelines send each other, and keeps no "
                f"residuals: it must be {_FOR_GRADIENTS}. Received: compression={one!r}"
            )
    return compressor


def check_compression(given: Any) -> compression.Compressor | None:
    compressor = compression.get(given, "activation_compression", _FOR_ACTIVATIONS)
    if compressor is not None and not getattr(compressor, "supports_values", False):
        raise ValueError(
            "`activation_compression` must keep every element of an activation nearly as it is: "
            f"{_FOR_ACTIVATIONS}. Received: activation_compression={given!r}"
        )
    return compressor


class PipelineStrategy(StrategyBase, tf.distribute.Strategy):
    """Trains a model in stages, for `model.fit` of Keras 3.

    One script in every task of a cluster with a `chief` and one `worker` for each stage (of each
    pipeline, where there are several). In
    `worker` tasks the constructor does not return: it serves until the chief has ended, and then
    ends the process. The chief runs the rest of the script. Worker `k` has the variables and
    optimizer slots of stage `k` and computes with them; activations and their gradients go from
    worker to worker. Each batch is cut into micro-batches, so that all stages work at the same
    time. With `schedule="gpipe"` and `"1f1b"`, training equals one process on the same batches,
    but for what layers compute over the rows of a batch: BatchNormalization takes the statistics
    of each micro-batch.

    Without `TF_CONFIG`, the GPUs of this process are the workers, or its logical CPU devices.

    Args:
        microbatches: Number of micro-batches of a batch that go through each pipeline, at least 1.
            A batch of fewer rows has as many micro-batches as rows. A stage waits for
            `(stages - 1) / (microbatches + stages - 1)` of the time.
        stages: How layers become stages: `"auto"` measures them for some seconds, and cuts them,
            in the order of their calls, so that the slowest stage takes as short as can be;
            `"flops"` counts floating-point operations instead, by which every run is cut alike; or
            a list with a list of patterns of layers' names for each stage. Layers that are made in
            a context of `keras_psplus.stage(k)` are on stage `k`; then those before and after them
            that are not belong to the same stage as the layer before.
        pipelines: Number of pipelines. Each has all stages, on workers of its own, and trains on
            its part of each batch. The number of workers is that of stages times that of
            pipelines: worker `i` has the stage `i % stages` of pipeline `i // stages`.
        schedule: `"1f1b"`, by which stage `k` keeps the activations of `stages - k` micro-batches;
            or `"gpipe"`, all micro-batches forward and then all backward. Both give the same
            results. The first needs a loss of Keras that is a mean over independent rows, and
            Keras's own `train_step` and `compute_loss`; other models, and those with masks at their
            outputs, are trained by the second. `"pipedream"`: two batches are under way at the same
            time, so that no stage waits for the end of a batch; the gradients of a batch are those
            by the weights from before the last update. It is PipeDream-2BW, with the actions of
            `"1f1b"`.
        recompute: Whether each stage computes its activations once more for its gradients. In
            between, it keeps what it was sent. A step takes about a third longer.
        compression: How gradients go from pipeline to pipeline: `"bf16"`, `"fp16"`, a
            `compression.Cast` without error feedback, or a dict of these by variable; None to send
            them as they are. They go without a loss scale: less than 6e-8 is 0 in `"fp16"`.
        activation_compression: How activations and their gradients go from stage to stage:
            `"bf16"`, `"fp16"`, `"int8"`, or a compressor whose `supports_values` is True; None to
            send them as they are. It loses precision. Gradients go with a loss scale: beside a
            dynamic one, which does not see that `"fp16"` ends at 65504, take `"bf16"`.
        startup_timeout: Seconds to wait for the other tasks to start.
        heartbeat_timeout: Seconds for which a worker may not answer before the job is ended.
        stall_warning: Seconds that a step may take until one line says which one, and what it
            waits for; None for no such line.

    Attributes:
        plan: The `keras_psplus.pipeline.Plan` of the model that was split last, or None.

    Raises:
        ValueError: If an argument is out of range.
        keras_psplus.cluster.ClusterConfigError: If `TF_CONFIG` is wrong or has no worker, or if it
            has ps tasks.
        keras_psplus.cluster.ClusterStartupError: If a task does not come up in time, or serves
            another chief.

    Example:

    ```python
    strategy = keras_psplus.PipelineStrategy(microbatches=8)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(512) for _ in range(8)])
        model.compile(optimizer="adam", loss="mse")
    model.fit(dataset, epochs=3)
    ```

    References: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", NeurIPS 2019; Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
    Training" (PipeDream-2BW), ICML 2021.
    """

    def __init__(
        self,
        microbatches: int = 4,
        stages: Any = "auto",
        *,
        pipelines: int = 1,
        schedule: str = "1f1b",
        recompute: bool = False,
        compression: Any = None,
        activation_compression: Any = None,
        startup_timeout: float = 300.0,
        heartbeat_timeout: float = 20.0,
        stall_warning: float | None = 60.0,
    ) -> None:
        activation.activate()
        microbatches, schedule = plan.override(microbatches, schedule)
        self._microbatches = whole_number("microbatches", microbatches, 1)
        pipelines = whole_number("pipelines", pipelines, 1)
        patterns = check_stages(stages)
        self._schedule = check_schedule(schedule, pipelines)
        if pipelines > 1:
            (compression,) = catalogue.fill(type(self).__name__, compression=compression)
        else:
            catalogue.fill(type(self).__name__)
        self._recompute = flag("recompute", recompute)
        self._compression = check_gradient_compression(compression, pipelines)
        self._activation_compression = check_compression(activation_compression)
        seconds("startup_timeout", startup_timeout)
        seconds("heartbeat_timeout", heartbeat_timeout)
        stalls.check_stall_warning(stall_warning)
        self._task = read_task()
        self._chief: serving.ShutdownNotifier | None = None
        if self._task is None:
            devices, host = local_devices(), "/CPU:0"
            check_count(patterns, len(devices), pipelines)
        else:
            task = self._task
            check_count(patterns, len(task.cluster["worker"]), pipelines)
            if task.task_type == "worker":
                serving.end_process_after(lambda: serving.serve(task, startup_timeout))
            tuning.tune()
            tuning.hide_gpus()
            preflight.wait_for_cluster(task, job_types=("chief", "worker"), timeout=startup_timeout)
            devices, host = self._connect(task)
        self.plan = None
        self._options = {
            "microbatches": microbatches,
            "schedule": schedule,
            "pipelines": pipelines,
            "recompute": recompute,
            "compression": compression,
            "activation_compression": activation_compression,
        }
        self._stages = made = Stages(devices, pipelines)
        copies = Copies(self, made)
        variables = Variables(self, made, copies)
        splitter = Splitter(made, variables, patterns, measures=stages == "auto")
        traffic = PipelineTraffic(host, made, copies)
        self._progress = Progress(leads=True)
        times = StageTimes(self._progress, made, host, measures=self._task is not None)
        context = PipelineContext(made, splitter, variables, copies, traffic, times)
        self._engine = PipelineEngine(self, context)
        self._communication = Communication()
        # The time that a step waits is not measured.
        self._communication.add_source(traffic.traffic, lambda: 0.0)
        super().__init__(PipelineExtended(self, made, host, copies.note_changed))
        if self._task is not None:
            Watch(self, heartbeat_timeout)
        stalls.Inspector(stall_warning, StallProbe(self).look)
        live.note(self, in_cluster=self._task is not None)

    def _connect(self, task: TaskConfig) -> tuple[list[str], str]:
        spec = {job: list(tasks) for job, tasks in task.cluster.items()}
        ServerLease(spec, task).claim_all()
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(spec), job_name="chief", task_index=0, protocol="grpc"
        )
        failure.install_exit_hook()
        self._chief = serving.ShutdownNotifier(
            {f"worker-{i}": address for i, address in enumerate(spec["worker"])}
        )
        return devices_of_workers(len(spec["worker"])), "/job:chief/replica:0/task:0/device:CPU:0"

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self._stages.devices)

    @property
    def pipelines(self) -> int:
        """Number of pipelines."""
        return self._stages.pipelines

    @property
    def microbatches(self) -> int:
        """Number of micro-batches of a batch that go through each pipeline."""
        return self._microbatches

    @property
    def schedule(self) -> str:
        """Name of the schedule."""
        return self._schedule

    @property
    def compression(self) -> Compressor | None:
        """Compressor of gradients between pipelines, or None."""
        return self._compression

    @property
    def recompute(self) -> bool:
        """Whether stages compute their activations once more for their gradients."""
        return self._recompute

    @property
    def activation_compression(self) -> Compressor | None:
        """Compressor of activations and their gradients between stages, or None."""
        return self._activation_compression

    @property
    def updates(self) -> None:
        """None: all stages step at each batch."""
        return None
