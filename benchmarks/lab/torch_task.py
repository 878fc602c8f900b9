"""One task with PyTorch: alone, or under DDP or FSDP2 with gloo.

Runs in a Python of its own, which has PyTorch and needs NumPy beside it.
"""

import contextlib
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer

from lab.meter import Meter
from lab.task import Task


class Block(torch.nn.Module):
    """Attention and a small perceptron, as in the lab's Keras model."""

    def __init__(self, work):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(work.dim, work.heads, batch_first=True)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(work.dim, 1e-3) for _ in range(2))
        self.hidden = torch.nn.Linear(work.dim, work.hidden)
        self.output = torch.nn.Linear(work.hidden, work.dim)

    def forward(self, x):
        x = self.norms[0](x + self.attention(x, x, x, need_weights=False)[0])
        return self.norms[1](x + self.output(torch.relu(self.hidden(x))))


class Mean(torch.nn.Module):
    """Mean over the words."""

    def forward(self, x):
        return x.mean(1)


def make_model(work):
    if hasattr(work, "blocks"):
        blocks = [Block(work) for _ in range(work.blocks)]
        table = torch.nn.Embedding(work.rows, work.dim)
        output = torch.nn.Linear(work.dim, work.classes)
        return torch.nn.Sequential(table, *blocks, Mean(), output)
    if hasattr(work, "rows"):
        table = [torch.nn.EmbeddingBag(work.rows, work.dim, mode="sum", sparse=True)]
        widths = (work.dim, *work.widths)
    else:
        table, widths = [], work.widths
    layers = []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*table, *layers[:-1])


def distribute(model, name):
    """The model in shares, or under DDP with the hook that the method's name says."""
    if name == "fsdp":
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        return fully_shard(model)
    # With several buckets, PowerSGD's later messages may cross under gloo, which then aborts.
    bucket = 25 if "powersgd" in name else None
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket)
    if name == "ddp_fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "ddp_bf16":
        # DDP refuses this hook by its name without CUDA, but gloo can add bfloat16.
        model.register_comm_hook(
            None, lambda s, bucket: default_hooks.bf16_compress_hook(s, bucket)
        )
    elif "powersgd" in name:
        # Compresses as soon as it can: by default it would wait for 1000 steps.
        state = powerSGD_hook.PowerSGDState(None, _number(name), start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif "racks" in name:
        # Gradients are summed inside the rack at every step, weights averaged over all at some.
        state = post_localSGD_hook.PostLocalSGDState(None, _own_rack(), start_localSGD_iter=0)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return model


def _own_rack():
    """The group of the tasks in this one's rack; each task makes all of them."""
    racks = json.loads(os.environ["LAB_RACKS"])
    ranks = [[i for i, rack in enumerate(racks) if rack == one] for one in sorted(set(racks))]
    return dist.new_subgroups_by_enumeration(ranks)[0]


def train(task, work, plan, windows):
    """Trains for so many windows."""
    torch.manual_seed(1)
    model = make_model(work)
    if task.path != "alone":
        model = distribute(model, task.name)
    if "compile" in task.name:
        model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), work.learning_rate)
    local, in_racks = "local_sgd" in task.name, "racks" in task.name
    if local:
        averager = averagers.PeriodicModelAverager(period=_number(task.name))
        optimizer = PostLocalSGDOptimizer(optimizer, averager)
    accumulated = _number(task.name) if "accumulate" in task.name else 1
    loss_of = torch.nn.CrossEntropyLoss()
    inputs, labels = map(torch.from_numpy, work.batches(task.workers))
    own = slice(task.rank * work.batch_size, (task.rank + 1) * work.batch_size)
    meter = Meter(task.leader, task.rank, plan)
    for step in range(1, windows * plan["window"] + 1):
        batch = step % len(inputs)
        last = step % accumulated == 0
        silent = task.path != "alone" and (local and not in_racks or not last)
        with model.no_sync() if silent else contextlib.nullcontext():
            loss = loss_of(model(inputs[batch, own]), labels[batch, own])
            (loss / accumulated).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        loss.item()
        if step % plan["window"] == 0:
            meter.window_ended()


def _number(name):
    return int(name.rpartition("_")[2])


def main():
    task = Task()
    torch.set_num_threads(1)
    if task.path != "alone":
        method = f"tcp://{task.addresses[0]}"
        dist.init_process_group("gloo", method, rank=task.rank, world_size=task.workers)
    for work, plan, windows in task.works():
        train(task, work, plan, windows)
    if task.path != "alone":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
