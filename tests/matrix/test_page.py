"""The page of `make matrix`."""

import datetime

from tests.matrix import page


def one(names, column, kind="equal", error=0.0, **others):
    return {
        "family": "optimizers",
        "names": names,
        "column": column,
        "kind": kind,
        "error": error,
        "text": "",
        "link": "",
        **others,
    }


def test_rows_and_reasons():
    found = [
        one(["Adam", "SGD"], "all-reduce", error=3e-8),
        one(["Adam"], "all-reduce", error=2e-7),
        one(["Muon"], "hybrid", "refused", text="It needs whole tensors.", link="hybrid.md"),
        one(["SGD"], "XLA", "wrong", 0.5),
    ]
    exempt = {"callbacks": {"OrbaxCheckpoint": "needs Orbax"}}
    text = page.text(found, "Keras 3", exempt, datetime.date(2026, 11, 29))
    assert "Of 5 cells: 3 equal, 1 refused, 1 wrong." in text
    assert "| `Adam` | 1e-6 | - |" in text and "| `SGD` | 1e-7 | - |" in text
    assert "- `Muon` (hyb): It needs whole tensors. ([more](hybrid.md))" in text
    assert "| WRONG |" in text
    assert "- Not run: `OrbaxCheckpoint`: needs Orbax" in text
    manual = page.summary(found, "Keras 3", exempt, datetime.date(2026, 11, 29))
    assert "Of 5 comparisons 3 are equal." in manual
    assert "| `Muon` | hyb | It needs whole tensors. ([more](hybrid.md)) |" in manual
    assert "**Optimizers.** `Adam`." in manual
    assert "- `OrbaxCheckpoint`: needs Orbax" in manual


def test_a_page_is_read_as_it_was_written():
    found = [
        one(["Adam"], "all-reduce", error=1e-6),
        one(["Muon"], "hybrid", "refused", text="It needs whole tensors."),
        one(["SGD of two"], "XLA", "by design", text="XLA rounds (often).", link="a.md#b"),
    ]
    # A cell that is wrong is run again.
    wrong = one(["SGD"], "XLA", "wrong", 0.5)
    text = page.text([*found, wrong], "Keras 3", {}, datetime.date(2026, 11, 29))
    assert page.read(text) == found
