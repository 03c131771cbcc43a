"""Which file a client's data are in: one that all clients share, or one of its own."""

from fedmpi.comm.agreement import agree
from fedmpi.data.same_files import check_same_files
from fedmpi.data.source import find_file, names_silos, silo_path
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.hdf5 import files_of
from fedmpi.ground.settings import setting

OWN_FILES = (
    "whether the file that --data names is another one on each rank, that of the rank's client: it then stays there, "
    "as silo_{client}.h5 would; short form: --own_files"
)
EXPECTED = "expected the same file on all ranks"
OR_OWN = (
    f"{EXPECTED}, a file per client like 'silo_{{client}}.h5', or --own_files true if each rank's file is that of its "
    "client"
)


def own_files_setting():
    """The setting `own_files` of a task whose setting `data` names files."""
    return setting(False, OWN_FILES)


def has_own_files(task):
    """Whether each client has a file of its own. `task`: has the settings `data` and `own_files`."""
    return task.own_files or names_silos(task.data)


def own_file(task, context, client):
    """The path of the file of one of this rank's clients, if each client has one of its own.

    Raises:
        UserError: if there is no such file, or the ranks and clients are not as many.
    """
    if not task.own_files:
        return silo_path(task.data, client)
    given = f"task.own_files = true, task.data = {task.data}"
    if names_silos(task.data):
        raise UserError(f"{given}: such a pattern names a file per client already: leave --own_files out")
    if task.data == "digits":
        raise UserError(f"{given}: expected a file, like silo.h5")
    if not context.num_clients == context.num_ranks:
        raise UserError(
            f"{given}: each rank's file is that of its client, and {context.num_clients} clients are on "
            f"{context.num_ranks} ranks: expected as many ranks as clients"
        )
    return find_file(task.data, context.data_dir)


def common_files(task, context):
    """See `BaseTask.common_files`, for a task that has the settings `data` and `own_files`."""
    if has_own_files(task):
        return {}
    return {f"task.data = {task.data}": [find_file(task.data, context.data_dir)]}


def check_common_files(link, task, context):
    """Check that the files which all ranks must have in common are the same on all of them, before they are opened.

    Collective on the link.

    Raises:
        AgreedUserError: on every rank.
    """
    if link.size == 1:
        return
    for given, paths in agree(link, lambda: task.common_files(context)).items():
        hint = OR_OWN if hasattr(task, "own_files") and given.startswith("task.data") else EXPECTED
        check_same_files(link, given, paths, hint)
        # Only a file that all ranks have is opened to find out of which others it shows parts.
        views = agree(link, lambda paths=paths: [view for path in paths for view in _views(path)])
        if views:
            check_same_files(link, given, views, hint)


def _views(path):
    return files_of(path)[1:] if path.suffix in (".h5", ".hdf5") else []
