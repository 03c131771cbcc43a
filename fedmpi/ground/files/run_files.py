"""Names of the files in a run folder, for everything that writes or reads one, and finding its checkpoints."""

import contextlib
import os
import pathlib
import stat

from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import LOCK, MARK, check_regular, read_mark

RUNS = "runs"  # the folder of run folders, unless --out names another
SETTINGS = "settings.yaml"  # the run as resolved; `--config` repeats it
RECORDS = "metrics.jsonl"  # one line of JSON per round, see `fedmpi.runs.record`
MODEL = "model.safetensors"  # the trained tensors under their names; named last: with it a run is complete
MODEL_DESCRIPTION = "model.json"  # how to build the model again and what its inputs are
MODEL_AND_ROWS = "model.h5"  # the same tensors, and the algorithm's rows x, m, v, ...
CLIENTS = "clients.json"  # the clients' names (or null) and numbers of training samples
DATA_FILES = "data.json"  # a salt, and a salted checksum of each data file
CLIENT_MODEL = "models/client_{client}.safetensors"  # of a run with personal layers: each client's own model
CROSSED = "crossed.json"  # which kinds of messages have crossed, see `fedmpi.comm.crosses`
PARTITION = "partition.h5"  # which samples each client has
DIVERGED = "diverged.txt"  # why a run ended without a result, in one line
ROC = "roc.csv"  # of a run that maximises AUC: the result's ROC curve on the test set
ATTACK_FIGURE = "attack.png"  # images before and after a black-box attack
BASELINES = "baselines.json"  # of a run with --baselines: see `fedmpi.runs.baselines`
RESULT = "result.json"  # what was measured of the resulting model, a record, if the last one has not all of it
CHECKPOINTS = "checkpoints"  # a folder for each checkpoint, named after its round: 000120
MANIFEST = "manifest.json"  # in such a folder, written last: with it a checkpoint is complete
WITHIN = ("within-0", "within-1")  # beside them: two of which the newer one was written within a round
SERVER_STATE = "server.safetensors"  # beside it: the state that all ranks share
BEST_SO_FAR = "kept.h5"  # the best model of a run that diverged later, in the layout of MODEL_AND_ROWS
FILES = (
    *(MARK, LOCK, SETTINGS, RECORDS, MODEL, MODEL_DESCRIPTION, MODEL_AND_ROWS, CLIENTS, DATA_FILES, PARTITION),
    *(DIVERGED, ROC, ATTACK_FIGURE, BEST_SO_FAR, BASELINES, RESULT, CROSSED),
)


def is_complete(run_folder: pathlib.Path) -> bool:
    """Whether the run of a folder ended and wrote its model."""
    return (run_folder / MODEL).is_file()


def find_checkpoints(run_folder: str | os.PathLike[str]) -> list[int]:
    """Numbers of rounds after which there is a checkpoint with a manifest, damaged or not, the newest first.

    Raises:
        UserError: if the folder of the checkpoints cannot be read: that is not the same as none.
    """
    return [number for number, _ in _checkpoints(pathlib.Path(run_folder) / CHECKPOINTS)]


def _checkpoints(folder: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """[(round, folder)] of the checkpoints with a manifest, the newest first."""
    found = []
    try:
        for name in os.listdir(folder) if os.path.lexists(folder) else ():
            if name.isdecimal() and name == f"{int(name):06d}" and (folder / name).is_dir():
                # Listed: without the right to read it, its manifest would seem to be missing.
                with contextlib.suppress(FileNotFoundError):  # just removed
                    if MANIFEST in os.listdir(folder / name):
                        found.append((int(name), folder / name))
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
    return sorted(found, reverse=True)


def has_checkpoint(run_folder: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint with a manifest, after a round or within one, damaged or not.

    Raises:
        UserError: as `find_checkpoints`.
    """
    return bool(find_checkpoints(run_folder) or find_within(run_folder))


def find_within(run_folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The folders with a checkpoint within a round that has a manifest."""
    folder = pathlib.Path(run_folder) / CHECKPOINTS
    return [folder / name for name in WITHIN if (folder / name / MANIFEST).is_file()]


def had_checkpoints(run_folder: pathlib.Path) -> bool:
    """Whether the mark of a run folder says that a checkpoint was written."""
    return bool(read_mark(run_folder, "run").get("checkpoints"))


def check_files(run_folder: pathlib.Path) -> None:
    """Check that fedmpi made a folder, and that what a run reads and writes there are files and folders, no links.

    Raises:
        UserError: if one is something else, or cannot be looked at.
    """
    for name in FILES:
        check_regular(run_folder / name, is_changed=name in (RECORDS, LOCK, DATA_FILES))
        check_regular(run_folder / f"{name}.part", is_changed=True)
    if not read_mark(run_folder, "run"):
        if os.path.lexists(run_folder / MARK):
            raise UserError(f"{run_folder / MARK}: fedmpi did not write it: move it to another folder; nothing changed")
        raise UserError(f"{run_folder}: contains no {MARK}, by which fedmpi knows its folders: copy it as a whole")
    folder = run_folder / CHECKPOINTS
    checkpoints = [*(inner for _, inner in _checkpoints(folder)), *(folder / name for name in WITHIN)]
    models = run_folder / os.path.dirname(CLIENT_MODEL)
    for inner in (folder, models, *checkpoints):
        if os.path.lexists(inner) and not stat.S_ISDIR(os.lstat(inner).st_mode):
            raise UserError(f"{inner}: is a symbolic link or a file: expected a folder")
        if inner != folder and inner.is_dir():
            for path in sorted(inner.iterdir()):
                if path.suffix in (".json", ".part", ".safetensors"):
                    check_regular(path)
