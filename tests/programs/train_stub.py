"""Print the text of fedmpi/train.pyi: the names and the types of all settings, for editors and type checkers."""

import dataclasses

from fedmpi.config.run import Run

HEAD = '''"""What a type checker and an editor know of fedmpi.train; `python tests/programs/train_stub.py` prints it."""

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
'''
TAIL = """        **settings: Any,
    ) -> Run: ...

train: _Train
"""
PATHS = ("data_dir", "out", "resume", "init", "checkpoint_clients")


def text():
    """The content of fedmpi/train.pyi."""
    lines = []
    for field in dataclasses.fields(Run):
        kind = getattr(field.type, "__name__", str(field.type)) if isinstance(field.type, type) else str(field.type)
        kind = kind.replace("str", "str | PathLike[str]") if field.name in PATHS else kind
        default = f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
        lines.append(f"        {field.name}: {kind} = {default},\n")
    return HEAD + "".join(lines) + TAIL


if __name__ == "__main__":
    print(text(), end="")
