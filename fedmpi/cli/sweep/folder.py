"""The folder of a sweep, with a mark; in any other folder nothing is changed."""

from fedmpi.cli.sweep.local import check_log
from fedmpi.ground.files.own_files import check_folder, make_folder


def own_sweep_folder(out):
    """Make the folder of a sweep, or check that a sweep made it; then it has a mark.

    Raises:
        UserError: if it is another folder. OSError: if it cannot be made.
    """
    if check_folder(out, "sweep"):
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        make_folder(out, "sweep")
    except FileExistsError:  # another job may have made it just now
        check_folder(out, "sweep")


def check_run_folders(plan):
    """Check that the folders and logs of a plan's runs are missing or empty, or that fedmpi made them.

    Raises:
        UserError: if one is something else.
    """
    for run in plan.runs:
        check_log(plan, run)
        check_folder(plan.folder(run), "run")
