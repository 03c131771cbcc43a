"""What goes from a silo to the others, as text."""

import json
import textwrap
from collections.abc import Collection

from fedmpi.comm.crosses import as_rows

WIDTH = 118
HEAD = (
    "What goes from a silo (a hospital, say: a rank of the job) to the others in such a run. All other silos can read",
    "what goes to all ranks. docs/how_it_works.md explains the words, and says what never leaves a silo.",
)


def describe_crossing(kinds: Collection[str], as_json: bool) -> str:
    """The table of some kinds of messages, a paragraph for each; or as JSON."""
    (_, *header), *rows = as_rows(kinds)
    if as_json:
        return json.dumps({name: dict(zip(header, cells)) for name, *cells in rows}, indent=1, ensure_ascii=False)
    lines = [*HEAD]
    width = max(map(len, header)) + 4
    for name, *cells in rows:
        lines += ["", name]
        for title, text in zip(header, cells):
            first, *others = textwrap.wrap(text, WIDTH - width) or [""]
            lines += [f"  {title:<{width - 2}}{first}", *(" " * width + line for line in others)] if text else []
    return "\n".join(lines)
