"""Numbers of requests to table servers: what comes twice is done once, and nothing piles up."""

from keras_psplus.hybrid.servers import TicketBook, Tickets


def test_a_server_keeps_the_last_request_of_each_client_only():
    tickets, books = Tickets(), [TicketBook() for _ in range(3)]
    for i in range(1000):
        for book in books:
            number = book.open()
            client, number, read = book.ticket(number)
            assert tickets.take(client, number, read)
            tickets.put(client, number, {"i": i})
            # The answer is lost, and asked for again.
            assert not tickets.take(*book.ticket(number))
            assert tickets.answer(client, number) == {"i": i}
            book.close(number)
    assert len(tickets) == len(books)


def test_requests_that_are_under_way_together_keep_their_answers():
    tickets, book = Tickets(), TicketBook()
    first, second, third = (book.open() for _ in range(3))
    client, *_ = book.ticket(first)
    for number in (second, third):
        assert tickets.take(*book.ticket(number))
        tickets.put(client, number, {"number": number})
        book.close(number)
    assert tickets.take(*book.ticket(first)) and tickets.answer(client, first) is None
    assert tickets.answer(client, third) == {"number": third}
    book.close(first)
    assert tickets.take(*book.ticket(book.open()))
    assert len(tickets) == 1


def test_a_request_that_comes_late_is_not_done():
    tickets, book = Tickets(), TicketBook()
    overheard = book.ticket(book.open())
    assert tickets.take(*overheard)
    # The client gives up before the answer, which nobody will ask for, and asks something else.
    book.close(overheard[1])
    assert tickets.take(*book.ticket(book.open()))
    tickets.put(*overheard[:2], {"late": True})
    assert not tickets.take(*overheard)
    assert "has had its answer" in tickets.answer(*overheard[:2])["error"]
    assert len(tickets) == 1
