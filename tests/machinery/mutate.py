"""Change single places of fedmpi and see whether its tests notice: ``python tests/machinery/mutate.py --number 300``.

First the tests run once, and coverage.py (``pip install coverage``) records which test runs which line, also in ranks.
Then each change is made in a copy of the last commit, and the tests that run its line, quickest first, run in it until
one fails; a change in a line that no test runs is missed. A line per change goes to the record: a change that is in it
already is not tried again, so that a stopped run goes on. With ``--again RECORD`` the same changes are tried that
another record contains: what was noticed then must be noticed now. Changes are named by file and text, not by line, so
that they are found in another state of the file.
"""

import argparse
import ast
import collections
import concurrent.futures
import importlib.util
import itertools
import json
import os
import pathlib
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from helpers import ROOT, WARM

LIMIT = 900  # seconds for the tests of one change: one that hangs is noticed
SECONDS = 300  # so long do the tests of one change take, as measured in the first run
COMPARISONS = {"==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "is": "is not", "is not": "is"}
OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*"}
TOKENS = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Is: "is",
    ast.IsNot: "is not", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
}  # fmt: skip
PYTEST = [sys.executable, "-m", "pytest", "-q"]
MPI = "tests/mpi/"  # the tests that run under mpirun
MARK = "FEDMPI_TEST_OF_CHANGE"  # a variable, by which the processes of one command are found


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


def sample(number, seed, begin=""):
    """`number` changes in files whose path begins so, from all rooms in turn."""
    draw, of_rooms = random.Random(seed), collections.defaultdict(list)
    for path in sorted((ROOT / "fedmpi").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not file.startswith(begin):
            continue
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


def record_lines(folder, words):
    """Run the tests (or those that pytest's words name) once, and record in a folder which lines each of them runs.

    Ranks are no forks here (`WARM` is empty), so that each of them records its lines from its start on.
    """
    settings = folder / "coverage.ini"
    settings.write_text(
        f"[run]\nparallel = true\ndata_file = {folder}/lines\ncontext = ${{PYTEST_CURRENT_TEST-}}\n"
        f"include = {ROOT}/fedmpi/*\ncore = ctrace\npatch = _exit\n"
    )
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'machinery'}"
    variables = {"COVERAGE_PROCESS_START": str(settings), TIMES: str(folder / "times"), "PYTHONPATH": paths, WARM: ""}
    commands = [[*PYTEST, "-p", "mutate", "-n", "4", *(words or ["tests", "reproduction/tests"]), "--ignore", MPI]]
    commands += [] if words else [["mpirun", "-np", "2", *PYTEST, "-p", "mutate", "--with-mpi", MPI]]
    for command in commands:
        print(_run(command, ROOT, variables, None)[1][-300:], flush=True)
    code, output = _run([sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={settings}", folder], ROOT)
    if code:
        sys.exit(f"no lines were recorded: {output}")


TIMES = "FEDMPI_TEST_TIMES"  # a file: (test, seconds) of each test in the first run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """In the first run: say coverage.py which test runs, and write how long it took."""
    import coverage

    coverage.Coverage.current().switch_context(item.nodeid)
    began = time.monotonic()
    result = yield
    with open(os.environ[TIMES], "a", encoding="utf-8") as file:
        print(json.dumps([item.nodeid, time.monotonic() - began]), file=file, flush=True)
    return result


class Lines:
    """Which test runs which line, as `record_lines` has written it."""

    def __init__(self, folder):
        import coverage

        self._data, self._of_files = coverage.CoverageData(str(folder / "lines")), {}
        self._data.read()
        self._seconds = dict(map(json.loads, (folder / "times").read_text(encoding="utf-8").splitlines()))

    def tests(self, change):
        """The tests that run a change's line, near ones and quick ones first, of each function one in turn."""
        text = (ROOT / change["file"]).read_text(encoding="utf-8")
        found = [number for number, line in enumerate(text.split("\n"), 1) if line == change["line"]]
        number, of_lines = found[min(change["nth"], len(found) - 1)], self._of_file(change["file"])
        around = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= number <= node.end_lineno
        ]
        if around:  # a long statement is recorded at its first line
            first = max(node.body[0].lineno for node in around)
            tests = next((of_lines[k] for k in range(number, first - 1, -1) if of_lines.get(k)), set())
        else:  # what runs at the import, which any test may have done first
            tests = set().union(*of_lines.values())
        of_functions = collections.defaultdict(list)
        for test in sorted(tests & self._seconds.keys(), key=self._seconds.get):
            of_functions[test.partition("[")[0]].append(test)
        names = (_room(change["file"]), pathlib.Path(change["file"]).stem)
        functions = sorted(of_functions.values(), key=lambda tests: not any(name in tests[0] for name in names))
        turns = itertools.zip_longest(*functions)
        return [test for turn in turns for test in turn if test is not None]

    def commands(self, change):
        """The commands that run these tests: first for a few seconds, then those under mpirun, then for the rest."""
        words, parts, seconds = [*PYTEST, "-x", "-p", "no:cacheprovider"], ([], [], []), 0.0
        for test in self.tests(change):
            seconds += self._seconds[test]
            if seconds < SECONDS or not any(parts):
                parts[1 if test.startswith(MPI) else 0 if seconds < SECONDS / 5 else 2].append(test)
        under = ["mpirun", "-np", "2", *words, "--with-mpi"]
        return [[*(under if part is parts[1] else words), *part] for part in parts if part]

    def _of_file(self, file):
        if file not in self._of_files:
            of_lines = self._data.contexts_by_lineno(str(ROOT / file))
            self._of_files[file] = {line: {_test(context) for context in of} for line, of in of_lines.items()}
        return self._of_files[file]


def _test(context):
    """The test in coverage.py's name of a context, which is that of a process or of what runs in one."""
    return re.sub(r" \((setup|call|teardown)\)$", "", context.rpartition("|")[2])


def is_noticed(tree, change, lines):
    """(whether a test fails, the last line that says so); None for a change whose place is not there any more."""
    before = apply(tree, change)
    if before is None:
        return None
    try:
        for words in lines.commands(change):
            code, output = _run(words, tree)
            if code:
                failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return True, failed[0][:160] if failed else f"exit code {code}"
        return False, ""
    finally:
        (tree / change["file"]).write_text(before, encoding="utf-8")


def _run(words, tree, variables=(), limit=LIMIT):
    environment = {name: value for name, value in os.environ.items() if name != WARM}
    environment |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", **dict(variables)}
    mark = f"{MARK}={os.urandom(8).hex()}"
    environment[MARK] = mark.partition("=")[2]
    with tempfile.TemporaryFile("w+") as output:
        job = subprocess.Popen(words, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            code = job.wait(limit)
        except subprocess.TimeoutExpired:
            code = -1
        for folder in pathlib.Path("/proc").glob("[0-9]*"):  # also ranks, which are sessions of their own
            try:
                if mark.encode() in (folder / "environ").read_bytes():
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
    parser.add_argument("--begin", default="", help="changes in files only whose path begins so: fedmpi/tasks")
    parser.add_argument("--tests", nargs="*", help="files and folders of tests; by default the quick ones")
    parser.add_argument("--lines", type=pathlib.Path, default=ROOT / "mutations.lines", help="folder of the first run")
    parser.add_argument("--record", type=pathlib.Path, default=ROOT / "mutations.jsonl")
    parser.add_argument("--again", type=pathlib.Path, help="a record of earlier: try the same changes")
    asked = parser.parse_args()
    if not importlib.util.find_spec("coverage"):
        sys.exit("coverage.py is missing: pip install coverage")
    known = [json.loads(line) for line in asked.record.read_text().splitlines()] if asked.record.exists() else []
    tried = {_key(change) for change in known}
    former = [json.loads(line) for line in asked.again.read_text().splitlines()] if asked.again else []
    to_try = [{key: change[key] for key in KEYS} for change in former] or sample(asked.number, asked.seed, asked.begin)
    to_try = [change for change in to_try if _key(change) not in tried]
    trees, folder = queue.SimpleQueue(), pathlib.Path(tempfile.mkdtemp(prefix="fedmpi-mutate-"))
    for number in range(asked.processes):
        tree = folder / str(number)
        subprocess.run(["git", "clone", "-q", ROOT, tree], check=True)
        trees.put(tree)
    if (ROOT.parent / "shared").is_dir():  # data sets
        (folder / "shared").symlink_to(ROOT.parent / "shared")

    code, output = _run([*PYTEST, "--collect-only", "tests"], tree)
    if code:  # every change would look as if it were noticed
        sys.exit(f"the tests of an unchanged copy cannot be collected:\n{output[-2000:]}")
    if not (asked.lines / "lines").is_file():  # also if an earlier first run did not end
        asked.lines.mkdir(exist_ok=True)
        record_lines(asked.lines, asked.tests)
    lines = Lines(asked.lines)

    def attempt(change):
        tree = trees.get()
        try:
            return change, is_noticed(tree, change, lines)
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


KEYS = ("file", "kind", "line", "new", "nth")


def _key(change):
    return tuple(change[key] for key in KEYS)


if __name__ == "__main__":
    main()
