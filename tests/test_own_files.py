"""Which files are fedmpi's own: marks, removing, renaming, replacing; and a reason for each other place that writes."""

import ast
import fcntl
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from helpers import forked
from test_architecture import SOURCES, functions, tree

from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import (
    MARK,
    UNNAMED,
    check_folder,
    check_regular,
    check_replaceable,
    make_folder,
    read_mark,
    remove,
    remove_parts,
    replacing,
    set_aside,
    write_mark,
)
from fedmpi.runs.lock import RunLock

SIGNATURE = b"# made by fedmpi"


def foreign(folder):
    """Put things into a folder that fedmpi did not make; returns what `snapshot` says of them."""
    folder.mkdir(exist_ok=True)
    (folder / "notes.txt").write_text("mine")
    (folder / "elsewhere").symlink_to(folder.parent)
    return snapshot(folder)


def snapshot(folder):
    """Path -> bytes, link target or kind, of everything below a folder."""
    found = {}
    for root, folders, files in os.walk(folder):
        for path in (pathlib.Path(root) / name for name in (*folders, *files)):
            if path.is_symlink():
                found[path] = os.readlink(path)
            else:
                found[path] = path.read_bytes() if path.is_file() else path.is_dir()
    return found


def make_at_once(path, gate, results):
    gate.wait()
    try:
        results.put(make_folder(path, "run", prepare=lambda folder: (folder / "settings.yaml").touch()))
    except FileExistsError:
        results.put("")


@pytest.mark.rarely("fedmpi")
@pytest.mark.alone
@pytest.mark.parametrize("is_there", [False, True])
def test_one_of_many_processes_makes_a_folder(tmp_path, is_there):
    path, context = tmp_path / "run", multiprocessing.get_context("fork")
    gate, results = context.Barrier(8), context.Queue()
    for _ in range(4):
        if is_there:
            path.mkdir()
        jobs = [forked(make_at_once, path, gate, results) for _ in range(8)]
        (winner,) = filter(None, [results.get(timeout=60) for _ in jobs])
        for job in jobs:
            job.join()
        assert read_mark(path, "run")["identity"] == winner
        assert {one.name for one in path.iterdir()} == {MARK, "settings.yaml"} and [*tmp_path.iterdir()] == [path]
        for name in (MARK, "settings.yaml"):
            (path / name).unlink()
        path.rmdir()


def test_an_empty_folder_is_taken_and_stays_the_same(tmp_path, monkeypatch):
    """It was replaced by another one: a shell or program whose current folder it was stood in a deleted one."""
    (tmp_path / "mine").mkdir(mode=0o2750)
    before = (tmp_path / "mine").stat()
    monkeypatch.chdir(tmp_path / "mine")
    make_folder(tmp_path / "mine", "sweep")
    after = (tmp_path / "mine").stat()
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode) and os.listdir() == [MARK]


def test_a_folder_whose_owner_was_killed_before_it_had_a_mark_is_taken(tmp_path):
    """Its next run called it not empty."""
    folder = tmp_path / "it"
    folder.mkdir()
    words = (
        f"import os, pathlib; from fedmpi.runs.lock import RunLock; RunLock(pathlib.Path({str(folder)!r})); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", words], check=False).returncode == 9
    assert os.listdir(folder) == [".lock"] and check_folder(folder, "run") is False
    make_folder(folder, "run", prepare=lambda path: RunLock(path).release())
    assert read_mark(folder, "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".lock").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        check_folder(tmp_path / "mine", "run")


@pytest.mark.parametrize("what", ["file", "link", "dangling link", "folder", "own folder"])
def test_a_folder_is_not_made_where_something_is(tmp_path, what):
    path = tmp_path / "it"
    if what == "file":
        path.write_text("mine")
    elif "link" in what:
        (tmp_path / "target").mkdir()
        path.symlink_to(tmp_path / ("target" if what == "link" else "missing"))
    elif what == "folder":
        foreign(path)
    else:
        make_folder(path, "run")
    before = snapshot(tmp_path)
    with pytest.raises(FileExistsError):
        make_folder(path, "run")
    assert snapshot(tmp_path) == before
    if what == "own folder":
        assert check_folder(path, "run")
    else:
        with pytest.raises(UserError, match="expected a run folder, an empty folder, or a name that is free"):
            check_folder(path, "run")


def test_a_failed_preparation_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "settings.yaml").touch()
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        make_folder(tmp_path / "it", "run", prepare=fail)
    assert not [*tmp_path.iterdir()]


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    def die(folder):
        RunLock(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    killed = multiprocessing.get_context("fork").Process(target=make_folder, args=(tmp_path / "it", "run", None, die))
    killed.start()
    killed.join()
    assert [path.name for path in tmp_path.iterdir() if UNNAMED.fullmatch(path.name)]
    (tmp_path / f".{'a' * 16}.new").mkdir()  # before it had a mark
    foreign(tmp_path / f".{'b' * 16}.new")
    (tmp_path / f".{'c' * 16}.new").symlink_to(tmp_path)
    (tmp_path / f".{'d' * 16}.new").write_text("mine")
    before = snapshot(tmp_path / f".{'b' * 16}.new")

    def look(folder):  # this one is being made
        make_folder(tmp_path / "other", "run")
        assert folder.exists()

    make_folder(tmp_path / "it", "run", prepare=look)
    left = {f".{letter * 16}.new" for letter in "bcd"}
    assert {path.name for path in tmp_path.iterdir()} == {"it", "other", *left}
    assert snapshot(tmp_path / f".{'b' * 16}.new") == before
    for name in (f".{'1' * 16}.json", ".fedmpi.12345678", ".fedmpi.mine", ".1.json"):
        (tmp_path / "it" / name).touch()
    remove_parts(tmp_path / "it")
    assert {path.name for path in (tmp_path / "it").iterdir()} == {MARK, ".fedmpi.mine", ".1.json"}


def test_a_folder_that_gets_its_name_while_another_process_looks_keeps_its_mark(tmp_path, monkeypatch):
    def rename_first(held, how, flock=fcntl.flock):
        if (unnamed := tmp_path / f".{'a' * 16}.new").exists():
            unnamed.rename(tmp_path / "it")
        flock(held, how)

    unnamed = tmp_path / f".{'a' * 16}.new"
    unnamed.mkdir()
    identity = write_mark(unnamed, "run")
    monkeypatch.setattr(fcntl, "flock", rename_first)
    make_folder(tmp_path / "other", "run")
    assert read_mark(tmp_path / "it")["identity"] == identity


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b'"run"', b"{}", b'{"fedmpi": "run"}', b'{"fedmpi": "cake", "identity": "a"}',
        b'{"fedmpi": "run", "identity": 1}', b"\xff\xfe", b"[" * 5000, b"\0" * 100, b'{"fedmpi": [], "identity": "a"}',
    ],
)  # fmt: skip
def test_odd_marks_are_none(tmp_path, content):
    (tmp_path / MARK).write_bytes(content)
    assert read_mark(tmp_path) == {}
    with pytest.raises(UserError, match="is not empty, and fedmpi did not make it"):
        check_folder(tmp_path, "run")


def test_a_mark_is_a_file_in_the_folder_itself(tmp_path):
    make_folder(tmp_path / "own", "run")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / MARK).symlink_to(tmp_path / "own" / MARK)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / MARK)
    assert read_mark(tmp_path / "own", "run") and not read_mark(tmp_path / "own", "sweep")
    assert not any(read_mark(tmp_path / name) for name in ("link", "other", "pipe", "missing"))
    write_mark(tmp_path / "own", "run", "abc", checkpoints=True)
    assert read_mark(tmp_path / "own") == {"fedmpi": "run", "identity": "abc", "checkpoints": True}
    assert os.listdir(tmp_path / "own") == [MARK]


def test_aside_takes_the_first_free_number(tmp_path):
    (tmp_path / "x.old-1").write_text("mine")
    (tmp_path / "x.old-2").symlink_to(tmp_path / "missing")
    foreign(tmp_path / "x.old-3")
    (tmp_path / "x.old-4").mkdir()
    before = snapshot(tmp_path)
    for number in (5, 6):
        make_folder(tmp_path / "x", "run")
        (tmp_path / "x" / "metrics.jsonl").write_text(str(number))
        assert set_aside(tmp_path / "x").name == f"x.old-{number}" and not (tmp_path / "x").exists()
        assert (tmp_path / f"x.old-{number}" / "metrics.jsonl").read_text() == str(number)
    assert before.items() <= snapshot(tmp_path).items()


def test_a_file_of_an_own_folder_is_set_aside_and_others_are_not(tmp_path):
    make_folder(tmp_path / "own", "run")
    (tmp_path / "own" / "model.pt").write_text("a")
    assert set_aside(tmp_path / "own" / "model.pt").read_text() == "a"
    foreign(tmp_path / "mine")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    before = snapshot(tmp_path)
    for path in ("mine", "mine/notes.txt", "link", "missing", "mine/elsewhere"):
        with pytest.raises(UserError, match="fedmpi did not make it"):
            set_aside(tmp_path / path)
    assert snapshot(tmp_path) == before


def test_only_listed_files_of_own_folders_are_removed(tmp_path):
    own = tmp_path / "own"
    make_folder(own, "run")
    before = foreign(own)
    (own / "a").write_text("a")
    (own / "folder").mkdir()
    (tmp_path / "outside").write_text("mine")
    (own / "link").symlink_to(tmp_path / "outside")
    names = ["a", "missing", "folder", "link", "../outside", str(tmp_path / "outside")]
    remove(own, names, with_folder=True)
    assert not (own / "a").exists() and (own / "folder").is_dir() and (own / "link").is_symlink()
    assert (tmp_path / "outside").read_text() == "mine" and before.items() <= snapshot(own).items()
    for name in ("notes.txt", "elsewhere", "link"):
        (own / name).unlink()
    (own / "folder").rmdir()
    remove(own, [], with_folder=True)
    assert not own.exists()
    before = foreign(tmp_path / "mine")
    remove(tmp_path / "mine", ["notes.txt"], with_folder=True)
    assert snapshot(tmp_path / "mine") == before
    make_folder(own, "run")
    (own / "a").write_text("a")
    (tmp_path / "to own").symlink_to(own)
    remove(tmp_path / "to own", ["a"])
    assert (own / "a").exists()


def write(path, text="# made by fedmpi: new"):
    with replacing(path, SIGNATURE) as part:
        part.write_text(text)


@pytest.mark.parametrize("what", ["file", "quoting file", "link", "dangling link", "link to an own file", "folder"])
def test_what_fedmpi_did_not_write_is_not_replaced(tmp_path, what):
    path = tmp_path / "page.html"
    write(tmp_path / "own")
    (tmp_path / "mine").write_text("mine")
    targets = {"link": "mine", "dangling link": "missing", "link to an own file": "own"}
    if what in targets:
        path.symlink_to(targets[what])
    elif what == "folder":
        path.mkdir()
    else:
        path.write_text("mine, " * 3000 + ("# made by fedmpi" + "mine, " * 12000) * (what == "quoting file"))
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match="nothing changed"):
        write(path)
    if "file" not in (what, what.removeprefix("quoting ")):
        with pytest.raises(UserError, match="expected the file itself"), replacing(path):
            pass  # not even in a folder of fedmpi's
    assert snapshot(tmp_path) == before


def test_what_fedmpi_wrote_is_replaced(tmp_path):
    path = tmp_path / ("n" * 250 + ".html")  # no longer name is allowed
    for text in ("# made by fedmpi: 1", "# made by fedmpi: 2", "x" * 99000 + "# made by fedmpi", "# made by fedmpi: 3"):
        write(path, text)
        assert path.read_text() == text
    path.write_text("")  # an empty file is nobody's loss
    write(path)
    assert [*tmp_path.iterdir()] == [path]


def test_a_failed_writer_leaves_the_former_file(tmp_path):
    write(tmp_path / "page.html", "# made by fedmpi: 1")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "page.html", SIGNATURE) as part:
        part.write_text("# made by fedmpi: half")
        raise ZeroDivisionError
    assert (tmp_path / "page.html").read_text() == "# made by fedmpi: 1"
    assert len([*tmp_path.iterdir()]) == 1


def test_two_writers_at_once_and_a_file_that_comes_meanwhile(tmp_path):
    path = tmp_path / "page.html"
    with replacing(path, SIGNATURE) as one, replacing(path, SIGNATURE) as other:
        assert one != other
        one.write_text("# made by fedmpi: 1")
        other.write_text("# made by fedmpi: 2")
    assert path.read_text() == "# made by fedmpi: 1"  # the last to end
    with pytest.raises(UserError), replacing(path, SIGNATURE) as part:
        part.write_text("# made by fedmpi: 3")
        path.write_text("mine")
    assert path.read_text() == "mine" and [*tmp_path.iterdir()] == [path]


def test_devices_and_pipes_of_the_system_are_written_to_and_others_are_not(tmp_path):
    write("/dev/null")
    reader, writer = os.pipe()
    write(f"/dev/fd/{writer}", "text")  # like /dev/stdout
    assert os.read(reader, 100) == b"text"
    os.close(reader), os.close(writer)
    os.mkfifo(tmp_path / "pipe")  # nobody may ever read it
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(UserError, match="fedmpi did not write it"):
            write(tmp_path / name)
        with pytest.raises(UserError, match="expected the file itself"):
            check_regular(tmp_path / name)
    check_replaceable(tmp_path / "missing" / "page.html", SIGNATURE)  # whoever writes it says that there is no folder


# Calls that write, rename or remove files.
RISKY = {
    "rmtree", "unlink", "rmdir", "removedirs", "rename", "renames", "truncate", "ftruncate", "write_text",
    "write_bytes", "savefig", "savez", "savez_compressed", "save_file", "copyfile", "copytree", "copyfileobj",
    "mkdtemp", "mkstemp",
    "symlink_to", "hardlink_to", "extractall",
}  # fmt: skip
OF_A_MODULE = {
    "os": {"remove", "replace", "link", "symlink"},
    "shutil": {"copy", "copy2", "move"},
    "torch": {"save"},
    "np": {"save"},
}


def risk(call):
    """The name of what a call writes, renames or removes with; None if it does not."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    words = [*call.args, *(keyword.value for keyword in call.keywords)]
    if name in ("open", "fdopen", "File", "NamedTemporaryFile"):
        modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        is_writing = any({*mode} & {*"wxa+"} and {*mode} <= {*"rwxabt+"} for mode in modes)
        is_chosen = any(isinstance(word, ast.IfExp) or "O_WRONLY" in ast.unparse(word) for word in words)
        return name if is_writing or is_chosen or "O_RDWR" in ast.unparse(call) else None
    is_path_replace = name == "replace" and len(words) == 1  # that of texts has two arguments
    is_function = isinstance(call.func, ast.Name) and name == "rename"  # that of settings
    return name if name in RISKY and not is_function or name in OF_A_MODULE.get(owner, ()) or is_path_replace else None


def places_that_write():
    """ "module.function: call" of all of fedmpi and reproduction."""
    found = set()
    for module in SOURCES:
        inside = {}
        for name, function in functions(tree(module), module):
            inside |= {id(node): name for node in ast.walk(function)}  # of functions in others, the innermost
        calls = [node for node in ast.walk(tree(module)) if isinstance(node, ast.Call)]
        found |= {f"{inside.get(id(call), module)}: {risk(call)}" for call in calls if risk(call)}
    return {place.removeprefix("fedmpi.") for place in found}


PART = "the file that `replacing` puts in place: it checks what is there"
MEMORY = "in memory"
OWN = "this module decides it"
TEMPORARY = "a folder or file of a new, unique name"
STREAM = "standard output, /dev/null or a pipe"
LOCKED = "a listed name in a run folder whose lock this process has"
OTHERS = "in a run folder, by the recorder"
TRAINERS = "federation.* and its mark, in a checkpoint that Trainer has made; or the name of that folder"
REASONS = {
    "ground.machine.memory.reset_peak_memory: open": "/proc/self/clear_refs, no file",
    "cli.bench.parts.checkpoint._write_plain: open": TEMPORARY,
    "cli.bench.parts.checkpoint.measure: mkdtemp": TEMPORARY,
    "cli.bench.parts.checkpoint.measure: rmtree": TEMPORARY,
    "cli.bench.parts.jobs._write_images: File": TEMPORARY,
    "cli.bench.parts.jobs.measure: mkdtemp": TEMPORARY,
    "cli.bench.parts.jobs.measure: rmtree": TEMPORARY,
    "cli.bench.results.BenchResults.write: write_text": PART,
    "runs.checkpoints.files.write_manifest: open": PART,
    "runs.checkpoints.files.write_state: open": "a new file: it fails if there is one",
    "comm.start.process.open_closed_streams: open": STREAM,
    "comm.sums.window._map_together: open": "memory in /dev/shm, until all ranks of the machine have mapped it",
    "comm.sums.window._map_together: unlink": "its own file in /dev/shm, once all ranks of the machine have mapped it",
    "huggingface.FederatedCallback._hide_incomplete: replace": TRAINERS,
    "huggingface._write: replace": TRAINERS,
    "huggingface._write: unlink": TRAINERS,
    "huggingface._write: write_text": TRAINERS,
    "comm.faults.marks.mark: unlink": "the mark of this process, whose name has its number, in the launcher's folder",
    "ground.files.checksum._write_cache: replace": "the cache of checksums, in the user's cache folder",
    "ground.files.checksum._write_cache: write_text": "the cache of checksums, in the user's cache folder",
    "prepare.download._download_rest: open": "NAME.part in downloads/",
    "prepare.download.fetch: open": "NAME.part in downloads/",
    "prepare.download.fetch: replace": "NAME.part in downloads/",
    "prepare.download.fetch: unlink": "NAME.part in downloads/",
    "prepare.formats.features.Columns.write: write_text": PART,
    "data.partitions.base.write_partition: File": MEMORY,
    "data.partitions.base.write_partition: write_bytes": PART,
    "prepare.writer.write_file: File": PART,
    "cli.doctor.collect._check_folder: unlink": TEMPORARY,
    "cli.doctor.collect._write_token: open": TEMPORARY,
    "ground.files.own_files._remove_unnamed: rmdir": OWN,
    "ground.files.own_files._remove_unnamed: unlink": OWN,
    "ground.files.own_files.make_folder: rename": OWN,
    "ground.files.own_files.make_folder: rmdir": OWN,
    "ground.files.own_files.make_folder: unlink": OWN,
    "ground.files.own_files.remove: rmdir": OWN,
    "ground.files.own_files.remove: unlink": OWN,
    "ground.files.own_files.replacing: replace": OWN,
    "ground.files.own_files.replacing: unlink": OWN,
    "ground.files.own_files.save_figure: savefig": OWN,
    "ground.files.own_files.set_aside: open": OWN,
    "ground.files.own_files.set_aside: replace": OWN,
    "ground.files.own_files.set_aside: rmdir": OWN,
    "ground.files.own_files.set_aside: unlink": OWN,
    "ground.files.own_files.write_mark: link": OWN,
    "ground.files.own_files.write_mark: open": OWN,
    "ground.files.own_files.write_mark: replace": OWN,
    "ground.files.own_files.write_mark: unlink": OWN,
    "cli.predict.__main__._run: savez": PART,
    "cli.predict.__main__._write_rows: write_bytes": PART,
    "comm.job.output._SafeStream._dropping: open": STREAM,
    "comm.job.output._open_again: open": STREAM,
    "comm.job.output.make_output_safe: open": STREAM,
    "comm.job.single.discard_output: open": STREAM,
    "cli.report.__main__._write_tables: write_text": PART,
    "cli.report.__main__.write: write_text": PART,
    "cli.report.figures.as_svg: savefig": MEMORY,
    "cli.report.figures.save: write_text": PART,
    "cli.report.tables.write_curves: open": PART,
    "cli.report.tables.write_finals: open": PART,
    "reproduction.csv_files.write_tables: open": PART,
    "reproduction.page.write_page: write_text": PART,
    "reproduction.results.keep_old: open": "a new file: it fails if there is one",
    "reproduction.orders.write_page: write_text": PART,
    "reproduction.running._write: write_text": PART,
    "reproduction.running.emit_slurm: write_text": PART,
    "reproduction.summary.write_summary: write_text": PART,
    "runs.baselines.write: write_bytes": PART,
    "runs.data_files.write_data_files: write_text": OTHERS,
    "runs.loop.crossed._write: write_text": PART,
    "runs.lock.RunLock.__init__: open": LOCKED,
    "runs.lock.RunLock.release: ftruncate": LOCKED,
    "runs.model_files._hdf5: File": MEMORY,
    "runs.model_files._write: replace": OTHERS,
    "runs.model_files._write: unlink": OTHERS,
    "runs.model_files._write: write_bytes": OTHERS,
    "runs.model_files.complete: replace": OTHERS,
    "runs.recorder.Recorder.__init__: open": LOCKED,
    "runs.recorder.Recorder._append: truncate": LOCKED,
    "runs.recorder.Recorder._keep_records: open": LOCKED,
    "runs.recorder.Recorder._make_again: open": LOCKED,
    "runs.recorder.Recorder._write_settings: open": LOCKED,
    "runs.recorder.Recorder._write_settings: replace": LOCKED,
    "runs.recorder.Recorder.begin: truncate": LOCKED,
    "runs.recorder.Recorder.diverged: write_text": LOCKED,
    "runs.recorder.Recorder.result: write_bytes": LOCKED,
    "cli.sweep.__main__._claim_folder: write_text": PART,
    "cli.sweep.__main__._emit: write_text": PART,
    "cli.sweep.choice.write_best: write_text": PART,
    "cli.sweep.choice.write_candidates: open": PART,
    "cli.sweep.local.start_job: open": "NAME.log in the sweep's own folder, a file",
    "cli.sweep.local.start_job: truncate": "NAME.log in the sweep's own folder, which no other job has locked",
    "cli.sweep.search.Search._write: write_text": PART,
    "tasks.attack.LoadedAttack.write_result: savefig": OTHERS,
    "tasks.auc.LoadedAUC.write_result: write_text": OTHERS,
    "tasks.classification.LoadedClassification.write_split: write_text": OTHERS,
    "training.result._save_elsewhere: mkdtemp": TEMPORARY,
    "training.result._save_elsewhere: rmtree": TEMPORARY,
}


@pytest.mark.rarely("fedmpi")
def test_every_place_that_writes_or_removes_files_has_a_reason():
    found = places_that_write()
    assert not (new := found - set(REASONS)), f"write through own_files.py, or say why not in REASONS: {new}"
    assert not (gone := set(REASONS) - found), f"no longer there: remove it from REASONS: {gone}"


def test_calls_that_write_are_found():
    writing = (
        "open(p, 'w')", "p.open('ab')", "open(p, mode='r+')", "open(p, 'w' if x else 'a')", "os.open(p, os.O_WRONLY)",
        "h5py.File(p, 'w')", "p.replace(q)", "os.replace(p, q)", "os.remove(p)", "shutil.copy(p, q)", "p.unlink()",
        "shutil.rmtree(p)", "np.savez(p, a=1)", "file.truncate(0)", "p.write_text('')", "torch.save(x, p)",
    )  # fmt: skip
    harmless = (
        "open(p)", "open(p, 'rb')", "p.open(encoding='utf-8')", "s.replace('a', 'b')", "some.remove(1)", "x.copy()",
        "os.open(p, os.O_RDONLY)", "h5py.File(p)", "dataclasses.replace(one, ranks=2)", "rename(settings, names)",
    )  # fmt: skip
    calls = {text: ast.parse(text, mode="eval").body for text in (*writing, *harmless)}
    assert [text for text, call in calls.items() if risk(call)] == [*writing]
