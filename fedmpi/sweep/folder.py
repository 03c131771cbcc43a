"""The folder of a sweep, with a mark; in any other folder nothing is changed."""

from fedmpi.errors import UserError
from fedmpi.own_files import check_folder, make_folder, write_mark
from fedmpi.run_files import find_checkpoints
from fedmpi.runs.folder import is_run, outcome
from fedmpi.sweep.local import check_log


def check_sweep_folder(out, is_former):
    """Whether a folder has a mark; check that a sweep's runs may be in it: it is missing or empty, or a sweep made it.

    `is_former()`: whether a sweep of an earlier version made the folder, without a mark.

    Raises:
        UserError: if it is another folder.
    """
    try:
        return check_folder(out, "sweep")
    except UserError:
        if out.is_symlink() or not out.is_dir() or not is_former():
            raise
        return False


def own_sweep_folder(out, is_former):
    """Make the folder of a sweep, or check that a sweep made it; then it has a mark. See `check_sweep_folder`.

    Raises:
        UserError: if it is another folder. OSError: if it cannot be made.
    """
    if check_sweep_folder(out, is_former):
        return
    if is_former():
        write_mark(out, "sweep")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        make_folder(out, "sweep")
    except FileExistsError:  # another job may have made it just now
        check_folder(out, "sweep")


def check_run_folders(plan):
    """Check that the folders and logs of a plan's runs are missing or empty, or that fedmpi made them.

    Raises:
        UserError: if one is something else, or its run began with an earlier version and has no checkpoint.
    """
    for run in plan.runs:
        folder = plan.folder(run)
        check_log(plan, run)
        if not (is_run(folder) and (outcome(folder) != "broken" or find_checkpoints(folder))):
            check_folder(folder, "run")
