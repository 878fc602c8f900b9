"""Lists the packages: those found under keras_psplus/, and the catalogue in strategies/.

setup.cfg can find packages or list them, not both, and `keras_psplus.strategies` (mapped there to
strategies/) is not found under keras_psplus/.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["keras_psplus", "keras_psplus.*"]),
        "keras_psplus.strategies",
    ],
)
