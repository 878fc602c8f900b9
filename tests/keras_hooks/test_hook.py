import keras
import pytest

from keras_psplus.engine import Call, Engine, answers
from keras_psplus.keras_hooks.hook import Hook


class Owner:
    def method(self, a, b=1):
        return a + b


class Tenfold(Engine):
    @answers("method")
    def _multiply(self, call):
        return 10 * call.proceed()

    def added(self, call):
        return "added"


@pytest.fixture
def owner():
    return type("Owner", (Owner,), {"method": Owner.method})


def hook(owner, name="method", parameters=("self", "a"), find=lambda *args, **kwargs: None, **more):
    ask = "added" if name == "added" else "run"
    return Hook(owner, f"{name}({', '.join(parameters)})", find, ask, "to test", **more)


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


def test_a_call_knows_its_arguments_by_name():
    def function(owner, a, b=1, *more, c=2):
        return owner, a, b, more, c

    call = Call(function, "owner", (3,), {"c": 4}, parameters=("a", "b"))
    assert [call.get("a"), call.get("b", 1), call.get("c"), call.get("d")] == [3, 1, 4, None]
    assert call.proceed() == ("owner", 3, 1, (), 4)
    assert call.proceed(a=5, b=6) == ("owner", 5, 6, (), 4)
    changed = Call(function, "owner", (3, 7, 8), {}, parameters=("a", "b")).changed(b=9, c=0)
    assert changed.proceed() == ("owner", 3, 9, (8,), 0)


def test_arguments_on_which_nothing_relies_have_names_too(owner):
    class Asks(Engine):
        def run(self, call):
            return call.get("a"), call.get("b")

    hook(owner, find=lambda *args, **kwargs: Asks()).install()
    assert owner().method(1, 2) == owner().method(b=2, a=1) == owner().method(1, b=2) == (1, 2)


def test_a_first_argument_may_be_given_by_name(owner):
    hook(owner, parameters=("self", "a"), find=lambda *args, **kwargs: Tenfold()).install()
    assert owner.method(self=owner(), a=1) == 20


class Once(Tenfold):
    def _multiply(self, call):
        return super()._multiply(call.changed(a=0)) + 1

    @answers("other")
    def _other(self, call):
        return "other"


def test_a_subclass_answers_by_its_own_method():
    call = Call(lambda owner, a: a + 1, None, (5,), name="method", parameters=("a",))
    assert Tenfold().run(call) == 60
    assert Once().run(call) == 11
    other = Call(lambda owner: "Keras", name="other")
    assert (Tenfold().on(other), Once().on(other)) == ("Keras", "other")
