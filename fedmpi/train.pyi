"""What a type checker and an editor know of fedmpi.train; `python tests/programs/train_stub.py` prints it."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from fedmpi.algorithms.base import Algorithm

Record = dict[str, float]
Choice = str | Mapping[str, Any]

class Run:
    model: torch.nn.Module
    metrics: list[Record]
    final: Record
    folder: Path
    settings: dict[str, Any]

    def frame(self) -> Any: ...

def main(arguments: Sequence[str] | None = None) -> None: ...

class _Train:
    @staticmethod
    def main(arguments: Sequence[str] | None = None) -> None: ...
    def __call__(
        self,
        *,
        algorithm: Choice | Algorithm | type[Algorithm] = "fafed",
        task: Choice | Any = None,
        data: str | PathLike[str] | Sequence[Any] | Callable[[int], Any] | None = None,
        test_data: Any = None,
        cache: bool = False,
        model: Choice | torch.nn.Module | Callable[..., torch.nn.Module] | None = None,
        partition: Choice | Any = None,
        oracle: Choice | Any = None,
        preset: str | None = None,
        config: str | PathLike[str] | None = None,
        on_round: Callable[[Record], object] | None = None,
        on_evaluation: Callable[[Record], object] | None = None,
        comm: Any = None,
        rounds: int = 100,
        epochs: float | None = None,
        local_steps: int = 10,
        local_epochs: float | None = None,
        batch_size: int = 50,
        first_batch_size: int | None = None,
        clients: int | None = None,
        participation: float = 1.0,
        weighting: str = "uniform",
        clip_norm: float | None = None,
        weight_decay: float = 0.0,
        result: str = "last",
        private: str | None = None,
        freeze: str | None = None,
        holdout: float = 0.0,
        seed: int = 0,
        eval_every: int | None = None,
        evaluate: str = "subset",
        evaluate_samples: int = 1000,
        stop: str | None = None,
        patience: int | None = None,
        data_dir: str | PathLike[str] | None = None,
        out: str | PathLike[str] = "runs",
        name: str | None = None,
        track: str | None = None,
        resume: str | PathLike[str] | None = None,
        init: str | PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        checkpoint_minutes: float = 10.0,
        checkpoint_keep: int = 2,
        checkpoint_clients: str | PathLike[str] | None = None,
        dtype: str = "float32",
        device: str = "auto",
        threads: int | None = None,
        ranks: int | None = None,
        transport: str = "auto",
        reduction: str = "plain",
        timeout: float = 1800.0,
        on_loss: str = "end",
        check_replicas: int | None = None,
        channels_last: bool = True,
        direct_gradients: bool = True,
        fused_update: bool = False,
        stack: int = 1,
        tf32: bool = False,
        deterministic: bool = False,
        cuda_graph: str = "auto",
        tune_malloc: bool = True,
        **settings: Any,
    ) -> Run: ...

train: _Train
