"""The line that follows something long, and the polite way to end it."""

import io
import signal
import threading

import pytest

from farthing.cli.options import progress, stoppable


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress(True, "beginning") as show:
        assert show is None
    assert terminal.getvalue() == ""
    with progress(False, "beginning") as show:
        assert show is not None
        show("half way", 0.5)
    assert "half way" in terminal.getvalue()
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with progress(False, "beginning") as show:
        assert show is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stoppable() as stopped:
        assert not stopped()
        signal.raise_signal(number)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) == before


def test_other_threads_have_no_signals() -> None:
    found = []

    def look() -> None:
        with stoppable() as stopped:
            found.append(stopped())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [False]
