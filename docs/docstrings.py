"""For mkdocstrings: examples in docstrings as code, brackets in sentences as brackets, and the arguments of train."""

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

    def on_package(self, *, pkg, **_):
        """The signature of `fedmpi.train` names the arguments that its docstring describes: fields of `Arguments`."""
        own, function = pkg["cli.train.Arguments"].attributes.values(), pkg["cli.train.train"]
        named = set(re.findall(r"^ {4,}(\w+): ", function.docstring.value, re.MULTILINE))
        parameters = [
            griffe.Parameter(
                field.name, annotation=field.annotation, kind=griffe.ParameterKind.keyword_only, default=field.value
            )
            for field in own
            if field.name in named
        ]
        function.parameters = griffe.Parameters(*parameters, *function.parameters)

    def on_class(self, *, cls, **_):
        """A class without an `__init__`, which users derive theirs from, gets its signature: no arguments."""
        if not cls.bases and not cls.decorators and "__init__" not in cls.members:
            own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
            cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(own)))


def _plain(text):
    return text.replace("][", "]\\[").replace("[(", "\\[(")
