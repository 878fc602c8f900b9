import errno
import io
import os
import sys
import time

import pytest

from keras_psplus.cluster.console import Console, LogFile, OutputPump, plain, render, warn
from tests.support.tables import for_each


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@for_each(
    "text, shown",
    [
        ("plain  ", "plain"),
        ("step 1\b\b\b\b\b\b\rstep 2", "step 2"),
        ("long line\rab", "abng line"),
        ("abc\b\bX", "aXc"),
        ("\b\rx", "x"),
        ("\x1b[1m1/3\x1b[0m\r\x1b[1m2/3\x1b[0m", "\x1b[1m2/3\x1b[0m"),
    ],
)
def test_render_shows_what_a_terminal_would(text, shown):
    assert render(text).removeprefix("\x1b[0m") == shown


def test_plain_has_no_colours():
    assert plain("\x1b[32mok\x1b[0m\r\x1b[1mno") == "no"


def test_keras_progress_bar_becomes_one_line(monkeypatch):
    keras = pytest.importorskip("keras")
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    bar = keras.utils.Progbar(3, interval=0)
    for step in range(1, 4):
        bar.update(step, [("loss", 0.5)])
    (line,) = written.getvalue().rstrip("\n").split("\n")
    assert plain(line).startswith("3/3 ") and plain(line).count("loss") == 1


def pump(data, console, log=None):
    reader, writer = os.pipe()
    log = log or io.StringIO()
    with os.fdopen(reader, "rb") as source:
        thread = OutputPump("worker-0", source, log, console)
        thread.start()
        for chunk in data:
            os.write(writer, chunk)
        os.close(writer)
        thread.join(10)
        assert not thread.is_alive()
    return log.getvalue() if isinstance(log, io.StringIO) else None


def test_lines_are_prefixed_and_logged_and_partial_ones_kept():
    stream = io.StringIO()
    log = pump([b"one\ntw", b"o\nthr", b"ee"], Console(stream, live="worker-0"))
    assert log == "one\ntwo\nthree\n"
    assert stream.getvalue() == "[worker-0] one\n[worker-0] two\n[worker-0] three\n"


def test_colours_are_for_terminals():
    for stream, shown in ((io.StringIO(), "red"), (Terminal(), "\x1b[31mred\x1b[0m")):
        Console(stream).line("ps-0", "\x1b[31mred\x1b[0m")
        assert stream.getvalue() == f"[ps-0] {shown}\n"


def test_split_and_broken_utf8_is_survived():
    bar = "━".encode()
    log = pump([bar[:1], bar[1:] + b"\n", b"\xff\xfe\n"], None)
    assert log == "━\n\ufffd\ufffd\n"


def test_bars_and_summaries_of_others_are_left_to_their_logs(monkeypatch):
    keras = pytest.importorskip("keras")
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).summary()
    bar = keras.utils.Progbar(3, interval=0)
    for step in range(1, 4):
        bar.update(step, [("loss", 0.5)])
    print("Epoch 1/3\n3/3 - 0s - 20ms/step - loss: 0.5\nmy own line: 3/3 s")
    monkeypatch.undo()
    for leader, is_shown in (("worker-0", True), ("chief-0", False), (None, True)):
        stream, log = io.StringIO(), io.StringIO()
        pump([written.getvalue().encode()], Console(stream, leader=leader), log)
        assert "Total params" in log.getvalue() and "━" in log.getvalue()
        lines = stream.getvalue().split("\n")
        assert (len(lines) > 12) == is_shown
        own = [line for line in lines if line.strip("[] ") not in ("", "worker-0")]
        assert is_shown or own == ["[worker-0] my own line: 3/3 s"]


def test_endless_progress_line_does_not_grow():
    log = pump([b"\rstep %d" % n for n in range(5000)] + [b"\n"], None)
    assert log == "step 4999\n"


def test_live_line_stays_at_the_bottom_of_a_terminal():
    stream = Terminal()
    console = Console(stream, live="worker-0")
    console.partial("worker-0", "1/9")
    console.line("worker-1", "hello")
    assert stream.getvalue() == "[worker-0] 1/9\r\x1b[K[worker-1] hello\n[worker-0] 1/9"
    console.line("worker-0", "9/9")
    assert stream.getvalue().endswith("\r\x1b[K[worker-0] 9/9\n")


def test_live_line_is_clipped_to_the_screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    Console(stream, live="worker-0").partial("worker-0", "x" * 100)
    assert stream.getvalue() == "[worker-0] " + "x" * 18 + "\x1b[0m"


def test_closed_console_does_not_stop_the_log():
    class Closed(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    assert pump([b"one\ntwo\n"], Console(Closed())) == "one\ntwo\n"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), BrokenPipeError(errno.EPIPE, "")])
def test_stream_that_fails_does_not_stop_the_log(error, capsys):
    class Failing(io.StringIO):
        def write(self, _):
            raise error

    assert pump([b"one\ntwo\n", b"three\n"], Console(Failing())) == "one\ntwo\nthree\n"
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"keras-psplus: cannot write to the standard output ({error}); the job goes on, and its "
        "output is in the log files"
    )


def test_log_that_fails_does_not_stop_the_console(capsys):
    stream = io.StringIO()
    log = LogFile("/dev/full", False, warn)
    pump([b"one\n" * 1000, b"the cause\n"], Console(stream), log)
    log.close()
    assert stream.getvalue().count("[worker-0] one\n") == 1000
    assert log.lost == "one\n" * 199 + "the cause\n"
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot write /dev/full ([Errno 28] No space left on device); the job goes on" in line


def test_output_is_read_on_whatever_fails(capsys):
    class Broken:
        def write(self, _):
            raise MemoryError

    # More than a pipe holds: who writes it would wait for ever.
    pump([b"x" * 65536 + b"\n"] * 10, None, Broken())
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("live", [None, "worker-0"])
def test_very_long_lines_take_no_longer_than_many_short_ones(live, monkeypatch):
    data = b"0123456789abcde " * 4096
    stream = Terminal()
    started = time.process_time()
    log = pump([data] * 800 + [b"\r\n", b"end\n"], Console(stream, live=live))
    # 0.5 s here; it was a minute.
    assert time.process_time() - started < 20
    is_whole = log == (data.decode() * 800).rstrip() + "\nend\n"
    assert is_whole  # pytest would compare them for minutes
    assert stream.getvalue().count("[worker-0] ") < 60


def test_a_line_that_comes_byte_by_byte():
    log = pump([b"."] * 20_000 + [b"\n"], Console(Terminal(), live="worker-0"))
    assert log == "." * 20_000 + "\n"


BAR = "\r 1/3 ━ 0s - loss: 0.5"
NOISE = "W0000 00:00:1795460925.979953   26324 local_rendezvous.cc:412] aborting"
OURS = "keras_psplus: worker-1 has waited"


@pytest.mark.parametrize("quiet", [True, False])
def test_lines_of_logs_do_not_break_a_progress_bar(quiet):
    data = f"{BAR}{NOISE}\n{BAR}{OURS}\n{BAR}{NOISE}\nhalf"
    stream = io.StringIO()
    log = pump([data.encode()], Console(stream, quiet=quiet))
    assert log == f"{NOISE}\n{OURS}\n{NOISE}\n{plain(BAR)}half\n"
    shown = log.replace(f"{NOISE}\n", "") if quiet else log
    assert stream.getvalue() == "".join(f"[worker-0] {line}\n" for line in shown.splitlines())


def test_the_bar_stays_at_the_bottom_of_a_terminal():
    stream = Terminal()
    pump([f"{BAR}{OURS}\n".encode()], Console(stream, live="worker-0"))
    assert f"[worker-0] {OURS}\n[worker-0] {plain(BAR)}" in stream.getvalue()


def test_half_a_line_of_noise_is_not_left_on_a_terminal():
    stream = Terminal()
    console = Console(stream, live="worker-0", quiet=True)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as source:
        thread = OutputPump("worker-0", source, io.StringIO(), console)
        thread.start()
        os.write(writer, NOISE[:40].encode())
        while not stream.getvalue():
            time.sleep(0.01)
        os.write(writer, f"{NOISE[40:]}\n".encode())
        os.close(writer)
        thread.join(10)
    console.line("worker-1", "hello")
    assert stream.getvalue().endswith("\r\x1b[K[worker-1] hello\n")
