"""Change single places of fedmpi and see whether its tests notice: ``python tests/mutate.py --number 300``.

Each change is made in a copy of the working tree, then the tests of the changed file's room run in it until one fails.
A line per change goes to the record: a change that is in it already is not tried again, so that a stopped run goes on.
With ``--again RECORD`` the same changes are tried that another record contains: what was noticed then must be noticed
now. Changes are named by file and text, not by line, so that they are found in another state of the file.
"""

import argparse
import ast
import collections
import concurrent.futures
import json
import os
import pathlib
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT = 1800  # seconds for the tests of one change: one that hangs is noticed
COMPARISONS = {"==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "is": "is not", "is not": "is"}
OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*"}
TOKENS = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Is: "is",
    ast.IsNot: "is not", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
}  # fmt: skip
# Beside the folder of the same name: tests that run a whole federation notice changes in these rooms.
ALSO = {
    "aggregation": ["tests/federation", "tests/config"],
    "membership": ["tests/own_loop"],
    "algorithms": ["tests/federation"],
    "completion": ["tests/config"],
}
EVERYWHERE = ["tests/test_golden.py", "tests/test_python_api.py", "tests/test_public_face.py", "tests/test_errors.py"]
UNDER_MPIRUN = ("comm", "aggregation", "federation", "checkpoints", "membership")  # tests/mpi on 2 ranks, too


def changes(path):
    """All changes of one file: (kind, line, the line's text, the new text, how often it is there before)."""
    text = path.read_text(encoding="utf-8")
    lines, seen = text.splitlines(), collections.Counter()
    for kind, node, begin, end, new in _places(ast.parse(text)):
        if node.lineno != node.end_lineno and kind != "line":
            continue
        line = lines[begin[0] - 1]
        raw = line.encode()
        new = new if isinstance(new, str) else raw[begin[1] : end[1]].decode().replace(*new)  # brackets stay
        changed = (raw[: begin[1]] + new.encode() + raw[end[1] :]).decode() if begin[0] == end[0] else None
        if changed is None or changed == line:
            continue
        seen[line, changed] += 1
        yield {"kind": kind, "line": line, "new": changed, "nth": lines[: begin[0] - 1].count(line)}


def _places(tree):
    """(kind, node, begin, end, new text or (old word, new word)) of all changes; begin and end are (line, byte)."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TOKENS:
            token = TOKENS[type(node.ops[0])]
            yield from _between("comparison", node, node.left, node.comparators[0], (token, COMPARISONS[token]))
        elif isinstance(node, ast.BinOp) and type(node.op) in TOKENS:
            token = TOKENS[type(node.op)]
            yield from _between("operator", node, node.left, node.right, (token, OPERATORS[token]))
        elif isinstance(node, ast.Constant) and id(node) not in texts:
            new = _other_constant(node.value)
            if new is not None:
                yield "constant", node, _begin(node), _end(node), new
        elif isinstance(node, ast.Expr | ast.AugAssign) and node.lineno == node.end_lineno:
            if isinstance(node, ast.AugAssign) or isinstance(node.value, ast.Call):
                yield "line", node, _begin(node), _end(node), "pass"
        elif isinstance(node, ast.Call) and len(node.args) > 1 and node.lineno == node.end_lineno:
            first, second = node.args[:2]
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                new = f"{ast.unparse(second)}, {ast.unparse(first)}"
                yield "arguments", node, _begin(first), _end(second), new


def _between(kind, node, left, right, words):
    if left.end_lineno == right.lineno:
        yield kind, node, _end(left), _begin(right), words


def _other_constant(value):
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return str(value + 1)
    return str(value * 2) if isinstance(value, float) and value else None


def _begin(node):
    return node.lineno, node.col_offset


def _end(node):
    return node.end_lineno, node.end_col_offset


def sample(number, seed):
    """`number` changes, from all rooms in turn."""
    draw, of_rooms = random.Random(seed), collections.defaultdict(list)
    for path in sorted((ROOT / "fedmpi").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        of_rooms[_room(file)] += [{"file": file, **change} for change in changes(path)]
    for found in of_rooms.values():
        draw.shuffle(found)
    drawn = []
    while len(drawn) < number and any(of_rooms.values()):
        drawn += [found.pop() for found in of_rooms.values() if found]
    return drawn[:number]


def _room(file):
    parts = pathlib.Path(file).parts
    return parts[1] if len(parts) > 2 else parts[1].removesuffix(".py")


def apply(tree, change):
    """Make a change in a copy; returns the file's text before it, or None if the place is not there any more."""
    path = tree / change["file"]
    if not path.is_file():
        return None
    before = path.read_text(encoding="utf-8")
    lines = before.split("\n")
    found = [number for number, line in enumerate(lines) if line == change["line"]]
    if not found:
        return None
    lines[found[min(change["nth"], len(found) - 1)]] = change["new"]
    path.write_text("\n".join(lines), encoding="utf-8")
    return before


def tests_of(tree, file):
    """The commands whose tests are those of a file's room."""
    room, name = _room(file), pathlib.Path(file).stem
    own = [f"tests/{room}", *ALSO.get(room, ()), f"tests/test_{room}.py"]
    paths = [tree / path for path in dict.fromkeys([*own, *EVERYWHERE]) if (tree / path).exists()]
    files = [one for path in paths for one in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    files.sort(key=lambda path: name not in path.read_text(encoding="utf-8"))  # those that name the module come first
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    yield [*words, *map(str, files)]
    if room in UNDER_MPIRUN:
        yield ["mpirun", "-np", "2", *words, "--with-mpi", "tests/mpi"]


def is_noticed(tree, change):
    """(whether a test fails, the last line that says so); None for a change whose place is not there any more."""
    before = apply(tree, change)
    if before is None:
        return None
    try:
        for words in tests_of(tree, change["file"]):
            code, output = _run(words, tree)
            if code:
                failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return True, failed[0][:160] if failed else f"exit code {code}"
        return False, ""
    finally:
        (tree / change["file"]).write_text(before, encoding="utf-8")


def _run(words, tree):
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("FEDMPI_TEST_WARM", None)
    with tempfile.TemporaryFile("w+") as output:
        job = subprocess.Popen(words, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            code = job.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = -1
        for folder in pathlib.Path("/proc").glob("[0-9]*"):  # also ranks, which are groups of their own
            try:
                if os.getsid(int(folder.name)) == job.pid:
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:
                continue
        job.wait()
        output.seek(0)
        return code, output.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", type=pathlib.Path, default=ROOT / "mutations.jsonl")
    parser.add_argument("--again", type=pathlib.Path, help="a record of earlier: try the same changes")
    asked = parser.parse_args()
    known = [json.loads(line) for line in asked.record.read_text().splitlines()] if asked.record.exists() else []
    tried = {_key(change) for change in known}
    former = [json.loads(line) for line in asked.again.read_text().splitlines()] if asked.again else []
    to_try = [{key: change[key] for key in KEYS} for change in former] or sample(asked.number, asked.seed)
    to_try = [change for change in to_try if _key(change) not in tried]
    trees, folder = queue.SimpleQueue(), pathlib.Path(tempfile.mkdtemp(prefix="fedmpi-mutate-"))
    for number in range(asked.processes):
        tree = folder / str(number)
        shutil.copytree(ROOT, tree, ignore=_left_out)
        trees.put(tree)

    code, output = _run([sys.executable, "-m", "pytest", "-q", "--collect-only", "tests"], tree)
    if code:  # every change would look as if it were noticed
        sys.exit(f"the tests of an unchanged copy cannot be collected:\n{output[-2000:]}")

    def attempt(change):
        tree = trees.get()
        try:
            return change, is_noticed(tree, change)
        finally:
            trees.put(tree)

    with concurrent.futures.ThreadPoolExecutor(asked.processes) as pool, asked.record.open("a") as record:
        for change, outcome in pool.map(attempt, to_try):
            noticed, by = outcome or (None, "the place is not there any more")
            known.append({**change, "noticed": noticed, "by": by})
            print(json.dumps(known[-1]), file=record, flush=True)
            state = {True: "noticed", False: "MISSED", None: "gone"}[noticed]
            print(f"{state:8} {change['file']}: {change['new'].strip()[:70]}  {by[:80]}", flush=True)
    shutil.rmtree(folder)
    there = [change for change in known if change["noticed"] is not None]
    print(f"{sum(change['noticed'] for change in there)} of {len(there)} changes are noticed")
    lost = {_key(change) for change in former if change["noticed"]} - {_key(c) for c in there if c["noticed"]}
    if former:
        print(f"{len(lost)} of the changes that were noticed before are not noticed now, or gone")


def _left_out(folder, names):
    """What is not copied; the folder runs of the root only, because the package has one, too."""
    runs = {"runs"} if pathlib.Path(folder) == ROOT else set()
    return {n for n in names if n in {".git", ".venv", "__pycache__", "mutations.jsonl"} | runs}


KEYS = ("file", "kind", "line", "new", "nth")


def _key(change):
    return tuple(change[key] for key in KEYS)


if __name__ == "__main__":
    main()
