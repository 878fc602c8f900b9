"""State of workers: names, files, and values that wait for the step that makes their state."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.core import worker_state
from keras_psplus.core.worker_state import WaitingValues, WorkerFiles, WorkerState
from tests.support.tables import for_each

FORMS = {"a": (tf.TensorShape([2]), tf.float32), "b": (tf.TensorShape([]), tf.int64)}
VALUES = {"a": np.array([1, 2], "float32"), "b": np.array(3)}


class Kept(WorkerState):
    """State of two of three workers, in dicts."""

    kind = "worker"
    has_any, units, total, layout = True, [0, 2], 3, "3-workers"

    def __init__(self, optimizer):
        super().__init__()
        self.by_unit_ = {0: dict(VALUES), 2: {"a": VALUES["a"] + 1}}
        self.optimizer, self.lost = optimizer, []

    def owners(self, model):
        return {"optimizer": self.optimizer}

    def arrays(self, owner, unit):
        assert owner is self.optimizer
        return None if unit in self.lost else self.by_unit_[unit].items()

    def assign(self, owner, values, is_strict):
        assert owner is self.optimizer
        self.by_unit_, self.is_strict = values, is_strict


@pytest.fixture
def kept():
    return Kept(keras.optimizers.SGD())


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
        assert np.shape(found[name]) == np.shape(value)


def test_a_file_has_scalars_and_bfloat16_as_bytes(tmp_path):
    half = np.arange(3).astype(tf.bfloat16.as_numpy_dtype)
    worker_state.write(tmp_path / "arrays", [*VALUES.items(), ("c/d", half)])
    found = worker_state.read(tmp_path / "arrays")
    waiting = WaitingValues()
    waiting.put(found, {}, True)
    forms = {**FORMS, "c/d": (tf.TensorShape([None]), tf.bfloat16)}
    assert_equal(waiting.take(forms), {**VALUES, "c/d": half})
    worker_state.write(tmp_path / "nothing", [])
    assert worker_state.read(tmp_path / "nothing") == {}


def test_values_wait_for_the_states_that_are_made_later():
    waiting = WaitingValues()
    assert_equal(waiting.put(VALUES, {"a": FORMS["a"]}, True), {"a": VALUES["a"]})
    assert_equal(waiting.take({"b": FORMS["b"]}), {"b": VALUES["b"]})
    # Nothing waits any more, and the step that makes the last one finds no value.
    with pytest.raises(ValueError, match="it has nothing for c. Received: a state with nothing$"):
        waiting.take({"c": FORMS["b"]})
    Progress().count(1)
    # A state that a later step makes begins as ever.
    assert waiting.take({"c": FORMS["b"]}) == {}


def test_values_of_a_user_have_to_fit(caplog):
    waiting = WaitingValues()
    for values, message in [
        ({"a": VALUES["a"]}, "it has nothing for b. Received: a state with a$"),
        ({}, "nothing for a, b. Received: a state with nothing$"),
        ({**VALUES, "a": np.zeros(3, "float32")}, r"a has the shape \(3,\) and dtype float32, not"),
        ({**VALUES, "b": np.zeros([])}, "b has the shape .* and dtype float64, not"),
    ]:
        with pytest.raises(ValueError, match=message):
            waiting.put(values, FORMS, True)
    waiting.put(VALUES, {}, True)
    with pytest.raises(ValueError, match="it has nothing for c. Received: a state with a, b$"):
        waiting.take({"c": FORMS["a"]})
    # Of a backup, what does not fit is left out.
    waiting.put({"a": np.zeros(3, "float32")}, {}, False)
    with caplog.at_level("WARNING", "keras_psplus"):
        assert waiting.take(FORMS) == {}
    assert "what a worker had kept is not restored: a has the shape (3,)" in caplog.text


def test_names_say_whose_the_state_is(kept):
    state = kept.state_dict(kept.optimizer)
    assert list(state) == ["worker-0-of-3/a", "worker-0-of-3/b", "worker-2-of-3/a"]
    kept.by_unit_ = None
    kept.load_state_dict(kept.optimizer, state)
    assert kept.is_strict and list(kept.by_unit_) == [0, 2]
    assert_equal(kept.by_unit_[0], VALUES)
    scaled = keras.optimizers.LossScaleOptimizer(kept.optimizer)
    assert_equal(kept.state_dict(scaled), state)


@for_each(
    "state, message",
    [
        ([1], r"a dict of arrays by names. Received: state=\[1\]"),
        ({1: 2}, "Received: a state with 1"),
        ({"replica-0-of-3/a": 0}, "names begin with 'worker'. Received: .*'replica-0-of-3/a'"),
        ({"worker-0-of-2/a": 0}, "is one of 2 workers, and there are 3. .*with worker-0-of-2/a"),
        ({"worker-1-of-3/a": 0}, "is one of worker 1, and this process has worker 0"),
    ],
)
def test_states_of_others_are_refused(kept, state, message):
    with pytest.raises(ValueError, match=message):
        kept.load_state_dict(kept.optimizer, state)


def files_of(kept, **strategy):
    return WorkerFiles(types.SimpleNamespace(is_chief=True, task=None, **strategy), kept)


def test_files_that_no_state_needs_are_removed(kept, tmp_path):
    model = keras.Sequential()
    files, folder, in_use = files_of(kept), tmp_path / "compression", []
    saved = [files.save(model, str(tmp_path), "backup", lambda: in_use) for _ in range(2)]
    in_use = list(saved[1])
    (folder / "2-workers-step-7.zip.tmp").write_text("Left by a kill, of another layout.")
    (folder / "mine.txt").write_text("")
    saved.append(files.save(model, str(tmp_path), "backup", lambda: in_use))
    assert [list(one) for one in saved] == [[f"3-workers-step-{i:010d}.zip"] for i in (0, 1, 0)]
    assert {path.name for path in folder.iterdir()} == {"mine.txt", *saved[1], *saved[2]}
    expected, kept.by_unit_ = kept.by_unit_, None
    assert files.problems(str(tmp_path), [saved[2], {}]) == [[], []]
    files.restore(model, str(tmp_path), saved[2], [])
    assert not kept.is_strict
    for unit in (0, 2):
        assert_equal(kept.by_unit_[unit], expected[unit])
    (name,) = saved[2]
    (folder / name).write_bytes(b"damaged")
    (problems, others) = files.problems(str(tmp_path), [saved[2], {"2-workers-step-7.zip": ""}])
    assert "is not as it was written" in problems[0]
    assert others == ["there is no file of 3-workers"]


def test_nothing_is_saved_at_once_without_a_worker_that_cannot_be_reached(kept, tmp_path, caplog):
    model, kept.lost = keras.Sequential(), [2]
    files = files_of(kept)
    with caplog.at_level("WARNING", "keras_psplus"):
        assert files.save(model, str(tmp_path), "backup", lambda: None) is None
    assert "nothing is saved now, as worker-2 cannot be reached" in caplog.text
    assert not list((tmp_path / "compression").iterdir())
    files._unreachable_since -= 60
    with caplog.at_level("WARNING", "keras_psplus"):
        assert files.save(model, str(tmp_path), "backup", lambda: None)
    assert "worker-2 cannot be reached: what it has left out of its gradients" in caplog.text
