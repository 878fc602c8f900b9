"""What the workers of `compression.py` have in common, whichever library they train with."""

import argparse

WIDTHS = (784, 1600, 1600, 700, 10)  # 4.95 million parameters


def parse(description):
    """Parses the arguments that `compression.py` gives to a worker."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--addresses", nargs="+", required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--batch_size", type=int, required=True, help="of one worker")
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--bucket_bytes", type=float, required=True)
    return parser.parse_args()
