"""One task of `benchmarks/pipeline.py` with `torch.distributed.pipelining` over gloo, or alone.

Runs in a Python of its own, which has PyTorch and needs NumPy beside it.
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import pipelining

from lab import meter
from lab.pipeline_work import WORKS


def make_model(widths):
    layers = []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return layers[:-1]


def main():
    given = json.loads(sys.argv[1])
    work, rank, stages = WORKS[given["work"]], given["rank"], len(given["jobs"])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers, loss_of = make_model(work.widths), torch.nn.CrossEntropyLoss()
    x, y = map(torch.from_numpy, work.batch())
    if given["method"] == "torch":
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def step():
            loss_of(model(x), y).backward()

    else:
        dist.init_process_group(
            "gloo", f"tcp://{given['addresses'][0]}", rank=rank, world_size=stages
        )
        cuts = [0, *given["cuts"], len(work.widths) - 1]
        # A linear layer and its ReLU.
        mine = torch.nn.Sequential(*layers[2 * cuts[rank] : 2 * cuts[rank + 1]])
        optimizer = torch.optim.SGD(mine.parameters(), 0.01)
        stage = pipelining.PipelineStage(mine, rank, stages, torch.device("cpu"))
        kinds = {"torch gpipe": pipelining.ScheduleGPipe, "torch 1f1b": pipelining.Schedule1F1B}
        pipe = kinds[given["method"]](stage, given["microbatches"], loss_fn=loss_of)

        def step():
            if rank == 0:
                pipe.step(x)
            elif rank == stages - 1:
                pipe.step(target=y)
            else:
                pipe.step()

    leader = meter.Leader(given["jobs"], [0]) if rank == 0 else None
    window, found, last, before = given["window"], {"times": []}, 0.0, None
    for number in range(1, given["warmup"] + given["windows"] * window + 1):
        optimizer.zero_grad()
        step()
        optimizer.step()
        if leader is None or number % window:
            continue
        now = time.perf_counter()
        if number > given["warmup"]:
            found["times"].append(1000 * (now - last) / window)
        elif number == given["warmup"]:
            before = leader.now()
        last = now
    if leader is not None:
        after, count = leader.now(), given["windows"] * window
        for key in ("sent", "received"):
            pairs = zip(before[key], after[key])
            found[key] = [round((b - a) / count) for a, b in pairs]
        print("\n" + meter.RESULT + json.dumps(found), flush=True)
        leader.say_done()


if __name__ == "__main__":
    main()
