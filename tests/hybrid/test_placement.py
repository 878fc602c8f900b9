"""Which tables lie on the servers."""

import pytest

from keras_psplus.hybrid.tables.placement import TablePlacer


def placement(rule="auto", replicas=4, pull=None, push=None):
    same = lambda dim: dim  # noqa: E731
    return TablePlacer(rule, 1 << 20, replicas, pull or same, push or same)


def test_auto_goes_by_size_and_bytes():
    four = placement()
    assert four.decide("large/embeddings", 100_000, 32).on_servers
    assert not four.decide("small/embeddings", 1_000, 32).on_servers
    # A worker that has nobody to gather from needs nothing.
    assert not placement(replicas=1).decide("large/embeddings", 100_000, 32).on_servers
    # Two workers: 4 (32 + 32 + 2) bytes against 2 (4 * 32 + 8).
    assert placement(replicas=2).decide("e", 100_000, 32).on_servers
    wider = placement(replicas=2, pull=lambda dim: dim + 3)
    assert not wider.decide("e", 100_000, 32).on_servers


def test_rules_by_name_and_functions():
    rules = placement({"*user*/embeddings": "mirrored", "*item*": "parameter_server"})
    assert not rules.decide("the_user/embeddings", 100_000, 32).on_servers
    assert rules.decide("item/embeddings", 10, 2).on_servers
    assert rules.decide("other/embeddings", 100_000, 32).on_servers
    assert not rules.decide("item/embeddings", 10, 2, "mirrored").on_servers
    calls = placement(lambda path, rows, dim: "parameter_server" if rows > 5 else "mirrored")
    assert calls.decide("a", 6, 1).on_servers and not calls.decide("a", 5, 1).on_servers


def test_report_shows_each_decision_once():
    four = placement()
    four.decide("large/embeddings", 100_000, 32)
    assert "large/embeddings  (100000, 32)  12.8" in four.report()
    assert not four.has_news
    four.decide("small/embeddings", 1_000, 32)
    assert four.has_news and "large" not in four.report()


def test_a_function_must_return_a_place():
    with pytest.raises(ValueError, match="must return one of .*Received: 'gpu'"):
        placement(lambda *_: "gpu").decide("a", 1, 1)
