"""What settings are called in other systems, and in this one; the table is read only when a key is unknown."""

import functools
import pathlib
from collections.abc import Collection, Container
from typing import Any

import yaml

from fedmpi.ground.settings import nearest

_ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad", "fedams")  # Flower's eta is the server's here, and eta_l the clients'
_ON_SERVER = (*_ADAPTIVE, "fedavgm", "mimeadam")  # whose momentum, second moment and epsilon are the server's


@functools.cache
def table() -> dict[str, Any]:
    """foreign_names.yaml as a dict, and in it "ours": their names -> ours, more than one if it has several meanings."""
    found: dict[str, Any] = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    found["ours"] = {}
    for ours, names in found["names"].items():
        for theirs in names.split():
            found["ours"].setdefault(theirs, []).append(ours)
    return found


def our_names(name: str, known: Container[str], algorithm: str = "") -> list[str]:
    """Our names of a foreign one, like "eta": those among the `known` keys of settings, or if there are none, all."""
    ours: list[str] = table()["ours"].get(name, [])
    found = [our_key for our_key in ours if our_key in known]
    on_server = algorithm in _ON_SERVER or "algorithm.step_size" not in known  # the clients of `average` are torch's
    if name in ("lr", "learning_rate") and algorithm not in (*_ADAPTIVE, "fedavgm"):  # the clients', in all systems
        return ours[:1]
    if name == "eta" and algorithm in _ADAPTIVE:
        return ["algorithm.server_step_size"]
    if found and name in table()["of_server"].split() and not on_server:
        return [our_key for our_key in found if algorithm == "diloco" and our_key == "algorithm.momentum"]
    if name.startswith("adam_") and (on_server or not found):  # of clients whose steps are Adam's
        return []
    if "algorithm.first_moment_decay" in found:  # the inner optimizer's; momentum is the outer one's
        return found[:1]
    return found or [our_key for our_key in ours if not our_key.startswith("oracle.")]


def similar(name: str, known: Collection[str]) -> str:
    """`nearest`, but for slips of the keys only: a foreign name without a counterpart here gets no guess."""
    words = set(name.split("_"))
    near = [key for key in known if not set(key.split("_")) < words]  # min_local_steps is not local_steps
    return "" if name in table()["no_counterpart"].split() or name in table()["ours"] else nearest(name, near, 0.8)


def our_name(key: str, known: Container[str], algorithm: str = "") -> str:
    """The end of a message about the unknown setting `key`, like ": its name in fedmpi is --seed"; or ""."""
    group, _, name = key.rpartition(".")
    if not group and name in table()["advice"]:
        return f": {table()['advice'][name]}"
    ours = [our_key for our_key in our_names(name, known, algorithm) if our_key.startswith(group) and our_key != key]
    if not ours:
        return ""
    text = f": its name in fedmpi is {' or '.join(f'--{our_key}' for our_key in ours)}"
    if len(ours) == 2 and ours[0] in table()["meanings"]:
        text += f" {table()['meanings'][ours[0]]}"
    if ours[0] == "partition.concentration":
        text += ", of --partition dirichlet"
    elif ours[0] not in known:
        text += f", which algorithm {algorithm} does not have"
    return text + ", a share of the clients" * (name in table()["counts"].split())
