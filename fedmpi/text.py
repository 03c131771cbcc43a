"""Tables and quantities for people."""


def table(rows):
    """Two columns as text: [(name, value), ...]."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def format_bytes(count):
    """A number of bytes with its unit, like "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_table(titles, rows):
    """Lines of a table: the first column aligned left, the others right.

    Args:
        titles: list of str, one per column. rows: lists of as many cells; anything that `str` takes.
    """
    texts = [titles, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts)]
    aligned = [[f"{row[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:]))] for row in texts]
    return [("  " + "  ".join(row)).rstrip() for row in aligned]
