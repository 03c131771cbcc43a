"""The rooms of fedmpi/, and reproduction/ above them: none imports one above it, algorithms use vectors only, and
programs load what they need."""

import ast
import functools
import re
import subprocess
import sys

import pytest
from helpers import ROOT, execute

# From the ground up: a room imports those in earlier lines only, and its own modules.
FLOORS = [
    ["ground"],
    ["algorithms", "theory"],
    ["oracles", "models"],
    ["comm"],
    ["aggregation"],
    ["data"],
    ["federation"],
    ["tasks"],
    ["config"],
    ["runs"],
    ["training", "own_loop"],
    ["prepare"],
    ["cli"],
    ["train", "__main__", "huggingface"],
    ["reproduction"],  # beside the package: it uses all of it, and nothing uses it
]
HEIGHT = {name: number for number, floor in enumerate(FLOORS) for name in floor}

# Public, called by keywords: as many parameters as there are settings.
KEYWORD_FUNCTIONS = {"average", "join", "simulate", "train"}
THEOREMS = "fedmpi.theory"  # as many as a theorem has constants
MAX_PARAMETERS = 8
MAX_ENTRIES = 20
MAX_ARROWS = 100

# Words that are not the field's, or have several meanings -> better ones.
UNCLEAR = {
    r"goes? first": "overrides",
    r"of the moment\b": "current",
    r"sat out": "was absent",
    r"(?:kept|keeps?|keep \w+(?: \w+)*) aside": "held out",
    r"crowded": "oversubscribed",
    r"tells? no|\btold\b": "distinguish, say",
    r"who waits": "the ranks that wait",
    r"gives? the core": "yields",
    r"\balike\b": "equal, on all ranks",
    r"\bsee that\b": "check that",
    r"\btogether\(|turn_round|\bmeet\(": "agree, negate_ascent, synchronise",
    r"--output\b(?!=)": "--result",
    r"\bnaps?\b|\bNAPS?\b": "sleep",
    r"_unmoved|_move_statistics|_expect_alike|_beside_printed": "names that say what they do",
    r"\bgather(?:ed)? from all ranks": "allgather",
    r"\bfor ever\b": "forever",
    r"somebody's own|person's own|\bof one's own": "the user's own",
    r"\b(?:some|any|every)body\b": "clients, ranks, users",
    r"br(?:ing|ings|ought) [\w ]*to the disk": "flush",
    r"gone on with": "continued",
}
# Members of the standard library that Python 3.10, the oldest that setup.py allows, does not have.
NEWER = {"datetime.UTC", "hashlib.file_digest", "typing.Self", "enum.StrEnum", "contextlib.chdir", "itertools.batched"}
QUOTING = ("test_architecture.py",)  # it names what is checked


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {
    module_name(path): path
    for package in ("fedmpi", "reproduction")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.parent.name != "tests"
}


@functools.cache
def tree(name):
    return ast.parse(SOURCES[name].read_text(encoding="utf-8"))


@functools.cache
def imports(name):
    """[(module, line)] of every import of a module, also those inside functions."""
    found = []
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: relative import"
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(member if member in SOURCES else node.module, node.lineno) for member in members]
    return found


def room(name):
    package, *inner = name.split(".")
    return "".join(inner[:1]) if package == "fedmpi" else package


def height(name):
    return HEIGHT[room(name)]


def test_every_room_has_its_floor():
    assert {room(name) for name in SOURCES} - {""} <= set(HEIGHT)


def test_no_module_imports_one_above_it():
    wrong = []
    for name in filter(room, SOURCES):  # fedmpi/__init__.py shows what it likes
        for module, line in imports(name):
            if module in SOURCES and room(module):
                highest = height(name) if room(module) == room(name) else height(name) - 1
                wrong += [] if height(module) <= highest else [f"{name}, line {line} imports {module}"]
    assert not wrong, "\n".join(wrong)


def test_few_arrows_lead_from_room_to_room():
    """An arrow: files of one room import files of another one."""
    rooms = {name: room(name) or "fedmpi" for name in SOURCES if name.startswith("fedmpi")}
    arrows = {(rooms[name], rooms[module]) for name in rooms for module, _ in imports(name) if module in rooms}
    number = len([arrow for arrow in arrows if arrow[0] != arrow[1]])
    print(f"{number} arrows between {len(set(rooms.values()))} rooms")
    assert number <= MAX_ARROWS


def test_no_imports_form_a_circle():
    """An import also runs the `__init__.py` of the packages above the imported module."""
    needs = {}
    for name in SOURCES:
        needs[name] = {module for module, _ in imports(name) if module in SOURCES} - {name}
        for module in list(needs[name]):
            packages = {module[:dot] for dot in range(len(module)) if module[dot] == "."}
            needs[name] |= {package for package in packages if not f"{name}.".startswith(f"{package}.")}
    needs["fedmpi"] = set()  # it imports when an attribute is asked for
    while free := [name for name, modules in needs.items() if not modules & set(needs)]:
        for name in free:
            del needs[name]
    # What is left is in a circle, or needs what is.
    assert not needs, "\n".join(f"{name} imports {modules & set(needs)}" for name, modules in needs.items())


def test_algorithms_use_vectors_only():
    wrong, ours = [], ("fedmpi.algorithms", "fedmpi.ground.")
    for name in SOURCES:
        for module, line in imports(name) if room(name) == "algorithms" else ():
            top = module.split(".")[0]
            allowed = top in sys.stdlib_module_names or module == "torch" or module.startswith(ours)
            wrong += [] if allowed else [f"{name}, line {line} imports {module}"]
    assert not wrong, "\n".join(wrong)


def test_only_comm_and_what_measures_or_checks_it_use_mpi():
    library = "fedmpi.comm.start.mpi_library"
    users = {room(name) for name in SOURCES for module, _ in imports(name) if module.split(".")[0] == "mpi4py"}
    assert users == {"comm", "own_loop"}  # the latter for the type of a communicator
    users = {room(name) for name in SOURCES for module, _ in imports(name) if module.startswith(library)}
    assert users <= {"comm", "cli"}


def test_only_one_module_imports_hugging_faces_libraries():
    """Extras: what a user has not asked for is not loaded, not even inside functions."""
    extras = {"transformers", "peft", "accelerate", "datasets", "trl", "lightning", "pytorch_lightning"}
    users = {name for name in SOURCES for module, _ in imports(name) if module.split(".")[0] in extras}
    assert users == {"fedmpi.huggingface"}
    assert not [name for name in SOURCES for module, _ in imports(name) if module.startswith("fedmpi.huggingface")]


def test_nothing_is_pickled():
    """Lower-case calls of mpi4py communicators pickle; so do these modules."""
    pickling = {"send", "recv", "bcast", "gather", "scatter", "allgather", "allreduce", "reduce", "alltoall"}
    for name, path in SOURCES.items():
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.Attribute) and node.attr in pickling:
                owner = ast.unparse(node.value)
                assert not owner.lower().endswith(("comm", "node", "comm_world")), f"{path}:{node.lineno}: {owner}"
        modules = {module.split(".")[0] for module, _ in imports(name)} & {"pickle", "dill", "cloudpickle", "shelve"}
        assert not modules or path.name == "pickled.py", f"{path} imports {modules}"


def loaded(program):
    """The modules that a new process has loaded after some statements."""
    code = f"{program}\nimport sys\nprint(*sys.modules)"
    ended = execute([sys.executable, "-c", code], cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.splitlines()[-1].split())


def test_training_does_not_load_what_only_prepares_data():
    names = loaded(
        "import fedmpi.train, fedmpi.training.build\n"
        "from fedmpi.training.config import read_command_line\n"
        "read_command_line(['--print_config'])"
    )
    assert "fedmpi.data.source" in names
    assert not [name for name in names if name.startswith("fedmpi.prepare")]


@pytest.mark.parametrize("program", ["cli.report", "cli.sweep", "prepare"])
def test_programs_on_files_start_without_torch_and_mpi(program):
    assert not {"torch", "mpi4py"} & loaded(f"import fedmpi.{program}.__main__")


def test_the_oldest_python_has_what_is_used():
    """A checkpoint's manifest once used datetime.UTC: with Python 3.10 no checkpoint could be written."""
    used = {ast.unparse(node) for name in SOURCES for node in ast.walk(tree(name)) if isinstance(node, ast.Attribute)}
    assert not used & NEWER


def test_the_package_has_few_entries():
    entries = {path.relative_to(ROOT / "fedmpi").parts[0] for path in (ROOT / "fedmpi").rglob("*.py")}
    assert len(entries) <= MAX_ENTRIES, sorted(entries)


def functions(node, prefix):
    """(qualified name, its node) of every function in a tree."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, child
            yield from functions(child, name)
        else:
            yield from functions(child, prefix)


def num_parameters(function):
    """How many parameters a function has besides self."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if one]
    return len([name for name in names if name not in ("self", "cls")])


def test_no_function_has_many_parameters():
    found = {name: num_parameters(function) for module in SOURCES for name, function in functions(tree(module), module)}
    many = {name for name, number in found.items() if number > MAX_PARAMETERS}
    public = {name for name in many if name.rpartition(".")[2] in KEYWORD_FUNCTIONS or name.startswith(THEOREMS)}
    assert not many - public, f"more than {MAX_PARAMETERS} parameters"


VAGUE = {"its", "one", "some", "what", "mine"}


def test_variables_say_what_they_hold():
    ours = [module for module in SOURCES if module.partition(".")[0] == "fedmpi"]
    nodes = [(module, node) for module in ours for node in ast.walk(tree(module))]
    found = [f"{module}:{node.lineno}" for module, node in nodes if isinstance(node, ast.Name) and node.id in VAGUE]
    found += [f"{module}:{node.lineno}" for module, node in nodes if isinstance(node, ast.arg) and node.arg in VAGUE]
    assert not found, f"called one of {sorted(VAGUE)}: {found}"


def unclear_words():
    """ "file:line: word: text" of every line with a word of `UNCLEAR`."""
    places = [ROOT / name for name in ("fedmpi", "reproduction", "tests", "launch", "slurm", "docs", "examples")]
    files = [ROOT / "README.md", *(path for place in places for path in place.rglob("*") if path.is_file())]
    for path in files:
        if path.suffix not in (".py", ".md", ".yaml", ".sh", ".sbatch", "") or path.name in QUOTING:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            for word, better in UNCLEAR.items():
                if re.search(word, line, re.IGNORECASE):
                    yield f"{path.relative_to(ROOT)}:{number}: better {better}: {line.strip()}"


def test_words_are_clear():
    found = list(unclear_words())
    assert not found, "\n".join(found)


def test_no_merge_was_left_half_done():
    pattern = "^(<{7}|>{7}) "
    ended = subprocess.run(["git", "-C", ROOT, "grep", "-nE", pattern], capture_output=True, text=True)
    assert ended.stdout == ""
