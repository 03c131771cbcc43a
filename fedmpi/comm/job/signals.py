"""Signals that ask a run to stop: all ranks learn of them at the end of a round, and stop together.

Before the first round, those that end a process do so at once, by what the system or the user does at them: there is
nothing to save, and a reader of data may be stuck. Others warn of a time limit, and are remembered from the start.
"""

import math
import signal
import threading
import time

from fedmpi.comm.faults.marks import mark

# Signal -> the bit with which a rank reports it to the others (`Federation.requests`).
SIGNALS = {signal.SIGINT: 1, signal.SIGTERM: 2, signal.SIGUSR1: 4}
# These only if they would end the program: not if the user ignores (nohup) or handles them.
SIGNALS |= {signal.SIGHUP: 64, signal.SIGUSR2: 128, signal.SIGXCPU: 256}  # 8 to 32, 512: `runs.checkpoints.writer`
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_KEY_PRESS = 1.0  # seconds in which both the terminal and the launcher may pass on the same Ctrl-C


_remembered = 0  # bits of the signals that came before there was a `StopSignals`


def remember_signals():
    """Remember the warnings from now on, for the next `StopSignals`."""
    for number in WARNINGS:
        if _may_take(number):
            signal.signal(number, _remember)


def _may_take(number):
    return SIGNALS[number] < 8 or signal.getsignal(number) in (signal.SIG_DFL, _remember)


def _remember(number, frame):
    global _remembered
    _remembered |= SIGNALS[number]


class StopSignals:
    """A context in which the signals of `SIGNALS` are only remembered: those of `ENDING` after `begin_rounds`.

    A second SIGINT some time after the first one raises KeyboardInterrupt: the user does not want to wait. Python lets
    only the main thread handle signals: in any other thread, nothing is remembered.

    Attributes:
        bits: of the signals that have come, as in `SIGNALS`.
    """

    def __init__(self):
        self.bits, self._before, self._interrupted, self._prepares = 0, {}, math.inf, False

    def __enter__(self):
        self._take(WARNINGS)
        self.bits |= _remembered
        self._prepares = True
        mark("prepares", True)
        return self

    def begin_rounds(self):
        """From now on there is something to save. A second call does nothing."""
        if self._prepares:
            self._take(ENDING)
            self._prepares = False
            mark("prepares", False)

    def _take(self, numbers):
        if threading.current_thread() is threading.main_thread():
            for number in filter(_may_take, numbers):
                self._before[number] = signal.signal(number, self._remember)

    def __exit__(self, *error):
        self._prepares = False
        mark("prepares", False)
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
