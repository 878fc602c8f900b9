"""What is known to be slow on GPUs, or to fail there, each with its reason."""

import fnmatch
import typing

from tests.gpu.findings import BATCH, COPY, EDGES, INT32, NO_KERNEL, WAIT


class Known(typing.NamedTuple):
    """Findings that are no news.

    Attributes:
        reason: Why it is so.
        kinds: Kinds of findings.
        ops: Types of operations.
        where: Patterns of files and functions, as in a shell.
        dtypes: Pattern of types.
        times: How many waits there are in a step, at most.
    """

    reason: str
    kinds: tuple[str, ...]
    ops: tuple[str, ...]
    where: tuple[str, ...]
    dtypes: str = "*"
    times: int | None = None

    def covers(self, finding):
        """Whether a finding is one of these."""
        return (
            finding["kind"] in self.kinds
            and finding["op"] in self.ops
            and fnmatch.fnmatchcase(finding["dtypes"], self.dtypes)
            and (self.times is None or (finding["times"] or 0) <= self.times)
            and any(fnmatch.fnmatchcase(finding["where"], pattern) for pattern in self.where)
        )


_RPC = "hybrid/calls.py *", "hybrid/servers.py *"
_RANGE_CHECK = "hybrid/tables/prefetch.py check_range", "hybrid/tables/prefetch.py text"
KNOWN = [
    Known(
        "the time is read on the host; it waits for control edges only, and nothing waits for it",
        (NO_KERNEL,),
        ("Timestamp",),
        ("core/batch/replica_step.py *", *_RPC),
    ),
    Known(
        "names and error messages of calls to servers are text, which is always on the host",
        (NO_KERNEL,),
        (
            *("AsString", "Const", "SelectV2", "StaticRegexFullMatch", "StaticRegexReplace"),
            "StringJoin",
        ),
        ("hybrid/*",),
        dtypes="*string*",
    ),
    Known(
        "Python looks after servers that do not answer: once a call has failed",
        (NO_KERNEL,),
        ("PyFunc",),
        _RPC,
    ),
    Known(
        "ids and rows of tables cross to the servers, as they must",
        (COPY, INT32, WAIT),
        ("EnsureShape", "Identity", "If", "RpcCall", "While"),
        _RPC,
    ),
    Known(
        "the host checks ids before it asks servers for their rows, and whether they have answered",
        (WAIT, EDGES),
        ("Assert", "DeleteRpcFutureResource", "Pack", "StatelessIf"),
        ("hybrid/extended.py *", *_RPC, *_RANGE_CHECK),
    ),
    Known(
        "ids are copied in the step with tables: it is the host that needs them",
        (BATCH,),
        ("Placeholder",),
        ("all_reduce/step/replica_functions.py step",),
        # Float inputs of other steps would be found.
        dtypes="int*",
    ),
    Known(
        "numbers of rows that an embedding has looked up: four bytes for each id of the batch",
        (COPY, INT32, WAIT),
        ("PlaceholderWithDefault", "Reshape", "UnsortedSegmentSum"),
        (
            *("all_reduce/reduction/methods.py gather_slices", "compression/wire.py _from_words"),
            *("core/graph/stand_ins.py _of_any_length", "core/gradient_path.py update_variables"),
            "engine.py proceed",
        ),
        dtypes="int32",
    ),
    Known(
        "one or two counts from each replica, by which the host chooses a branch, or pads rows",
        (COPY, INT32, WAIT),
        ("Max", "Reshape"),
        ("all_reduce/reduction/methods.py *", "all_reduce/collectives/* gather_rows"),
        dtypes="int32",
        # One for each of two replicas: all layers are counted at once.
        times=2,
    ),
    Known(
        "the host has to know how many elements have been chosen on the GPU",
        (WAIT,),
        ("EnsureShape", "Range", "SparseToDense", "StatelessWhile"),
        ("compression/sparse.py *",),
    ),
    Known(
        "keys of collectives are counted on the host, behind what a sum or a gathering waits for",
        (WAIT, EDGES),
        ("Const", "ReadVariableOp"),
        ("all_reduce/collectives/instance_keys.py next",),
        times=9,
    ),
    Known(
        "a label's logit is gathered with batch dimensions, whose gradient has indices of the host",
        (WAIT,),
        ("ConcatV2", "Mul", "Pack", "Range"),
        ("tensor_parallel/engine.py of_wholes",),
        dtypes="int*",
        times=3,
    ),
    Known(
        "at an epoch's end, whether a replica has taken steps that are not averaged yet",
        (WAIT,),
        ("If",),
        ("updates/local_sgd.py finish",),
        dtypes="bool",
        # Each of two replicas.
        times=2,
    ),
    Known(
        "Keras skips a step whose gradients have overflowed: the host chooses",
        (WAIT,),
        ("If",),
        ("engine.py proceed",),
        dtypes="bool",
    ),
    Known(
        "a worker looks whether it has its state, or has begun anew",
        (WAIT,),
        ("If",),
        ("parameter_server/state.py *",),
        dtypes="bool",
    ),
]
