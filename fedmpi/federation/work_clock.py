"""How long a rank's clients have worked."""

import time


class WorkClock:
    """Wall and CPU time in which this rank's clients have worked, communication left out."""

    def __init__(self) -> None:
        self._wall, self._cpu = 0.0, 0.0
        self._begun: tuple[float, float] | None = None

    def begin(self) -> None:
        """The clients begin to work."""
        self._begun = time.perf_counter(), time.process_time()

    def end(self) -> float:
        """They have done their work; returns the seconds since they began."""
        wall, cpu = self.wall() - self._wall, self.cpu() - self._cpu
        self._wall, self._cpu, self._begun = self._wall + wall, self._cpu + cpu, None
        return wall

    def wall(self) -> float:
        """Seconds of work so far."""
        return self._wall + (time.perf_counter() - self._begun[0] if self._begun else 0.0)

    def cpu(self) -> float:
        """Seconds of CPU time of all threads of the process in it."""
        return self._cpu + (time.process_time() - self._begun[1] if self._begun else 0.0)
