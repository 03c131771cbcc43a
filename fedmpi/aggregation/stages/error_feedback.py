"""Compressed moves, whose errors are sent with the next ones."""

import dataclasses
from typing import ClassVar

import torch

from fedmpi.aggregation.stages.base import Sent, Stage
from fedmpi.ground.settings import setting


@dataclasses.dataclass(kw_only=True)
class ErrorFeedback(Stage):
    """Replace a client's move by its signs, or its largest values; add what is left out to the client's next move.

    Each row is compressed as a whole: "sign" to the signs times the mean size, "top_k" to the k values of largest size.
    Means of squares, float buffers and what is sent before the first round pass unchanged. Rows keep their length: this
    is how methods with compressed moves learn, and not fewer bytes, which codecs give.

    Source: Wang, Lin, Chen, "Communication-Efficient Adaptive Federated Learning", ICML 2022, arXiv:2205.02719,
    Algorithm 2 (FedCAMS), which is this stage with the algorithm fedams.
    """

    name = "error_feedback"
    needs_start = True
    writes_start: ClassVar[bool] = False
    kept_rows = ("error",)

    compressor: str = setting(
        "sign", "sign: signs times the mean size; top_k: the largest values", among=("sign", "top_k")
    )
    fraction: float = setting(
        1 / 64, "top_k: k / d, fraction of the values that are kept; at least one is", above=0, most=1
    )

    def apply(self, sent: Sent) -> None:
        start = sent.start or {}
        for name in sent.moment.rows if sent.moment.round_index >= 0 else ():
            if sent.kinds.get(name, "number") in ("number", "square"):
                continue
            row, error = sent.rows[name], sent.kept["error"][name]
            row.sub_(start[name]).add_(error)
            error.copy_(row)
            self._compress(row)
            error.sub_(row)
            row.add_(start[name])

    def _compress(self, row: torch.Tensor) -> None:
        if self.compressor == "sign":
            size = torch.linalg.vector_norm(row, 1) / len(row)
            row.sign_().mul_(size)
            return
        number = max(1, round(self.fraction * len(row)))
        places = row.abs().topk(number, sorted=False).indices
        largest = row[places]
        row.zero_()[places] = largest
