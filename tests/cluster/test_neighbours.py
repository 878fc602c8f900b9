"""Whom a task of a large cluster asks."""

from keras_psplus.cluster.preflight import EVERYBODY, neighbours
from tests.support.tables import for_each


def test_in_a_small_cluster_each_asks_each_other():
    tasks = range(EVERYBODY)
    assert neighbours(tasks, 3) == [task for task in tasks if task != 3]


@for_each("count", [EVERYBODY + 1, 64, 100, 1000])
def test_in_a_large_one_each_is_asked_by_as_many_as_it_asks_and_news_go_round(count):
    asks = {own: neighbours(range(count), own) for own in range(count)}
    assert all(own not in others for own, others in asks.items())
    assert {len(others) for others in asks.values()} <= {len(asks[0])}
    assert len(asks[0]) <= 2 + (count - 1).bit_length()
    assert all((own + 1) % count in asks[own] and (own - 1) % count in asks[own] for own in asks)
    # Who has found something tells those that it asks, and so on.
    told, rounds = {0}, 0
    while len(told) < count:
        told |= {other for one in told for other in asks[one]}
        rounds += 1
    assert rounds <= (count - 1).bit_length()
