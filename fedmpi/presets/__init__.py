"""Settings files of the papers' experiments; each holds, beside the settings, what the paper printed.

A preset's key ``paper`` is no setting. It says

    source:   the paper and where in it.
    printed:  metric -> algorithm -> value, for comparison; {} where the paper has only curves.
    methods:  algorithm -> its settings, taken when ``--algorithm`` chooses another than the preset's.
"""

import pathlib

from fedmpi.errors import UserError
from fedmpi.settings import nearest

FOLDER = pathlib.Path(__file__).parent


def preset_names():
    """Names of all presets, like "fafed/fashion_mnist_high"."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))


def preset_path(name):
    """The file of a preset.

    Raises:
        UserError: if there is none of that name, with the nearest.
    """
    plain = name.lower().replace("-", "_").removesuffix(".yaml")
    if plain not in preset_names():
        raise UserError(f"unknown preset '{name}'{nearest(plain, preset_names())}; --list presets shows them")
    return FOLDER / f"{plain}.yaml"


def is_paper(paper):
    """Whether what a file has under its key "paper" is as said above."""
    tables = [paper.get(key, {}) for key in ("printed", "methods")] if isinstance(paper, dict) else [None]
    return all(isinstance(table, dict) and all(isinstance(row, dict) for row in table.values()) for table in tables)


def summary(name):
    """What a preset is, in the words of its first line."""
    with open(preset_path(name), encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()
