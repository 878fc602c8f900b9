"""What the tasks of `hybrid.py` have in common, whichever library they train with."""

import argparse

import numpy as np

IDS, DIM, HIDDEN, CLASSES = 26, 32, 64, 1000
RATE = 0.05
BATCHES = 16  # They are repeated.
_EXPONENT = 1.1


def parse(description):
    """Parses the arguments that `hybrid.py` gives to a task."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--library", required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--rank", type=int, required=True, help="of this host")
    parser.add_argument("--tasks", nargs="+", required=True, help="job=address, by rank")
    parser.add_argument("--table_size", type=int, required=True)
    parser.add_argument("--ids", type=int, required=True, help="rows of the table that are used")
    parser.add_argument("--batch_size", type=int, required=True, help="of one worker")
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="that are measured")
    parser.add_argument("--window", type=int, required=True, help="steps that are timed together")
    return parser.parse_args()


def addresses(args, job):
    """Addresses of the tasks of one job."""
    return [task.partition("=")[2] for task in args.tasks if task.startswith(job + "=")]


def batches(args, examples):
    """Batches of so many examples: ids of shape `(BATCHES, examples, IDS)`, and labels.

    Ids follow Zipf's law. The frequent ones lie anywhere in the table, as after hashing.
    """
    rng = np.random.default_rng(0)
    weight = 1 / np.arange(1, args.ids + 1) ** _EXPONENT
    shape = (BATCHES, examples, IDS)
    ids = rng.permutation(args.ids)[rng.choice(args.ids, shape, p=weight / weight.sum())]
    return ids.astype(np.int64), rng.integers(0, CLASSES, shape[:2])
