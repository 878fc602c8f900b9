"""The comparison of commits that only move code."""

from tests import same_code

OLD = {
    "keras_psplus.a": """import os
from keras_psplus import b
_SIZE = 1
def f(x):
    return b.g(x)
""",
    "keras_psplus.b": """_SIZE = 1
def g(x):
    return x
""",
}
MERGED = """import os
_SIZE = 1
def g(x):
    return x
def f(x):
    return g(x)
"""


def apart(text, **renamed):
    new = same_code.statements({"keras_psplus.a": text}, renamed)
    return same_code.differences(same_code.statements(OLD, {}), new)


def test_merged_modules_are_the_same():
    assert not apart(MERGED)
    assert not apart(MERGED.replace("g(", "h("), h="g")


def test_changes_are_found():
    assert apart(MERGED.replace("return x", "return -x"))
    assert apart(MERGED.replace("import os", "import sys")) == {
        "imports None os",
        "imports None sys",
    }
    assert apart(MERGED.replace("_SIZE = 1", "_SIZE = 2"))
    assert apart(MERGED + "if f:\n    import os\nelse:\n    g(1)\n")
    assert apart(MERGED + "def g(x):\n    return x\n")
