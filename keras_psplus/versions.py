"""The library's version, and the versions of Keras and TensorFlow it was tested with.

`check()` runs when `keras_psplus` is imported, before anything that reaches into Keras, so that an
unsuitable installation is named in one sentence instead of failing somewhere inside a hook.
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
from typing import Any

__version__ = "0.2.0.dev0"

_OTHER_BACKENDS = ("jax", "torch", "openvino", "mlx")
SKIP_VARIABLE = "KERAS_PSPLUS_SKIP_VERSION_CHECK"


@dataclass(frozen=True)
class Supported:
    """A tested range of (major, minor) versions.

    Args:
        name: The package's name in messages.
        module: The module that has a `__version__` if no distribution of ours is found.
        distributions: Names under which pip may know the package, the usual one first.
        first: The oldest supported (major, minor).
        after: The oldest (major, minor) that is too new.
    """

    name: str
    module: str
    distributions: tuple[str, ...]
    first: tuple[int, int]
    after: tuple[int, int]

    @property
    def specifier(self) -> str:
        """The range as pip writes it; pyproject.toml states the same."""
        return f">={_dotted(self.first)},<{_dotted(self.after)}"


KERAS = Supported(
    name="Keras",
    module="keras",
    distributions=("keras", "keras-nightly"),
    first=(3, 13),
    after=(3, 17),
)
TENSORFLOW = Supported(
    name="TensorFlow",
    module="tensorflow",
    distributions=(
        "tensorflow",
        "tensorflow-cpu",
        "tensorflow-gpu",
        "tensorflow-rocm",
        "tf-nightly",
        "tf-nightly-cpu",
    ),
    first=(2, 20),
    after=(2, 22),
)


def check_versions() -> None:
    """Checks Keras, TensorFlow and the Keras backend.

    The cheap checks come first: the versions are read from the installed metadata, and Keras is
    imported (which imports its backend) only for the last one.

    Raises:
        ImportError: If Keras 3 or TensorFlow is missing or outside the supported range, or if
            Keras runs on another backend than TensorFlow. With
            `KERAS_PSPLUS_SKIP_VERSION_CHECK=1` a version that is too new only warns.
    """
    _check_keras()
    _check_range(TENSORFLOW, installed_version(TENSORFLOW))
    _check_backend()
    for package in (KERAS, TENSORFLOW):
        check_module(package)


@contextlib.contextmanager
def naming_misfits() -> Iterator[None]:
    """Context for importing what reaches into Keras and TensorFlow, in versions that were checked.

    Raises:
        ImportError: If something is missing there, in a version that is not supported: which
            package, which version and what to do.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        found: dict[Supported, Any] = {package: _found(package) for package in (KERAS, TENSORFLOW)}
        untested = [
            package
            for package, version in found.items()
            if version is not None and not _is_supported(package, version)
        ]
        if not untested:
            raise
        received = ", ".join(f"{p.module} {_named(p, found[p])}" for p in untested)
        needs = " and ".join(f"{package.name} {package.specifier}" for package in untested)
        names = " and ".join(package.name for package in untested)
        raise ImportError(
            f"keras_psplus {__version__} does not fit this {names}: {error}. It needs "
            f"{needs}. {' '.join(_install(package) for package in untested)} "
            f"Received: {received}, {SKIP_VARIABLE}={os.environ.get(SKIP_VARIABLE, '')}"
        ) from error


def installed_version(package: Supported) -> str | None:
    """The installed version of `package` as a string, or None if it is not installed."""
    for version in _installed(package).values():
        return version
    # Builds from source and vendors' wheels have their own names: ask the module.
    try:
        module = importlib.import_module(package.module)
    except ImportError:
        return None
    return getattr(module, "__version__", None)


def describe(package: Supported) -> str | None:
    """The installed version, or several of them; nightly builds with their distribution's name."""
    found: list[str | None] = list(_installed(package).values()) or [installed_version(package)]
    return ", ".join(_named(package, version) for version in found if version) or None


def problem(package: Supported) -> str | None:
    """Error text about the installed version, or None; for commands, which continue."""
    try:
        _check_range(package, installed_version(package))
        check_module(package)
    except ImportError as error:
        return str(error)
    return None


def check_module(package: Supported) -> None:
    """Checks the module itself, if it has been imported.

    `keras` and `keras-nightly` write to one folder: with both installed, metadata tell of one of
    them, and the module may be the other's.

    Raises:
        ImportError: As `check`.
    """
    version = getattr(sys.modules.get(package.module), "__version__", None)
    known = installed_version(package)
    if version is not None and known is not None and _major_minor(version) != _major_minor(known):
        _check_range(package, version)


def _installed(package: Supported) -> dict[str, str]:
    """The installed distributions of a package, the usual one first, and their versions."""
    found = {}
    for distribution in package.distributions:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version:  # Half-removed installations leave metadata without a version.
            found[distribution] = version
    return found


def _found(package: Supported) -> str | None:
    """The version of the module, if it has been imported, else that of its metadata."""
    module = sys.modules.get(package.module)
    return getattr(module, "__version__", None) or installed_version(package)


def _named(package: Supported, version: str) -> str:
    """A version, with the name of a nightly build's distribution."""
    for distribution, installed in _installed(package).items():
        if "nightly" in distribution and _major_minor(installed) == _major_minor(version):
            return f"{version} ({distribution})"
    return version


def _install(package: Supported) -> str:
    """Installation advice for a version that is not supported."""
    command = f'pip install "{package.module}{package.specifier}"'
    installed = list(_installed(package))
    if any("nightly" in distribution for distribution in installed):
        # pip would leave the nightly build's files beside or above the release's.
        return (
            f"Install a supported one in the place of the nightly build: `pip uninstall -y "
            f"{' '.join(installed)}`, then `{command}`."
        )
    return f"Install a supported one: `{command}`."


def _check_keras() -> None:
    version = installed_version(KERAS)
    if version is None or _major_minor(version) < (3, 0):
        raise ImportError(
            "keras_psplus distributes Keras 3 models; Keras 2 (`tf_keras`, or `tf.keras` under "
            "TF_USE_LEGACY_KERAS=1) already has TensorFlow's own strategies. Install Keras 3 "
            f'(`pip install "keras{KERAS.specifier}"`) and `import keras`. '
            f"Received: {_keras_found(version)}"
        )
    _check_range(KERAS, version)
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        # Not an error: `import keras` still gives Keras 3, only `tf.keras` does not.
        warnings.warn(
            "TF_USE_LEGACY_KERAS is set, so `tf.keras` is Keras 2 and its models are not "
            "distributed by keras_psplus. Use `import keras`, or unset the variable. "
            f"Received: TF_USE_LEGACY_KERAS={os.environ['TF_USE_LEGACY_KERAS']}",
            stacklevel=2,
        )


def _keras_found(version: str | None) -> str:
    if version is not None:
        return f"keras {version}"
    try:
        return f"tf_keras {importlib.metadata.version('tf_keras')}, no keras"
    except importlib.metadata.PackageNotFoundError:
        return "no keras"


def _check_range(package: Supported, version: str | None) -> None:
    install = _install(package)
    if version is None:
        raise ImportError(
            f"keras_psplus needs {package.name} {package.specifier}, which is not installed. "
            f"{install} Received: no {package.module}"
        )
    received = f"Received: {package.module} {_named(package, version)}"
    if _major_minor(version) < package.first:
        raise ImportError(
            f"This {package.name} is too old for keras_psplus {__version__}, which needs "
            f"{package.specifier}. {install} {received}"
        )
    if not _is_supported(package, version):
        message = (
            f"This {package.name} is newer than keras_psplus {__version__} was tested with "
            f"({package.specifier})."
        )
        if os.environ.get(SKIP_VARIABLE, "") not in ("", "0"):
            warnings.warn(f"{message} {received}", stacklevel=2)
            return
        raise ImportError(
            f"{message} {install} Or set {SKIP_VARIABLE}=1 to try it untested. {received}"
        )


def _is_supported(package: Supported, version: str) -> bool:
    return package.first <= _major_minor(version) < package.after


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
