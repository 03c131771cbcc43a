"""Settings files of the papers' experiments, with the results that the papers print.

A preset's key ``paper`` is not a setting. It contains

    source:   the paper and the place in it.
    printed:  metric -> algorithm -> value, for comparison; {} if the paper has only curves.
    methods:  algorithm -> its settings, used if ``--algorithm`` chooses another than the preset's.
"""

import pathlib
from typing import Any

from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import plain
from fedmpi.ground.settings import nearest

FOLDER = pathlib.Path(__file__).parent


def preset_names() -> list[str]:
    """Names of all presets, like "fafed/fashion_mnist_high"."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))


def preset_path(name: str) -> pathlib.Path:
    """The file of a preset; case, "-" and "_" in its name do not matter.

    Raises:
        UserError: if there is none of that name, with the nearest.
    """
    names = {plain(known): known for known in preset_names()}
    known = names.get(plain(name.removesuffix(".yaml")))
    if known is None:
        raise UserError(f"unknown preset '{name}'{nearest(name, names.values())}; --list presets shows them")
    return FOLDER / f"{known}.yaml"


def is_paper(paper: Any) -> bool:
    """Whether the value of a file's key "paper" has the form described above."""
    tables = [paper.get(key, {}) for key in ("printed", "methods")] if isinstance(paper, dict) else [None]
    return all(isinstance(table, dict) and all(isinstance(row, dict) for row in table.values()) for table in tables)


def summary(name: str) -> str:
    """One line about a preset: the first of its file."""
    with open(preset_path(name), encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()
