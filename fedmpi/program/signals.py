"""Signals that ask a run to stop: all ranks learn of them at the end of a round, and stop together."""

import math
import signal
import threading
import time

# Signal -> the bit with which a rank reports it to the others (`Federation.requests`).
SIGNALS = {signal.SIGINT: 1, signal.SIGTERM: 2, signal.SIGUSR1: 4}
# These only if they would end the program: not if the user ignores (nohup) or handles them.
SIGNALS |= {signal.SIGHUP: 64, signal.SIGUSR2: 128, signal.SIGXCPU: 256}  # 8 to 32: `fedmpi.checkpoints.writer`
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
SAME_KEY_PRESS = 1.0  # seconds in which both the terminal and the launcher may pass on the same Ctrl-C


_remembered = 0  # bits of the signals that came before there was a `StopSignals`


def remember_signals(numbers=WARNINGS):
    """Remember some signals from now on, for the next `StopSignals`; Ctrl-C still ends the program at once."""
    for number in numbers:
        if _may_take(number):
            signal.signal(number, _remember)


def _may_take(number):
    return SIGNALS[number] < 8 or signal.getsignal(number) in (signal.SIG_DFL, _remember)


def _remember(number, frame):
    global _remembered
    _remembered |= SIGNALS[number]


class StopSignals:
    """A context in which the signals of `SIGNALS` are only remembered.

    A second SIGINT some time after the first one raises KeyboardInterrupt: the user does not want to wait. Python lets
    only the main thread handle signals: in any other thread, nothing is remembered.

    Attributes:
        bits: of the signals that have come, as in `SIGNALS`.
    """

    def __init__(self):
        self.bits, self._before, self._interrupted = 0, {}, math.inf

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in filter(_may_take, SIGNALS)}
        self.bits |= _remembered
        return self

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler in (None, _remember) else handler)

    def _remember(self, number, frame):
        self.bits |= SIGNALS[number]
        if number == signal.SIGINT:
            if time.monotonic() - self._interrupted > SAME_KEY_PRESS:
                raise KeyboardInterrupt
            self._interrupted = min(self._interrupted, time.monotonic())


def stopping_signal(requests):
    """The name of a signal that some rank was sent, by the bits of all ranks (`Federation.requests`); or None."""
    return next((signal.Signals(number).name for number, bit in SIGNALS.items() if requests & bit), None)
