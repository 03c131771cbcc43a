"""A tracker that writes the numbers of the rounds that it gets into the run folder."""

from fedmpi.runs.trackers.base import Tracker


class RecordsRounds(Tracker):
    """Keeps nothing in memory."""

    module = "json"

    def begin(self, folder, settings, done):
        self._path = folder / "rounds.txt"

    def round(self, number, values):
        with open(self._path, "a") as file:
            file.write(f"{number}\n")

    def close(self):
        """Nothing is open."""
