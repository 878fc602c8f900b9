"""Pairs of arguments of each strategy, as its constructor takes or refuses them.

    python -m tests.docs.combinations

writes the tables of docs/choose.md. Constructors check arguments before they join a cluster,
and are stopped there. What `compile` takes is taken under all strategies, of which `LAYOUTS` are
clusters that train models with it.
"""

import contextlib
import itertools
import json
import os
import re
from unittest import mock

import keras_psplus as psp
from keras_psplus.all_reduce.strategy import MultiWorkerMirroredStrategy
from keras_psplus.hybrid import strategy as hybrid
from keras_psplus.parameter_server import strategy as parameter_server
from keras_psplus.pipeline import strategy as pipeline
from tests.docs import pages

PAGE = pages.ROOT / "docs" / "choose.md"
_BEGIN, _END = "<!-- pairs -->\n", "<!-- end of pairs -->\n"
_CLUSTER = {
    "cluster": {
        "worker": [f"127.0.0.1:{port}" for port in range(1, 5)],
        "ps": ["127.0.0.1:5"],
    },
    "task": {"type": "worker", "index": 0},
}
_VALUES = {
    "shard": ["optimizer", "all"],
    "updates": ["accumulate:4", "local_sgd:4", "diloco:4"],
    "compression": ["bf16", "int8", "powersgd:4", "topk:0.01", "factors"],
    "topology": [[[0, 1], [2, 3]], "auto"],
    "jit_compile": [True],
}
# By strategy: a cluster whose options a test changes, and others with `shard`.
LAYOUTS = {
    "MultiWorkerMirroredStrategy": ("ar4", "opt2", "all2"),
    "HybridStrategy": ("hybrid41", "hybrid21_shards", "hybrid21_all"),
    "ModelParallelStrategy": ("tp4", "tp4_shards", "tp4_all"),
    "ParameterServerStrategy": ("async_threads",),
    'ParameterServerStrategy(mode="sync")': ("sync_threads",),
    "PipelineStrategy(pipelines=2)": ("pipelines4",),
}
_EACH = [(argument, value) for argument, values in _VALUES.items() for value in values]
_NO_ARGUMENT = re.compile(r"has no argument `(\w+)`")


class _Taken(BaseException):
    """A constructor has checked its arguments."""


def _strategies():
    mesh = psp.DeviceMesh((2, 2), ("batch", "model"))
    return {
        "MultiWorkerMirroredStrategy": {},
        "HybridStrategy": {},
        "ModelParallelStrategy": {"mesh": mesh},
        "ParameterServerStrategy": {},
        'ParameterServerStrategy(mode="sync")': {"mode": "sync"},
        "PipelineStrategy(pipelines=2)": {"pipelines": 2},
    }


@contextlib.contextmanager
def _before_clusters():
    stop = mock.Mock(side_effect=_Taken)
    with (
        mock.patch.dict(os.environ, TF_CONFIG=json.dumps(_CLUSTER)),
        mock.patch.object(MultiWorkerMirroredStrategy, "_start", stop),
        mock.patch.object(hybrid.calls, "token_of", stop),
        mock.patch.object(parameter_server, "join_cluster", stop),
        mock.patch.object(pipeline, "read_task", stop),
    ):
        yield


def refusal(name, given):
    """The sentence by which a strategy refuses arguments; None if it takes them."""
    given = {argument: value for argument, value in given.items() if argument != "jit_compile"}
    try:
        getattr(psp, name.partition("(")[0])(**given)
    except _Taken:
        return None
    except TypeError as error:
        found = _NO_ARGUMENT.search(str(error))
        assert found, error
        return f"has no `{found[1]}`"
    except ValueError as error:
        return " ".join(str(error).partition(" Received: ")[0].split())
    raise AssertionError(f"{name} does not join the cluster")


def _shown(argument, value):
    return f"`{argument}={value!r}`".replace("'", '"')


def tables():
    """The page's tables: what is taken alone, and the pairs that are refused."""
    with _before_clusters():
        return "\n".join(_table(name, own) for name, own in _strategies().items())


def taken(name):
    """Arguments that a strategy takes alone, as pairs of a name and a value."""
    own = _strategies()[name]
    with _before_clusters():
        return [one for one in _EACH if refusal(name, own | dict([one])) is None]


def _table(name, own):
    alone = {_shown(*one): refusal(name, own | dict([one])) for one in _EACH}
    taken = [one for one in _EACH if alone[_shown(*one)] is None]
    rows = {}
    for shown, sentence in alone.items():
        if sentence is not None:
            rows.setdefault(sentence, []).append(shown)
    pairs = {}
    for one, other in itertools.combinations(taken, 2):
        if one[0] != other[0]:
            sentence = refusal(name, own | dict([one, other]))
            if sentence is not None:
                pairs.setdefault((sentence, _shown(*one)), []).append(_shown(*other))
    for (sentence, one), others in pairs.items():
        rows.setdefault(sentence, []).append(f"{one} with {' or '.join(others)}")
    lines = [f"### {name}\n", f"Takes {', '.join(itertools.starmap(_shown, taken))}"]
    if len({argument for argument, _ in taken}) > 1:
        lines[-1] += f"; and all pairs of them{', but for those below' if pairs else ''}"
    lines[-1] += ".\n"
    if rows:
        lines += ["| refused | because |", "|---|---|"]
        lines += [f"| {'; '.join(given)} | {sentence} |" for sentence, given in rows.items()]
        lines.append("")
    return "\n".join(lines)


def with_tables(text):
    """The page's text with the tables as they are now."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{tables()}\n{_END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
