"""The results of clients with models of their own (`--private`): each has its own best one. Not collective."""

import math

import torch

from fedmpi.ground.text import Log, format_ranges
from fedmpi.training.early_stopping import goal_of_client, selection_goal

log = Log(__name__)

RESULT = "result"  # the entry of `Client.kept` with a client's result so far


class OwnResults:
    """Which of its own models is each client's result: the best, or the last before it ended (`--stop`, `--patience`).

    A run without private layers, or one that ends for all clients at once with the last models, keeps none.

    Args:
        federation: the `Federation`. evaluation: an `EvaluationSettings`. goal: see `LoadedTask`.
    """

    def __init__(self, federation, evaluation, goal):
        self._federation, self._goal, self._is_best = federation, goal, evaluation.result == "best"
        may_end = federation.private.is_everything and (evaluation.stop or evaluation.patience)
        self.are_kept = bool(federation.private) and (self._is_best or bool(may_end))
        self._has_said = not self.are_kept or not self._is_best
        for client in federation.clients if self.are_kept else ():
            x, buffers = self.now(client)
            value = torch.tensor([-math.inf], dtype=torch.float64)
            client.kept[RESULT] = {"x": x, "buffers": buffers, "value": value}

    def now(self, client):
        """(x, buffers) of a client's own model as it is now."""
        federation = self._federation
        return federation.private.model(client, federation.server.x, federation.store.buffers)

    def of(self, client, is_settled=True):
        """(x, buffers) of a client's result; as it is now if results are not kept, or it is not settled."""
        kept = client.kept.get(RESULT) if is_settled else None
        return (kept["x"], kept["buffers"]) if kept else self.now(client)

    def consider(self, metrics, ended):
        """Keep the models after a round, with its `Metrics` or {}, that are better so far, of clients not yet ended."""
        if metrics and not self._has_said:
            self._say_who_has_other_goals(metrics)
        for client in self._federation.clients if self.are_kept and metrics else ():
            value = goal_of_client(self._goal, metrics, client.index)[2]
            if client.index in ended or (self._is_best and not value > client.kept[RESULT]["value"].item()):
                continue
            for name, now in zip(("x", "buffers"), self.now(client)):
                client.kept[RESULT][name].copy_(now)
            client.kept[RESULT]["value"].fill_(value)

    def _say_who_has_other_goals(self, metrics):
        """Name, on rank 0, the clients whose models are not compared by the task's goal, as they lack data for it."""
        name, number = selection_goal(self._goal, metrics)[0], len(next(iter(metrics.clients.values()), ()))
        chosen_by = [goal_of_client(self._goal, metrics, client)[0] for client in range(number)]
        for other in {*chosen_by} - {name} if self._federation.link.rank == 0 else ():
            clients = [client for client, metric in enumerate(chosen_by) if metric == other]
            log.warning(
                f"client{'s' * (len(clients) > 1)} {format_ranges(clients)}: {name} is not measured there, so the best "
                f"of their own models is chosen by {other}"
            )
        self._has_said = True

    def describe(self):
        """Which models are the results, as text for the closing table."""
        return f"each client's {'best' if self._is_best else 'last before it ended'}"
