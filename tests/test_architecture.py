"""The rooms of the house: nobody imports one above it, and algorithms know vectors only."""

import ast
import sys

import pytest
from conftest import ROOT

# From the ground up; a room may import those before it. What stands in one line may not see each other.
FLOORS = [
    ["errors"],
    ["settings", "streams"],
    ["vectors", "registry", "comm", "checkpoint"],
    ["algorithms", "data", "models", "recorder"],
    ["oracles"],
    ["client", "fused"],
    ["federation", "tasks"],
    ["simulation", "costs", "presets"],
    ["config"],
    ["training", "alone", "runs"],
    ["main"],
    ["train", "bench", "report"],
    ["sweep"],
]


def imports(path):
    """(module, line) of every import in a file, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "fedmpi":
                for alias in node.names:
                    yield f"fedmpi.{alias.name}", node.lineno
            else:
                yield node.module, node.lineno


def room(path):
    return path.relative_to(ROOT / "fedmpi").parts[0].removesuffix(".py")


SOURCES = sorted((ROOT / "fedmpi").rglob("*.py"))


def test_every_room_has_its_floor():
    rooms = {room(path) for path in SOURCES} - {"__init__"}
    assert rooms <= {name for floor in FLOORS for name in floor}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_imports_upwards(path):
    if room(path) == "__init__":
        return  # the package's face shows what it likes
    height = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    is_program = path.name == "__main__.py"  # an entry point stands above everything
    for module, line in imports(path):
        words = [*module.split("."), ""]
        if words[0] == "fedmpi" and words[1] in height and words[1] != room(path) and not is_program:
            assert height[words[1]] < height[room(path)], f"{path}:{line} imports {module}"


@pytest.mark.parametrize("path", sorted((ROOT / "fedmpi" / "algorithms").glob("*.py")), ids=lambda path: path.name)
def test_algorithms_know_vectors_only(path):
    for module, line in imports(path):
        top = module.split(".")[0]
        ours = ("fedmpi.algorithms", "fedmpi.settings", "fedmpi.errors")
        allowed = top in sys.stdlib_module_names or module == "torch" or module.startswith(ours)
        assert allowed, f"{path}:{line} imports {module}"


def test_only_comm_knows_mpi():
    for path in SOURCES:
        users = [module for module, _ in imports(path) if module.split(".")[0] == "mpi4py"]
        assert not users or room(path) in ("comm", "bench"), f"{path} imports {users}"


def test_nothing_is_pickled():
    """Lower-case calls of mpi4py communicators pickle; so do these modules."""
    pickling = {"send", "recv", "bcast", "gather", "scatter", "allgather", "allreduce", "reduce", "alltoall"}
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in pickling:
                owner = ast.unparse(node.value)
                assert not owner.lower().endswith(("comm", "node", "comm_world")), f"{path}:{node.lineno}: {owner}"
        modules = {module.split(".")[0] for module, _ in imports(path)} & {"pickle", "dill", "cloudpickle", "shelve"}
        assert not modules or path.name == "pickled.py", f"{path} imports {modules}"
