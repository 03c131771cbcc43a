"""An experiment of a second, and the program on its file."""

import csv
import sys

from helpers import ROOT, execute

TINY = {
    "title": "A quadratic",
    "paper": "fafed",
    "place": "Table 9",
    "panels": {
        "quadratic": {
            "task": "quadratic",
            "clients": 2,
            "rounds": 4,
            "local_steps": 2,
            "eval_every": 2,
            "checkpoint_every": 1,
        }
    },
    "methods": {
        "FedAvg": {"algorithm": "fedavg", "algorithm.step_size": 0.1},
        "FAFED": {"algorithm": "fafed", "algorithm.step_size": 0.01},
        "too fast": {"algorithm": "fedavg", "algorithm.step_size": 1.0e30},
    },
    "scales": {"small": {"says": "small as it is"}},
    "metric": "distance",
    "printed": {"metric": "distance", "place": "Table 9", "values": {"quadratic": {"FedAvg": 0.5, "FAFED": 0.25}}},
    "claims": [{"claim": "best", "ahead": "FedAvg", "of": ["too fast"]}],
    "findings": {"small": ["It is so."], "full": ["Not here."]},
}


def reproduce(*words):
    return execute([sys.executable, "-m", "reproduction", *words], cwd=ROOT)


def rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
