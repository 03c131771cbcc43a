"""``python -m fedmpi data statistics``: what all silos' data are together, as sums. On ranks."""

import pathlib

from fedmpi.comm.agreement import agree
from fedmpi.data.source import names_silos, silo_name
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.limits import unpacking
from fedmpi.ground.text import printable_json, short, table
from fedmpi.prepare.commands.prepare import add_reading, reader_options
from fedmpi.prepare.formats.common import LEAST
from fedmpi.prepare.formats.frames import table_ending

LONGEST = 40  # characters of a name
DESCRIPTION = """\
Means, deviations, quantiles and missing values of all silos' columns, and the balance of their classes, as sums over
the silos: no row leaves its silo, and no rank sees another one's part of a sum.

    mpirun -np 4 python -m fedmpi data statistics 'hospital_{client}.csv' --label ill --out columns.json"""


def add_parser(commands):
    parser = commands.add_parser("statistics", help="all silos' data in numbers, on ranks", description=DESCRIPTION)
    parser.set_defaults(run=run)
    text = (
        "one file per client, like 'silo_{client}.h5' or tables like 'hospital_{client}.csv'; a path without {client} "
        "is that of each rank's own file"
    )
    parser.add_argument("data", help=text)
    text = "clients; default: one per rank, or, of one rank, as many as there are files"
    parser.add_argument("--clients", type=int, metavar="N", help=text)
    text = f"rows that a number must be of to be shown; default: {LEAST}"
    parser.add_argument("--least", type=int, metavar="N", default=LEAST, help=text)
    text = (
        "silos that must have a class or category for its name to leave them; default: 2. With 1, or a single silo, "
        "it must have --least rows in one of them"
    )
    parser.add_argument("--least-silos", type=int, metavar="K", default=2, help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    text = "write the file by which all silos prepare their tables: data prepare --columns FILE"
    parser.add_argument("--out", metavar="FILE", help=text)
    add_reading(parser)


def run(options, link):
    """Print a line per column and class; write the file of columns if it is asked for. Collective on the link."""
    from fedmpi.comm.job.ranks import show  # imports MPI
    from fedmpi.prepare.statistics import pooled

    paths = agree(link, lambda: _paths(options, link))
    num_silos = int(link.allgather([len(paths)], "machinery").sum())
    agree(link, lambda: _check(options, num_silos))
    silos = agree(link, lambda: [_read(path, options) for path in paths])
    least_silos = min(options.least_silos, num_silos)
    found = agree(link, lambda: pooled(link, silos, options.least, least_silos))
    if options.out:
        agree(link, lambda: _write(found, silos[0], options) if link.rank == 0 else None)
    show(link, (printable_json(found, indent=1) if options.json else _text(found, options)) if link.rank == 0 else "")


def _paths(options, link):
    """The paths of the files of this rank's clients."""
    given = f"statistics {options.data}"
    if not names_silos(options.data):
        if options.clients not in (None, link.size):
            raise UserError(
                f"{given} --clients {options.clients}: expected one file per client, like 'silo_{{client}}.h5'"
            )
        return [pathlib.Path(options.data)]
    number = options.clients or link.size
    if options.clients is None and link.size == 1:
        number = 0
        while pathlib.Path(silo_name(options.data, number, given)).is_file():
            number += 1
        number = max(1, number)
    if number < link.size:
        raise UserError(f"{given}: {number} clients on {link.size} ranks: expected at least as many clients")
    edges = [number * rank // link.size for rank in (link.rank, link.rank + 1)]
    paths = {client: pathlib.Path(silo_name(options.data, client, given)) for client in range(*edges)}
    for client, path in paths.items():
        if not path.is_file():
            raise UserError(f"{given}: client {client} has no file {path}")
    return [*paths.values()]


def _check(options, num_silos):
    """Check the options that the number of silos limits.

    Raises:
        UserError: one line.
    """
    if options.least < 1:
        raise UserError(f"--least {options.least}: expected at least 1, rows that a number must be of to be shown")
    if not 1 <= options.least_silos <= max(2, num_silos):
        raise UserError(f"--least-silos {options.least_silos}: there are {num_silos} silos: expected 1 to {num_silos}")


def _read(path, options):
    from fedmpi.prepare.statistics import Silo

    if path.suffix in (".h5", ".hdf5"):
        return Silo.of_file(path)
    if table_ending(path) is None:
        raise UserError(f"statistics {path}: expected a file ending in .h5, or a table")
    with unpacking(options.max_unpacked):
        return Silo.of_table(path, reader_options(options))


def _write(found, silo, options):
    from fedmpi.prepare.statistics import columns_of

    if silo.facts is None:
        raise UserError(f"--out {options.out}: the files are no tables, or not made from some: leave it out")
    columns_of(found, silo.facts, options.missing or "refuse").write(options.out)


def _text(found, options):
    """What was found as text."""

    def number(value):
        return f"< {options.least}" if value is None else f"{value:,}"

    def value(measured):
        return "–" if measured is None else f"{measured:.6g}"

    lines = [f"{found['rows']:,} rows of {found['silos']} silos"]
    columns = [[short(name, LONGEST), number(of["missing"]), *(value(of[key]) for key in [*of][1:])]
               for name, of in found["numbers"].items()]  # fmt: skip
    if columns:
        header = ["column", "missing", "mean", "deviation", *[*next(iter(found["numbers"].values()))][3:]]
        lines += ["", table([header, *columns], right_from=1)]
    for name, of in found["words"].items():
        rows = [[short(word, LONGEST), number(count)] for word, count in of["rows"].items()]
        others = f"in fewer than {options.least_silos} silos"
        others = f"of fewer than {options.least} rows" if min(options.least_silos, found["silos"]) == 1 else others
        rows += [[f"others, each {others}", number(of["other"])]] if of["other"] != 0 else []
        lines += ["", table([[short(name, LONGEST) or "class", "rows"], *rows], right_from=1)]
    return "\n".join(lines)
