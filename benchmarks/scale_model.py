"""Tables for docs/scale.md: predictions of `keras-psplus plan` for 2 to 1,024 workers.

    python benchmarks/scale_model.py

Nothing is measured here. The work is the lab's dense one (benchmarks/lab/work.py).
"""

import argparse

from lab import ideal, methods, work

from keras_psplus.planning import cost_model
from keras_psplus.planning.cost_model import Cluster
from keras_psplus.planning.link_bytes import Variable, Work

WORKERS = (2, 8, 64, 256, 1024)
# Milliseconds of a step without communication, and the fraction of workers that are servers.
ALONE_MS, WORKERS_PER_PS = 19.0, 2
ENTRIES = (
    "all_reduce",
    "all_reduce_bf16",
    "all_reduce_int8",
    "all_reduce_topk",
    "all_reduce_factors",
    "all_reduce_powersgd",
    "diloco",
    "async_parameter_server",
    "sync_parameter_server",
)
SMALL = Work([Variable((1000,))])  # a sum whose time is that of its messages


def of_entries(rate):
    """Rows for all entries: MB that a worker sends, and milliseconds of a step."""
    entries = {method.name: method.traits for method in methods.catalogue()}
    whole = ideal.work_of(work.SIZES["full"]["dense"])
    heads = [f"{workers} workers" for workers in WORKERS]
    lines = [
        "| entry | " + " | ".join(f"{head}: MB | ms" for head in heads) + " | scales to |",
        "|---|" + "---:|" * (2 * len(heads) + 1),
    ]
    for name in ENTRIES:
        cells = []
        for workers in WORKERS:
            cluster = Cluster(workers, max(1, workers // WORKERS_PER_PS), rate)
            step = cost_model.predict(entries[name], whole, ALONE_MS, cluster)
            cells += [f"{step.sent / 1e6:.2f}", f"{step.ms:,.0f}"]
        few = Cluster(2, 1, rate)
        last, _ = cost_model.scales_to(entries[name], whole, ALONE_MS, few)
        lines.append(f"| `{name}` | {' | '.join(cells)} | {last:,} |")
    return "\n".join(lines)


def two_levels_ms(traits, of_work, workers, group, cluster):
    """Milliseconds of a sum in groups: within each, then of each shard between them.

    The reduce-scatter and the all-gather of a group take together what its all-reduce would.
    """

    def ms(work, count):
        return cost_model.milliseconds(traits, work, 0.0, cluster(count))

    shard = Work([Variable((-(-of_work.elements // group),))])
    return ms(of_work, group) + ms(shard, workers // group)


def of_topologies(rate, delay_ms):
    """A row for each number of workers: one ring, and the best of two levels."""
    traits = {method.name: method.traits for method in methods.catalogue()}["all_reduce"]

    def cluster(count):
        return Cluster(count, 1, rate, delay_ms)

    lines = [
        "| workers | 4 kB in one ring: ms | two levels: ms | of groups of "
        "| 19.8 MB in one ring: ms | two levels: ms | of groups of |",
        "|---:|" + "---:|" * 6,
    ]
    whole = ideal.work_of(work.SIZES["full"]["dense"])
    for workers in WORKERS[1:]:
        cells = []
        for of_work in (SMALL, whole):
            flat = cost_model.milliseconds(traits, of_work, 0.0, cluster(workers))
            groups = [1 << i for i in range(1, workers.bit_length() - 1)]
            ms, group = min(
                (two_levels_ms(traits, of_work, workers, g, cluster), g) for g in groups
            )
            cells += [f"{flat:,.0f}", f"{ms:,.0f}", str(group)]
        lines.append(f"| {workers:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=1e9, help="bits per second of a link")
    parser.add_argument("--delay", type=float, default=0.1, help="milliseconds from host to host")
    args = parser.parse_args()
    print(of_entries(args.rate))
    print()
    print(of_topologies(args.rate, args.delay))


if __name__ == "__main__":
    main()
