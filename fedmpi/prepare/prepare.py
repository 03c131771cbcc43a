"""Make the HDF5 file of a data set from official files, downloaded or not, or from the user's own files."""

import os
import shlex

from fedmpi.data.source import ACCOUNT, SILO_NAME
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.limits import check_file, unpacking
from fedmpi.ground.text import short
from fedmpi.prepare.download import fetch
from fedmpi.prepare.formats import OFFICIAL_READERS, find_reader, image_table, images, masks, npz, table
from fedmpi.prepare.official import OFFICIAL
from fedmpi.prepare.writer import check_writable, write_file

TABLES = (
    "label",
    "test_from",
    "missing",
    "one_hot",
    "columns",
    "least",
    "drop",
    "id",
    "group",
    "keep",
    "features",
    "reading",
)
USED = {table.read: TABLES, npz.read: ("layout",), masks.read: ("size", "mode", "masks", "follow_links"),
        image_table.read: ("size", "mode", "label", "test_from"),
        images.read: ("size", "mode", "follow_links", "label", "group", "reading")}  # fmt: skip


def prepare(name, folder, options, origin=None, mirror=None, force=False):
    """Write folder/NAME.h5 and return its path; an existing file is left as it is, unless `force`.

    Args:
        name: of an official data set, or any other name for the user's own data.
        folder: `pathlib.Path`, made if it does not exist. Downloads go to folder/downloads/NAME.
        options: a `fedmpi.prepare.formats.common.ReaderOptions`.
        origin: `pathlib.Path` of the files to read; None: the official files are downloaded.
        mirror: URL of a folder with the official files; None: their official place.
        force: whether to replace an existing file.

    Raises:
        UserError: if there is nothing to read, or the files are damaged, incomplete or no data set to train on.
    """
    if name == "digits":
        raise UserError("prepare digits: digits come with scikit-learn and need no file; choose another name for yours")
    if options.size is not None and options.size < 1:
        raise UserError(f"--size {options.size}: expected at least 1, pixels per side")
    if options.least < 1:
        raise UserError(f"--least {options.least}: expected at least 1, rows that a category must have")
    if len({*options.classes} - {""}) < len(options.classes):
        raise UserError(f"--classes {','.join(options.classes)}: expected different names")
    with unpacking(options.max_unpacked):
        return _prepare(name, folder, options, origin, mirror, force)


def _prepare(name, folder, options, origin, mirror, force):
    """See `prepare`, after the options are checked."""
    path = folder / f"{name}.h5"
    if path.is_file() and not force:
        print(f"{path} exists already (--force replaces it, if fedmpi wrote it)")
        return path
    check_writable(path)
    if origin is None:
        if name not in OFFICIAL_READERS:
            raise UserError(f"prepare {name}: expected one of {', '.join(OFFICIAL_READERS)}, or --from with your data")
        origin = _download(name, folder / "downloads" / name, mirror)
    else:
        _check_origin(origin)
    readable_path = origin
    try:
        read, readable_path = (masks.read, origin) if options.masks else find_reader(name, origin)
        _check_used(options, read, readable_path)
        splits, attributes = read(readable_path, options)
        if read not in OFFICIAL_READERS.values() and "train/labels" in splits:
            of = f"the values of {options.group}" if options.group else "each class"
            share = f"a random share {options.test_share:g} of {of}, seed {options.seed}"
            account = {"test_rows": share, **attributes.get(ACCOUNT, {})}
            account["command"] = _command(name, origin, options, account.pop("given", {}))
            attributes = {**attributes, ACCOUNT: account}
        silo = {SILO_NAME: options.silo} if options.silo else {}
        write_file(path, splits, {"dataset": name, **attributes, **silo})
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  damaged files make readers raise errors of many kinds
        raise UserError(f"{readable_path}: cannot be read: {short(f'{type(error).__name__}: {error}')}") from error
    return path


def _check_origin(origin):
    """Check that a path is a folder or a regular file: reading a FIFO or a device might never end."""
    if not os.path.exists(origin):
        raise UserError(f"--from {origin}: no such file or folder")
    if not origin.is_dir():
        check_file(origin, "--from ")


def _check_used(options, read, path):
    """Check that a reader uses all options that were given.

    Raises:
        UserError: if it would ignore one.
    """
    used = ("test_share", "seed", "classes", "silo", "max_unpacked", *USED.get(read, ()))
    if read is images.read and not images.labels_file(path):
        used = used[:-3]
    for name, default in vars(type(options)()).items():
        given = getattr(options, name)
        if name not in used and (given or None) != (default or None):
            name = "reading of fields" if name == "reading" else f"--{name.replace('_', '-')}"
            raise UserError(f"{name}: has no meaning for {path}: leave it out")


def _command(name, origin, options, assumed):
    """The command line that reads the same files in the same way, whatever is found in them."""
    given = {**vars(options), **vars(options.reading), **assumed}
    defaults = {**vars(type(options)()), **vars(type(options.reading)())}
    words = ["python", "-m", "fedmpi", "data", "prepare", name, "--from", origin]
    for key, value in given.items():
        if key == "reading" or value in (defaults[key], [], ()):
            continue
        option = {"dates": "--date", "units": "--unit"}.get(key, f"--{key.replace('_', '-')}")
        value = ",".join(value) if key == "classes" else value
        if value is True:
            words.append(option)
            continue
        for argument in value if isinstance(value, list | tuple) else [value]:
            words += [option, argument]
    return shlex.join(map(str, words))


def _download(name, folder, mirror):
    """The folder of the official files of a data set, after those that it lacks have been downloaded."""
    folder.mkdir(parents=True, exist_ok=True)
    official = OFFICIAL[name]
    base = (mirror or official.url).rstrip("/")
    for file, sha256 in official.files.items():
        fetch(f"{base}/{file}", folder / file, sha256)
    return folder
