"""For mkdocstrings: examples in docstrings as code, and brackets in sentences as brackets, not as links."""

import re

import griffe

EXAMPLE = re.compile(r"^( *)>>> (?:.+\n?)+", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Changes the text of every docstring before it becomes Markdown."""

    def on_instance(self, *, obj, **_):
        if obj.docstring is None:
            return
        parts, end, text = [], 0, obj.docstring.value
        for found in EXAMPLE.finditer(text):
            code = re.sub(r"  # doctest:.*", "", found[0].rstrip("\n"))
            parts += [_plain(text[end : found.start()]), f"{found[1]}```pycon\n{code}\n{found[1]}```\n"]
            end = found.end()
        obj.docstring.value = "".join([*parts, _plain(text[end:])])


def _plain(text):
    return text.replace("][", "]\\[").replace("[(", "\\[(")
