"""What goes from a silo to the others: every message of every door is of a kind that the table has."""

import ast
import importlib.util
import json
import re
import sys

import pytest
from helpers import PROGRAMS, ROOT, execute, launch_words, launchers, start

from fedmpi.cli.doctor.crosses import describe_crossing
from fedmpi.comm.crosses import KINDS, OWN, Crossed, as_rows
from fedmpi.training.config import read_command_line
from fedmpi.training.crossing import kinds_of

# Verbs of a link, and functions around them, that take a kind.
VERBS = {"average", "add_integers", "exchange_slices", "allgather_vectors", "allgather", "begin_allgather"}
VERBS |= {"allgatherv", "alltoallv", "broadcast", "allreduce", "allgather_lines"}
# Kinds that a run may send by its settings, and does not always need: an error, a buffer, scattered samples.
AS_NEEDED = {"errors", "checkpoints", "file digests", "model", "buffers", "samples", "left out"}
AS_NEEDED |= {
    "metric sums",
    "outputs",
    "blind words",
    "evaluation",
}  # it depends on the metric, --least, what is hidden
AS_NEEDED |= {"slices", "opened masks"}  # how many clients a rank has; whether a run goes on without lost ranks
PLAIN = ("digits", "silos with metrics", "silos in shared memory", "masked")


def found(ranks, out, *doors, mpi="default"):
    """Door -> what `crosses.py` has found of it."""
    job = start(ranks, PROGRAMS / "crosses.py", out, *doors, mpi=mpi, is_forked=False)
    assert job.returncode == 0, job.stdout + job.stderr
    lines = [json.loads(line[len("FOUND ") :]) for line in job.stdout.splitlines() if line.startswith("FOUND ")]
    return {line["door"]: line for line in lines}


def check(doors, is_whole=True):
    """Check what `found` returns; `is_whole`: whether all that was said must have been sent, too."""
    for door, line in doors.items():
        seen = {*line["seen"]}
        assert not line["wrong"], f"{door}: {line['wrong']}"
        assert seen <= KINDS.keys(), door
        if line["crossed"] is not None and not door.startswith(
            "evaluate"
        ):  # the folder there is that of the training run
            assert seen == {*line["crossed"]}, door
        if line["said"] is not None:
            said = {*line["said"]}
            assert seen <= said, f"{door}: sent, and not said before: {seen - said}"
            ended = line["crossed"] is None  # before there was a run folder
            assert not is_whole or ended or said - seen <= AS_NEEDED, f"{door}: said, and not sent: {said - seen}"


@pytest.mark.rarely
def test_every_message_is_of_a_kind_that_the_table_and_the_run_folder_have(tmp_path):
    doors = found(2, tmp_path, *PLAIN)
    assert [*doors] == [*PLAIN]
    check(doors)
    assert {"metric sums", "labels", "scales", "names", "test counts"} <= {*doors["silos with metrics"]["seen"]}
    assert not {"outputs", "words", "samples", "slices"} & {*doors["silos in shared memory"]["seen"]}
    kinds = json.loads((tmp_path / "silos-with-metrics" / "crossed.json").read_text(encoding="utf-8"))
    sent_first = {name: kinds[name]["after_round"] for name in ("scales", "rows", "metric sums")}
    assert sent_first == {"scales": 0, "rows": 0, "metric sums": 2}
    assert kinds["rows"]["carries"] == KINDS["rows"].carries


@pytest.mark.rarely
@pytest.mark.parametrize("mpi", launchers())
def test_every_message_of_every_door(tmp_path, mpi):
    doors = found(2, tmp_path, mpi=mpi)
    check(doors)
    sent = set().union(*(line["seen"] for line in doors.values()))
    missing = KINDS.keys() - {OWN, "opened masks"} - sent  # these are sent where a run goes on without lost ranks
    assert not missing, f"no door sends {missing}"


@pytest.mark.rarely
def test_three_ranks_send_the_same_kinds(tmp_path):
    check(found(3, tmp_path, *PLAIN, "median", "auc of silos", "average"))


@pytest.mark.rarely
@pytest.mark.parametrize("part", range(5))
def test_combinations_of_tasks_options_and_parts(tmp_path, part):
    doors = found(2, tmp_path, "COMBINATIONS", part, 5)
    check(doors, is_whole=False)
    refused = [door for door, line in doors.items() if line["refused"]]
    assert len(doors) > 24 and len(refused) < len(doors) / 3, refused


def seen_by(folder):
    """The kinds that the ranks of `recorded.py` have sent, none of them unnamed."""
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("seen-*.json")]
    assert ranks and not [line for rank in ranks for line in rank["wrong"]]
    seen = {kind for rank in ranks for kind in rank["seen"]}
    assert seen <= KINDS.keys()
    return seen


@pytest.mark.rarely
@pytest.mark.parametrize(
    ("deaths", "words"),
    [
        ("1@sum:2", "--aggregation mean"),
        ("1@losses:2", "--aggregation reproducible --clients 6"),
        ("1@words:2", "--aggregation masked --aggregation.least_ranks 1"),
    ],
)
def test_ranks_that_are_left_send_named_kinds(tmp_path, deaths, words):
    if "openmpi" not in launchers():
        pytest.skip("FEDMPI_TEST_OPENMPI does not name an environment with Open MPI")
    words = f"--algorithm fedavg --rounds 3 --threads 1 --on_loss continue --checkpoint_every 1 {words}".split()
    program = (PROGRAMS / "recorded.py", tmp_path, PROGRAMS / "loses.py", "--out", tmp_path / "runs", *words)
    command, variables = launch_words(3, *program, mpi="openmpi", options=("--with-ft", "ulfm"))
    job = execute(command, env={**variables, "DIE": deaths})
    assert job.returncode == 0, job.stdout + job.stderr
    assert "was lost during" in job.stderr
    assert len([*tmp_path.glob("seen-*.json")]) == 2
    (written,) = tmp_path.glob("runs/*/crossed.json")
    crossed, said = {*json.loads(written.read_text(encoding="utf-8"))}, kinds_of(read_command_line(words))
    assert seen_by(tmp_path) <= crossed <= said
    assert ("opened masks" in crossed) == ("masked" in words)


@pytest.mark.rarely
@pytest.mark.parametrize("door", ["train fafed SIGKILL 1 45", "average - SIGUSR1 1 9", "join fafed SIGKILL 1 115"])
def test_what_goes_on_within_a_round_sends_named_kinds(tmp_path, door):
    way, algorithm, *left = door.split()
    program = (PROGRAMS / "recorded.py", tmp_path, PROGRAMS / "leaves_round.py", way, algorithm, tmp_path / "it")
    assert start(2, *program, *left, is_forked=False).returncode
    assert [*tmp_path.glob("it/checkpoints/within-*/manifest.json")]
    for path in tmp_path.glob("seen-*.json"):  # of a rank that was not killed
        path.unlink()
    again = start(2, *program, is_forked=False)
    assert "ended: " in again.stdout, again.stderr
    seen, crossed = seen_by(tmp_path), {*json.loads((tmp_path / "it" / "crossed.json").read_text(encoding="utf-8"))}
    assert {"checkpoints", "run", "rows"} <= seen <= crossed and OWN not in seen


@pytest.mark.rarely
@pytest.mark.parametrize("federation", [{"every": 5}, {"algorithm": "fedavg", "local_steps": 5}])
def test_a_trainer_of_hugging_face_sends_named_kinds(tmp_path, federation):
    if not all(map(importlib.util.find_spec, ("transformers", "peft", "accelerate"))):
        pytest.skip("needs fedmpi[huggingface]: transformers and peft")
    given = json.dumps({"federation": federation, "max_steps": 10, "evaluates": True, "eval_strategy": "steps"})
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    program = (PROGRAMS / "recorded.py", tmp_path, PROGRAMS / "fine_tunes.py", tmp_path, given)
    job = start(2, *program, env=offline, is_forked=False)
    assert job.returncode == 0, job.stdout + job.stderr
    assert {"rows", "weights", "settings"} <= seen_by(tmp_path) - {OWN}
    assert OWN not in seen_by(tmp_path)


@pytest.mark.rarely
def test_the_trials_of_a_search_send_what_a_run_sends(tmp_path):
    pytest.importorskip("optuna")
    recorded = " ".join(map(str, ("mpirun -np {ranks}", sys.executable, PROGRAMS / "recorded.py", tmp_path)))
    common = "--rounds 2 --local-steps 2 --batch-size 8 --threads 1"
    search = f"--search random --trials 2 --range algorithm.step_size=0.01:0.1 --ranks 2 {common}"
    words = ("-m", "fedmpi", "sweep", *search.split(), "--out", tmp_path / "sweep", "--launch", recorded)
    job = execute([sys.executable, *map(str, words)], cwd=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    assert len([*tmp_path.glob("seen-*.json")]) == 4  # of two ranks each: the search itself sends nothing
    assert seen_by(tmp_path) <= kinds_of(read_command_line([*common.split(), "--holdout", "0.1"]))


@pytest.mark.rarely
@pytest.mark.parametrize("words", ["fedmpi data list", "fedmpi report --help", "fedmpi sweep --help", "predict"])
def test_other_programs_send_nothing(words, tmp_path):
    """They do not load MPI, also under mpirun."""
    if words == "predict":
        command, variables = launch_words(1, "-m", "fedmpi.train", "--rounds", "1", "--out", tmp_path, "--name", "it")
        assert execute(command, env=variables).returncode == 0
        words = f"fedmpi predict {tmp_path / 'it'} digits --split test"
    code = f"""
import sys
sys.argv[:] = {words.split()!r}
try:
    from fedmpi.__main__ import main
    main()
finally:
    print("MPI" if "mpi4py.MPI" in sys.modules else "no MPI")
"""
    command, variables = launch_words(2, "-c", code)
    job = execute(command, env=variables, cwd=tmp_path)
    assert job.stdout.splitlines().count("no MPI") == 2, job.stdout + job.stderr


def calls():
    """(place, receiver and arguments) of each call of a verb in the package, but for what measures made-up vectors."""
    for path in sorted((ROOT / "fedmpi").rglob("*.py")):
        place = str(path.relative_to(ROOT / "fedmpi"))
        if place.startswith(("comm/sums/", "comm/faults/", "cli/bench/")):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            function = node.func if isinstance(node, ast.Call) else None
            if isinstance(function, ast.Attribute) and function.attr in VERBS:
                receiver = ast.unparse(function.value)
                if receiver.endswith("link") or receiver == "self":
                    yield f"{place}:{node.lineno}", receiver, node
            elif isinstance(function, ast.Name) and function.id == "allgather_lines":
                yield f"{place}:{node.lineno}", "", node


def test_every_verb_names_its_kind():
    named = set()
    for place, receiver, node in calls():
        last = [*node.args, *(option.value for option in node.keywords if option.arg == "kind")][-1]
        if isinstance(last, ast.Name) and last.id == "kind":
            continue  # handed on
        is_text = isinstance(last, ast.Constant) and isinstance(last.value, str)
        if receiver == "self" and not is_text:
            continue  # a method of another class
        assert is_text and last.value in KINDS, f"{place}: {ast.unparse(node)}"
        named.add(last.value)
    # What rank 0 decides (`share`) is of the kind "run" unless another one is named.
    assert named == KINDS.keys() - {OWN, "run"}


def test_a_kind_that_the_table_lacks_is_an_error():
    crossed = Crossed()
    crossed.note("losses", 8)
    crossed.note("rows", 0)  # nothing is sent
    assert crossed == {"losses"}
    with pytest.raises(ValueError, match="message of kind 'secrets': expected one of rows, whole numbers, "):
        crossed.note("secrets", 8)


@pytest.mark.parametrize(
    ("words", "more", "less"),
    [
        ("", "samples class-counts rows", "labels outputs words slices own names"),
        ("--data silo_{client}.h5", "labels scales names test-counts", "samples outputs"),
        ("--data silo_{client}.h5 --task.metrics f1", "metric-sums blind-words", "samples outputs"),
        ("--data silo_{client}.h5 --task.metrics auroc --scores samples", "outputs", "samples"),
        ("--task language --data silo_{client}.h5", "words", "texts outputs class-counts"),
        ("--task language --data silo_{client}.h5 --task.vocabulary words.txt", "evaluation", "words blind-words"),
        ("--task language --data text.h5 --task.vocabulary words.txt", "texts", "words blind-words"),
        ("--task auc", "outputs", "test-counts"),
        ("--aggregation centred_clipping", "slices norms", "rows"),
        ("--aggregation reproducible", "whole-numbers slices exponents", "rows losses"),
        ("--aggregation masked", "masked-words exponents public-keys", "rows slices losses whole-numbers"),
        ("--codec half", "slices", "rows"),
        ("--codec random_k", "rows", "slices"),
        ("--faulty leave_out", "left-out", ""),
        ("--baselines local --cross-site true", "silo-models test-counts", ""),
        ("--task quadratic", "evaluation", "class-counts samples outputs"),
        ("--aggregation own_sending.TrimmedMean", "own", ""),
    ],
)
def test_the_settings_say_what_may_cross(words, more, less, monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))
    said = {name.replace(" ", "-") for name in kinds_of(read_command_line(words.split()))}
    assert {*more.split()} <= said and not {*less.split()} & said


@pytest.mark.rarely
def test_the_doctor_prints_it(tmp_path):
    words = ("-m", "fedmpi", "doctor", "--crosses", "--data", "no_such_{client}.h5", "--task.metrics", "f1")
    for as_json in ((), ("--json",)):
        command, variables = launch_words(1, *words, *as_json)
        job = execute(command, env=variables, cwd=tmp_path)
        kinds = kinds_of(read_command_line([*words[4:]]))
        assert job.returncode == 0 and job.stdout == describe_crossing(kinds, bool(as_json)) + "\n", job.stderr
    assert json.loads(job.stdout)["metric sums"]["what leaves a silo"] == KINDS["metric sums"].carries


def test_the_page_has_the_table(request):
    """``pytest tests/comm/test_crosses.py --write-golden`` writes it."""
    page, (header, *rows) = ROOT / "docs" / "how_it_works.md", as_rows(KINDS)
    lines = [header, ["---"] * len(header), *([f"`{name}`", *cells] for name, *cells in rows)]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    text = page.read_text(encoding="utf-8")
    before, begin, rest = re.split(r"(^<!-- crosses: begin .*-->\n)", text, flags=re.MULTILINE)
    between, end, after = rest.partition("<!-- crosses: end -->\n")
    if request.config.getoption("--write-golden"):
        between = table
        page.write_text(before + begin + table + end + after, encoding="utf-8")
    assert between == table
