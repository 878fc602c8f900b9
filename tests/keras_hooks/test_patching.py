import keras
import pytest

from keras_psplus.keras_hooks.patching import replace


class Owner:
    def method(self, a, b=1):
        return a + b


def test_replacement_gets_the_original():
    @replace(Owner, "method", ["self", "a"])
    def method(original, self, a, b=1):
        return 10 * original(self, a, b)

    assert Owner().method(1, b=2) == 30
    assert Owner.method.__name__ == "method"


@pytest.mark.parametrize("name, parameters", [("gone", ["self"]), ("method", ["self", "x"])])
def test_what_does_not_fit_is_named(name, parameters):
    with pytest.raises(ImportError) as error:
        replace(Owner, name, parameters)(lambda original: None)
    assert keras.__version__ in str(error.value)
    assert f"Owner.{name}" in str(error.value)
    assert "Received: " in str(error.value)
