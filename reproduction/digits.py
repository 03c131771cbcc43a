"""Every method of the five papers on the embedded digits: short runs on data, which ``--check`` makes again."""

import pathlib
import tempfile

import fedmpi
from fedmpi.ground.errors import UserError
from reproduction.csv_files import read_rows, write_tables

ROUNDS = 24
COMMON = {
    "task": {"name": "classification", "data": "digits"},
    "partition": {"name": "dirichlet"},
    "model": {"name": "mlp", "hidden": 16},
    "clients": 4,
    "participation": 0.75,
    "local_steps": 4,
    "batch_size": 16,
    "rounds": ROUNDS,
    "eval_every": ROUNDS // 4,
    "dtype": "float64",  # so that another processor's rounding stays small in so short a run
    "threads": 1,
    "seed": 7,
}
OF_PAPER = {"auc": {"task": {"name": "auc", "data": "digits"}, "partition": {"name": "even"}}}
METHODS = {
    "fafed": ("fedavg", "scaffold", "stem", "fedadam", "fedams", "fafed", "fafed_code", "naive_adaptive_fedavg"),
    "lamb": ("fedavg", "local_amsgrad", "fed_lamb"),
    "mom": ("fedavg_m", "scaffold_m", "fedavg_m_vr", "scaffold_m_vr", "mb_storm", "ce_lsgd"),
    "zo": ("fedzo", "fafedzo", "attack"),
    "auc": ("coda", "coda_average", "codasca", "momentum_local_sgda", "fmgda"),
}
# Settings with which no part of a method is without effect: a second moment that falls within the run, so that the
# maximum of those before matters; step sizes of the server that are no plain average; stages that end; other step sizes
# and weights of the ascent.
FORGETS, DUAL = {"second_moment_decay": 0.5}, {"dual_step_size": 0.02}
STAGES = {"stage_rounds": 8, "prox_weight": 0.1} | DUAL
OWN = {
    "local_amsgrad": FORGETS,
    "fed_lamb": FORGETS | {"layer_decay": 0.05},
    "fedams": FORGETS | {"option": 2, "epsilon": 1e-3},
    "scaffold": {"server_step_size": 0.8},
    "fafed_code": {"first_step": "adaptive", "prev_grad_scale": 0.95},
    "coda": STAGES | {"prox": "closed"},
    "coda_average": STAGES | {"name": "coda", "stage_output": "average", "stage_growth": 2.0},
    "codasca": STAGES | {"server_step_size": 0.8},
    "momentum_local_sgda": DUAL | {"dual_fresh_weight": 0.3, "time_step": 0.9},
    "fmgda": DUAL | {"dual_fresh_weight": 0.3},
    "attack": {"name": "fafedzo"},
}
OWN |= dict.fromkeys(("fedavg_m", "scaffold_m", "fedavg_m_vr", "scaffold_m_vr", "mb_storm"), {"server_step_size": 0.3})
CLASSIFIER = {"clients": 1, "participation": 1.0, "rounds": 40, "eval_every": 40, "partition": {"name": "even"}}
ATTACK = {
    "task": {"name": "attack"},
    "partition": {"name": "uneven"},
    "model": None,
    "rounds": 8,
    "eval_every": 2,
    "batch_size": 8,
}
COLUMNS = ("paper", "method", "round", "metric", "value")
METRICS = ("train_loss", "accuracy", "auc", "attack_loss", "distortion")


def measure(paper, method):
    """Rows of `COLUMNS`, all as text, of a method: its metrics at four rounds."""
    algorithm = {"name": method, **OWN.get(method, {})}
    with tempfile.TemporaryDirectory() as folder:
        settings = COMMON | OF_PAPER.get(paper, {})
        if method == "attack":  # on a network that is trained first
            fedmpi.train(algorithm={"name": "fedavg"}, out=folder, name="network", **COMMON | CLASSIFIER)
            task = ATTACK["task"] | {"classifier": f"{folder}/network"}
            settings = {key: one for key, one in (settings | ATTACK).items() if one is not None} | {"task": task}
        run = fedmpi.train(algorithm=algorithm, out=folder, name="it", **settings)
        return [
            {"paper": paper, "method": method, "round": str(record["round"]), "metric": name, "value": f"{value:.10g}"}
            for record in run.metrics
            for name, value in record.items()
            if name in METRICS
        ]


def path_of(results):
    """The CSV file of the committed values."""
    return pathlib.Path(results) / "digits.csv"


def write(results):
    """Make all runs, and write the file; returns its path."""
    rows = [row for paper, methods in METHODS.items() for method in methods for row in measure(paper, method)]
    write_tables((path_of(results), COLUMNS, rows))
    return path_of(results)


def pairs(results, paper, method):
    """(what, the committed value, the value of a new run) of a method, as text.

    Raises:
        UserError: if the file lacks it.
    """
    known = {tuple(row[key] for key in COLUMNS[:-1]): row["value"] for row in read_rows(path_of(results), COLUMNS)}
    found = {tuple(row[key] for key in COLUMNS[:-1]): row["value"] for row in measure(paper, method)}
    if not found.keys() <= known.keys():
        raise UserError(f"{path_of(results)}: lacks {method}: restore it (git checkout)")
    for key, value in found.items():
        yield f"{key[1]}: {key[3]} after round {key[2]}", known[key], value


if __name__ == "__main__":
    print(write(pathlib.Path(__file__).parent / "results"))
