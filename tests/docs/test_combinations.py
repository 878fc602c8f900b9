"""The manual's table of arguments that go together is what constructors take."""

from tests.docs import combinations


def test_the_page_says_what_is_taken():
    text = combinations.PAGE.read_text()
    assert combinations.with_tables(text) == text, "run python -m tests.docs.combinations"
