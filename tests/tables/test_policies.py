"""Arguments of dynamic tables that mean nothing."""

import pytest

import keras_psplus as psp
from keras_psplus.tables import policies
from tests.support.tables import for_each

tables = psp.tables


@for_each(
    "make, text",
    [
        (lambda: tables.Capacity(0), "rows=0"),
        (lambda: tables.Capacity(5, "mru"), "policy='mru'"),
        (lambda: tables.Count(0), "n=0"),
        (lambda: tables.Bloom(300, 10**6), "n=300"),
        (lambda: tables.Probability(0), "p=0"),
        (lambda: tables.Unused(), "steps=None, days=None"),
        (lambda: tables.Norm(-1), "below=-1"),
        (lambda: tables.Norm(1) | tables.Norm(2), "Norm | Norm"),
        (lambda: policies.check_admit(tables.Norm(1)), "admit=Norm"),
        (lambda: policies.check_expire(tables.Count(1)), "expire=Count"),
    ],
)
def test_a_wrong_argument_is_refused(make, text):
    with pytest.raises(ValueError, match="Received: ") as error:
        make()
    assert text in str(error.value).rpartition("Received: ")[2]


def test_configurations_make_the_same_again():
    expire = tables.Unused(days=7) | tables.Capacity(5, "lfu") | tables.Norm(0.5)
    configs = policies.check_expire(expire)
    assert policies.check_expire(configs) == configs and len(configs) == 3
    admit = policies.check_admit(tables.Bloom(2, 1000))
    assert policies.check_admit(admit) == admit
