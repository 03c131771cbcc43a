"""Signals that ask a run to stop: they are noticed at the end of a round, when all ranks agree on it."""

import signal
import threading

# Signal -> the bit by which a rank tells the others of it.
SIGNALS = {signal.SIGINT: 1, signal.SIGTERM: 2, signal.SIGUSR1: 4}


class StopSignals:
    """While it is entered, SIGINT, SIGTERM and SIGUSR1 are only remembered.

    In a thread that is not the main one, Python allows no change of signals: nothing is remembered then.

    Attributes:
        bits: of the signals that have come, as in `SIGNALS`.
    """

    def __init__(self):
        self.bits, self._before = 0, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _remember(self, number, frame):
        self.bits |= SIGNALS[number]


def stopping_signal(requests):
    """The name of a signal that some rank was sent, or None.

    Args:
        requests: bits of all ranks (`Federation.requests`).
    """
    return next((signal.Signals(number).name for number, bit in SIGNALS.items() if requests & bit), None)
