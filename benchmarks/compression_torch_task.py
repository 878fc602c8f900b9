"""One worker of `compression.py` or `updates.py` with PyTorch: trains and prints what steps cost.

Runs in a Python of its own, which has PyTorch and needs nothing else.
"""

import contextlib
import json
import os
import statistics
import time

import netlab
import torch
import torch.distributed as dist
from compression_arguments import WIDTHS, parse
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging import averagers


def make_model():
    layers = []
    for inputs, outputs in zip(WIDTHS, WIDTHS[1:]):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def add_hook(model, method):
    if method == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method == "bf16":
        # DDP refuses this hook by its name without CUDA, but gloo can add bfloat16.
        model.register_comm_hook(
            None, lambda s, bucket: default_hooks.bf16_compress_hook(s, bucket)
        )
    elif method.startswith("powersgd:"):
        rank = int(method.split(":")[1])
        # Compresses as soon as it can: by default it would wait for 1000 steps.
        state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def main():
    args = parse(__doc__.splitlines()[0])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{args.addresses[0]}",
        rank=args.rank,
        world_size=len(args.addresses),
    )
    torch.manual_seed(1)
    # With several buckets, PowerSGD's later messages may cross under gloo, which then aborts.
    bucket = 25 if args.method.startswith("powersgd") else None
    model = torch.nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=bucket)
    add_hook(model, args.method)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    method, _, every = args.method.partition(":")
    accumulated = int(every) if method == "accumulate" else 1
    averager = None
    if method == "local_sgd":
        averager = averagers.PeriodicModelAverager(period=int(every))
    loss_of = torch.nn.CrossEntropyLoss()
    rows = 4096
    x, y = torch.randn(rows, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (rows,))
    stamps, totals = [], []
    for step in range(args.warmup + args.steps):
        first = (
            (step * len(args.addresses) + args.rank) * args.batch_size % (rows - args.batch_size)
        )
        batch = slice(first, first + args.batch_size)
        last = (step + 1) % accumulated == 0
        silent = method in ("alone", "local_sgd") or not last
        with model.no_sync() if silent else contextlib.nullcontext():
            loss = loss_of(model(x[batch]), y[batch])
            (loss / accumulated).backward()
        if last:
            optimizer.step()
        if averager is not None:
            averager.average_parameters(model.parameters())
        if last:
            optimizer.zero_grad()
        value = loss.item()
        if step >= args.warmup - 1:
            stamps.append(time.perf_counter())
        if step in (args.warmup - 1, args.warmup + args.steps - 1):
            sent = netlab.sent_bytes(os.environ["NETLAB_COUNTERS"], args.rank)
            totals.append((sent, time.process_time() * 1000))
    times = [round(1000 * (b - a), 3) for a, b in zip(stamps, stamps[1:])]
    results = {
        "times": times,
        "median": statistics.median(times),
        "sent": (totals[1][0] - totals[0][0]) / args.steps,
        "processor": (totals[1][1] - totals[0][1]) / args.steps,
        "loss": value,
    }
    print("result: " + json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
