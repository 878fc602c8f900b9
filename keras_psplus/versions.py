"""The library's version, and the versions of Keras and TensorFlow it was tested with.

`check_versions()` runs when `keras_psplus` is imported, before anything that reaches into Keras, so
that an unsuitable installation is named in one sentence instead of failing somewhere in a hook.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

__version__ = "0.2.0.dev0"

_OTHER_BACKENDS = ("jax", "torch", "openvino", "mlx")
SKIP_VARIABLE = "KERAS_PSPLUS_SKIP_VERSION_CHECK"


@dataclass(frozen=True)
class Supported:
    """A tested range of (major, minor) versions."""

    name: str
    distributions: tuple[str, ...]
    first: tuple[int, int]
    after: tuple[int, int]

    @property
    def module(self) -> str:
        """The module, which has a `__version__`."""
        return self.distributions[0]

    @property
    def specifier(self) -> str:
        """The range as pip writes it; pyproject.toml states the same."""
        return f">={_dotted(self.first)},<{_dotted(self.after)}"

    @property
    def advice(self) -> str:
        return f'Install a supported one: `pip install "{self.module}{self.specifier}"`.'

    def has(self, version: str) -> bool:
        return self.first <= _major_minor(version) < self.after


KERAS = Supported("Keras", ("keras", "keras-nightly"), (3, 13), (3, 17))
TENSORFLOW = Supported(
    "TensorFlow", ("tensorflow", "tensorflow-cpu", "tf-nightly"), (2, 20), (2, 22)
)


def check_versions() -> None:
    """Checks Keras, TensorFlow and the Keras backend.

    The cheap checks come first: the versions are read from the installed metadata, and Keras is
    imported (which imports its backend) only for the last ones.

    Raises:
        ImportError: If Keras or TensorFlow is missing or outside the supported range, or if
            Keras runs on another backend than TensorFlow. With
            `KERAS_PSPLUS_SKIP_VERSION_CHECK=1` a version that is too new only warns.
    """
    found = {p: _check_range(p, installed_version(p)) for p in (KERAS, TENSORFLOW)}
    _check_backend()
    for package, known in found.items():
        # `keras-nightly` lies in the folder of `keras`: metadata may tell of the other one.
        version = _of_module(package) or known
        if _major_minor(version) != _major_minor(known):
            both = f"`pip uninstall -y {' '.join(package.distributions[:2])}`"
            _check_range(package, version, f"{both}, as one lies above the other. ")


@contextlib.contextmanager
def naming_misfits() -> Iterator[None]:
    """Context for importing what reaches into Keras and TensorFlow, once versions were checked."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        found = {p: _of_module(p) or installed_version(p) for p in (KERAS, TENSORFLOW)}
        untested = {p: version for p, version in found.items() if version and not p.has(version)}
        if not untested:
            raise
        received = ", ".join(f"{p.module} {version}" for p, version in untested.items())
        needs = " and ".join(f"{package.name} {package.specifier}" for package in untested)
        names = " and ".join(package.name for package in untested)
        raise ImportError(
            f"keras_psplus {__version__} does not fit this {names}: {error}. It needs "
            f"{needs}. {' '.join(package.advice for package in untested)} "
            f"Received: {received}, {SKIP_VARIABLE}={os.environ.get(SKIP_VARIABLE, '')}"
        ) from error


def installed_version(package: Supported) -> str | None:
    """The installed version of `package` as a string, or None if it is not installed."""
    for distribution in package.distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    # Builds from source and vendors' wheels have their own names: ask the module.
    with contextlib.suppress(ImportError):
        return getattr(importlib.import_module(package.module), "__version__", None)
    return None


def summary() -> str:
    """The versions that all tasks of a cluster need to have in common."""
    found = {p.name: _of_module(p) or installed_version(p) for p in (KERAS, TENSORFLOW)}
    python = ".".join(map(str, sys.version_info[:2]))
    others = "".join(f", {name} {version}" for name, version in found.items())
    return f"keras_psplus {__version__}, Python {python}{others}"


def problem(package: Supported) -> str | None:
    """Error text about the installed version, or None; for commands, which continue."""
    try:
        _check_range(package, installed_version(package))
    except ImportError as error:
        return str(error)
    return None


def _of_module(package: Supported) -> str | None:
    return getattr(sys.modules.get(package.module), "__version__", None)


def _check_range(package: Supported, version: str | None, first: str = "") -> str:
    advice = first + package.advice
    if version is None:
        raise ImportError(
            f"keras_psplus needs {package.name} {package.specifier}, which is not installed. "
            f"{package.advice} Received: no {package.module}"
        )
    received = f"Received: {package.module} {version}"
    if _major_minor(version) < package.first:
        raise ImportError(
            f"This {package.name} is too old for keras_psplus {__version__}, which needs "
            f"{package.specifier}. {advice} {received}"
        )
    if not package.has(version):
        message = (
            f"This {package.name} is newer than keras_psplus {__version__} was tested with "
            f"({package.specifier})."
        )
        if os.environ.get(SKIP_VARIABLE, "") in ("", "0"):
            raise ImportError(
                f"{message} {advice} Or set {SKIP_VARIABLE}=1 to try it untested. {received}"
            )
        warnings.warn(f"{message} {received}", stacklevel=2)
    return version


def _check_backend() -> None:
    backend = _backend()
    if backend != "tensorflow":
        raise ImportError(
            "keras_psplus needs Keras's TensorFlow backend: set KERAS_BACKEND=tensorflow before "
            'keras is imported for the first time, or "backend" in keras.json. '
            f"Received: KERAS_BACKEND={backend}"
        )


def _backend() -> str:
    """The name of Keras's backend.

    Keras imports its backend when it is imported. Where the environment already asks for another
    backend, that import is skipped: it may be slow, or fail because the backend is not installed.
    """
    wanted = os.environ.get("KERAS_BACKEND", "")
    if "keras" not in sys.modules and wanted not in ("", "tensorflow"):
        return wanted
    try:
        return str(importlib.import_module("keras").backend.backend())
    except ImportError as error:
        if error.name in _OTHER_BACKENDS:  # as keras.json asks for it
            return error.name
        raise


def _major_minor(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ImportError(f"Cannot read this version number. Received: {version!r}")
    return int(match[1]), int(match[2])


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(str(part) for part in version)
