"""One round of a federation: who takes part, with which weight, and when."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Round:
    """What all ranks agree on before a round begins; nothing of it changes while the round runs.

    Attributes:
        index: of the round, from 0; -1 during the start.
        iteration: t at the end of its local steps, counted from the start of the run (0 during the start).
        participants: sorted numbers of the clients that take part.
        weights: their weights in every average of the round, in that order.
        num_steps: K, the participants' mean number of local steps, by their weights.
        participation: the participants' share in the weight of all clients, |S| / N; in (0, 1].
        nominal_steps: q, by which the shared clock advances in a round: the largest number of local steps
            of any client, or of an even share if the samples are dealt anew in every round.
    """

    index: int
    iteration: int
    participants: tuple[int, ...]
    weights: tuple[float, ...]
    num_steps: float
    participation: float
    nominal_steps: int

    def __str__(self) -> str:
        return "the start" if self.index < 0 else f"round {self.index + 1}"

    @property
    def first_iteration(self) -> int:
        """t before the round's first local step."""
        return self.iteration - self.nominal_steps

    def shortened(self, num_steps: int) -> "Round":
        """The same round with `num_steps` local steps of every client."""
        iteration = self.first_iteration + num_steps
        return dataclasses.replace(self, iteration=iteration, num_steps=float(num_steps), nominal_steps=num_steps)
