"""Methods that can be measured: the catalogue's entries, further ones, other libraries."""

import dataclasses
import fnmatch

from keras_psplus.planning import Traits, traits_of

WORKS = ("dense", "sparse", "convolutional", "transformer")
_SIMPLE = WORKS[:2]  # of which other libraries have a model here
TITLES = {
    "keras_psplus": "keras_psplus",
    "tf_keras": "tf_keras",
    "torch": "PyTorch",
    "jax": "Keras on JAX",
}


@dataclasses.dataclass(frozen=True)
class Method:
    """A library and one of its ways of training.

    Attributes:
        library: A key of `TITLES`.
        name: Of the way.
        traits: `Traits`.
        works: Names of the works that it can do.
        dynamic: Whether the work's table is a `DynamicEmbedding`.
        by_name: Whether it is measured only if a pattern asks for it.
    """

    library: str
    name: str
    traits: Traits
    works: tuple = WORKS
    dynamic: bool = False
    by_name: bool = False

    @property
    def full_name(self):
        return f"{self.library}/{self.name}"

    def jobs(self, workers, ps):
        """The job of each host's task."""
        path = self.traits.path
        servers = ps if path in ("parameter_server", "hybrid") else 0
        chief = ["chief"] if path == "parameter_server" else []
        return ["worker"] * workers + ["ps"] * servers + chief


def catalogue():
    """Methods of all of keras_psplus's entries, those without communication first."""
    from lab import entries

    found = []
    for name, entry in entries.everything().items():
        # A compressor for each hop of racks counts as none.
        plain = {k: value for k, value in entry.arguments.items() if not isinstance(value, dict)}
        traits = traits_of(entry.strategy, plain)
        traits = dataclasses.replace(traits, together=entries.TOGETHER.get(name, 1))
        by_name, works = name in entries.COMPILED, WORKS
        if name in entries.ENTRIES and not by_name:
            # These are there for what dense gradients, or rows, are sent in.
            works = ("sparse",) if traits.path == "hybrid" else ("dense",)
        dynamic = name in entries.DYNAMIC
        found.append(Method("keras_psplus", name, traits, works, dynamic, by_name))
    paths = ("alone", "all_reduce", "parameter_server", "hybrid", "tensor_parallel")
    return sorted(found, key=lambda method: paths.index(method.traits.path))


def tf_keras():
    """Methods of stock Keras 2 under TensorFlow's strategies."""
    server = Traits("parameter_server", waits=False)
    return [
        Method("tf_keras", "alone", Traits("alone")),
        Method("tf_keras", "all_reduce", Traits()),
        Method("tf_keras", "parameter_server", server),
    ]


def torch():
    """Methods of PyTorch: DDP, compiled, with its hooks, accumulation, and averaged weights."""
    methods = [
        Method("torch", "alone", Traits("alone"), (*_SIMPLE, "transformer")),
        Method("torch", "ddp", Traits(), (*_SIMPLE, "transformer")),
        Method("torch", "ddp_compile", Traits(), ("dense", "transformer")),
        Method("torch", "fsdp", Traits(shard="all"), ("dense", "transformer")),
    ]
    dense = {
        "ddp_bf16": Traits(compression="bf16"),
        "ddp_fp16": Traits(compression="fp16"),
        "ddp_powersgd_4": Traits(compression="powersgd:4"),
        "ddp_powersgd_1": Traits(compression="powersgd:1"),
        "ddp_accumulate_4": Traits(updates="accumulate", every=4),
        "post_local_sgd_8": Traits(updates="local", every=8),
        "post_local_sgd_racks_8": Traits(updates="local", every=8, needs_racks=True),
    }
    # Its hooks and its averaging know no sparse gradients.
    return methods + [Method("torch", name, traits, ("dense",)) for name, traits in dense.items()]


def jax():
    """Methods of Keras 3 on JAX: its own data parallelism, which knows no sparse gradients."""
    return [
        Method("jax", "alone", Traits("alone"), _SIMPLE),
        Method("jax", "data_parallel", Traits(), _SIMPLE),
    ]


def select(methods, patterns):
    """Those whose name, or library and name, one of the patterns fits; all without patterns.

    A library's run without communication comes with its others, which are compared with it.
    Those that are measured by name alone need a pattern.

    Raises:
        ValueError: If a pattern fits none.
    """
    if not patterns:
        return [method for method in methods if not method.by_name]

    def fits(method, pattern):
        names = (method.name, method.full_name)
        return any(fnmatch.fnmatchcase(name, pattern) for name in names)

    for pattern in patterns:
        if not any(fits(method, pattern) for method in methods):
            names = ", ".join(method.full_name for method in methods)
            raise ValueError(f"No method fits. There are: {names}. Received: {pattern!r}")
    chosen = [m for m in methods if any(fits(m, pattern) for pattern in patterns)]
    libraries = {method.library for method in chosen}
    alone = [m for m in methods if m.traits.path == "alone" and m.library in libraries]
    return [method for method in methods if method in alone or method in chosen]
