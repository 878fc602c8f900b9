"""One worker of `hybrid.py` with PyTorch's DDP, which gathers the gradients of sparse embeddings.

Runs in a Python of its own, which has PyTorch and needs NumPy beside it.
"""

import json
import os

import torch
import torch.distributed as dist
from hybrid_arguments import BATCHES, CLASSES, DIM, HIDDEN, RATE, addresses, batches, parse
from hybrid_meter import Meter


def main():
    args = parse(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.EmbeddingBag(args.table_size, DIM, mode="sum", sparse=True),
        torch.nn.Linear(DIM, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, CLASSES),
    )
    workers = addresses(args, "worker")
    if len(workers) > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        method = f"tcp://{workers[0]}"
        dist.init_process_group("gloo", method, rank=args.rank, world_size=len(workers))
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    loss_of = torch.nn.CrossEntropyLoss()
    ids, labels = map(torch.from_numpy, batches(args, args.batch_size * len(workers)))
    own = slice(args.rank * args.batch_size, (args.rank + 1) * args.batch_size)
    meter = Meter(args) if args.rank == 0 else None
    for step in range(args.warmup + args.steps):
        optimizer.zero_grad()
        loss = loss_of(model(ids[step % BATCHES, own]), labels[step % BATCHES, own])
        loss.backward()
        optimizer.step()
        loss.item()
        if meter:
            meter.ended()
    if len(workers) > 1:
        dist.barrier()
        dist.destroy_process_group()
    print("result: " + json.dumps(meter and meter.results), flush=True)


if __name__ == "__main__":
    main()
