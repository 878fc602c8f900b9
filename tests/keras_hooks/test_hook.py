import keras
import pytest

from keras_psplus.engine import Engine
from keras_psplus.keras_hooks.hook import Hook


class Owner:
    def method(self, a, b=1):
        return a + b


class Tenfold(Engine):
    def method(self, original, owner, a, b=1):
        return 10 * original(owner, a, b)

    def added(self, original, owner):
        return "added"


@pytest.fixture
def owner():
    return type("Owner", (Owner,), {"method": Owner.method})


def hook(owner, name="method", parameters=("self", "a"), find=lambda *args, **kwargs: None, **more):
    return Hook(owner, name, list(parameters), find, name, "to test", **more)


def test_the_engine_that_is_found_gets_the_original(owner):
    hook(owner, find=lambda *args, **kwargs: Tenfold()).install()
    assert owner().method(1, b=2) == 30
    assert owner.method.__name__ == "method"


def test_without_an_engine_keras_answers(owner):
    replaced = hook(owner)
    assert not replaced.is_installed
    replaced.install()
    assert replaced.is_installed
    assert owner().method(1, b=2) == 3
    # Its parameters are those of Keras's own function, also afterwards.
    assert replaced.found() == ["self", "a", "b"]


@pytest.mark.parametrize("name, parameters", [("gone", ["self"]), ("method", ["self", "x"])])
def test_what_does_not_fit_is_named(owner, name, parameters):
    with pytest.raises(ImportError) as error:
        hook(owner, name, parameters).install()
    assert keras.__version__ in str(error.value)
    assert f"Owner.{name}" in str(error.value)
    assert "Received: " in str(error.value)


def test_what_keras_does_not_have_is_added(owner):
    engine = []
    find = lambda *args, **kwargs: engine[0] if engine else None  # noqa: E731
    hook(owner, "added", ["self"], find, is_added=True).install()
    with pytest.raises(AttributeError, match="added"):
        owner().added()
    engine.append(Tenfold())
    assert owner().added() == "added"


def test_what_keras_has_itself_is_not_added(owner):
    with pytest.raises(ImportError, match="the absence of"):
        hook(owner, is_added=True).install()
