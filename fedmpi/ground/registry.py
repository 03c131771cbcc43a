"""Finding a class by its name on the command line or by its dotted path; there is no table to edit.

Other packages (plug-ins) add classes by entry points. The group of an entry point is the package that contains fedmpi's
own classes of that kind ("fedmpi.algorithms", "fedmpi.tasks", "fedmpi.models", "fedmpi.oracles", "fedmpi.aggregation",
"fedmpi.aggregation.codecs", "fedmpi.aggregation.stages" or "fedmpi.data.partitions"); its name is the class's name on
the command line.
"""

import functools
import importlib
import importlib.metadata
import inspect
import os
import pkgutil
import sys
import types
from typing import Any

from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import nearest

# (group, name) -> line about a plug-in that cannot be imported, as far as `known` has found out.
BROKEN: dict[tuple[str, str], str] = {}


def command_name(cls: type) -> str:
    """The name of a class on the command line: its own `name` or its class name in lower case."""
    return str(vars(cls).get("name") or cls.__name__.lower())


def plain(name: str) -> str:
    """A name as names are compared: "fed_avg", "Fed-Avg" and "FedAvg" are all "fedavg"."""
    return name.lower().replace("-", "").replace("_", "")


def misspelt(part: object, base: type) -> str:
    """Text about a method of a user's class that is nearly called like one of `base`, which the class lacks; or ""."""
    cls = type(part)
    lacking = [name for name in vars(base) if name[0] != "_" and getattr(cls, name, None) is getattr(base, name)]
    for name in dir(cls):
        is_new = name[0] != "_" and not hasattr(base, name) and inspect.isfunction(getattr(cls, name))
        if is_new and (hint := nearest(name, lacking, least=0.9)):
            return f"{name} is no method of {base.__name__}{hint}"
    return ""


def known(package: types.ModuleType, base: type) -> dict[str, Any]:
    """Name -> class of every subclass of `base` defined in the modules of `package`, and of the plug-ins.

    Of a plug-in with the name of one of fedmpi's classes, the latter is listed, and `find` refuses the name. Plug-ins
    that cannot be imported are left out; `BROKEN` says why.

    Args:
        package: an imported package, for example `fedmpi.algorithms`.
        base: the base class; it is not listed itself.
    """
    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("_"):
            continue  # a program (__main__)
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for cls in vars(module).values():
            is_ours = inspect.isclass(cls) and cls.__module__ == module.__name__ and "is_base" not in vars(cls)
            if is_ours and issubclass(cls, base) and cls is not base and not cls.__name__.startswith("_"):
                found[command_name(cls)] = cls
    for name, entry in _plug_ins(package.__name__).items():
        if (package.__name__, name) in BROKEN or name in found:
            continue
        try:
            found[name] = _import(package.__name__, entry.value.replace(":", "."), base)
            BROKEN.pop((package.__name__, name), None)  # noted if the plug-in's own imports came here
        except UserError as error:
            BROKEN[package.__name__, name] = f"the plug-in {name} is left out: {error}"
    return dict(sorted(found.items()))


@functools.cache
def _plug_ins(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Name -> entry point of what the installed packages add to a group."""
    return {entry.name: entry for entry in _all_entry_points().select(group=group)}


@functools.cache
def _all_entry_points() -> Any:
    """The entry points of all installed packages; finding them takes some hundredths of a second."""
    return importlib.metadata.entry_points()


def find(kind: str, name: str, package: types.ModuleType, base: type) -> Any:
    """The class that the user means by `name`.

    Args:
        kind: what it is, for the message ("algorithm").
        name: a name as `known` lists it ("fafed"; case, "-" and "_" do not matter), or the
            dotted path of a subclass of `base` that can be imported ("mypackage.MyAlgorithm").
        package, base: see `known`.

    Raises:
        UserError: one line with the known names and the nearest; or if the name is that of several classes.
    """
    classes = known(package, base)
    if "." in name:
        return _import(kind, name, base)
    _check_one_meaning(kind, name, package, classes)
    also_called = {other: own for own, cls in classes.items() for other in vars(cls).get("also_called", ())}
    # Names that differ only in "-" and "_" may be different methods. fed_ams is another paper's name for local_amsgrad,
    # while fedams is a class of its own: a name in `also_called`, written exactly so, is refused with a hint. In the
    # same way fedavgm and fedavg_m are two classes: an exact name comes before a similar one.
    exact = name.lower().replace("-", "_")
    is_refused = exact in also_called
    meant = classes.get(exact) or next((cls for own, cls in classes.items() if plain(own) == plain(name)), None)
    if meant is not None and not is_refused:
        return meant
    broken = next((e for e in _plug_ins(package.__name__).values() if plain(e.name) == plain(name)), None)
    if broken is not None:
        return _import(kind, broken.value.replace(":", "."), base)
    own = next((own for other, own in also_called.items() if plain(other) == plain(name)), None)
    hint = nearest(name, classes) if own is None else f": its name in fedmpi is '{own}'"
    raise UserError(
        f"unknown {kind} '{name}'{hint}; known: {', '.join(classes)}, "
        f"or the dotted path of your own class, like mypackage.MyClass"
    )


def _check_one_meaning(kind: str, name: str, package: types.ModuleType, classes: dict[str, Any]) -> None:
    """Raise UserError if a plug-in has a name that another plug-in or one of fedmpi's own classes has, too."""
    entries = _all_entry_points().select(group=package.__name__)
    paths = sorted({entry.value.replace(":", ".") for entry in entries if plain(entry.name) == plain(name)})
    ours = [cls for own, cls in classes.items() if plain(own) == plain(name) and _is_of(cls, package)]
    if paths and len(paths) + len(ours) > 1:
        both = " and ".join([*(f"{cls.__module__}.{cls.__name__}" for cls in ours), *paths])
        raise UserError(f"{kind} '{name}' is the name of {both}, a plug-in: expected the dotted path of one of them")


def _is_of(cls: Any, package: types.ModuleType) -> bool:
    return str(cls.__module__).startswith(f"{package.__name__}.")


def import_path(path: str) -> Any:
    """What a dotted path names, like "mymodule.MyClass"; the current folder is searched too.

    Raises:
        Exception: of any kind, what importing the user's module raises; also if it calls ``sys.exit``.
    """
    module_name, _, name = path.rpartition(".")
    here = os.getcwd()
    if not getattr(sys.flags, "safe_path", False) and not {"", here} & set(sys.path):
        sys.path.append(here)  # as python -m does, so that the command fedmpi train also finds mymodel.py
    try:
        return getattr(importlib.import_module(module_name), name)
    except BaseException as error:
        if isinstance(error, Exception) or type(error) is KeyboardInterrupt:  # Ctrl-C
            raise
        raise ImportError(f"{type(error).__name__}({error}) was raised") from error


def _import(kind: str, path: str, base: type) -> Any:
    """The class with this dotted path. See `find` for the arguments and errors."""
    try:
        cls = import_path(path)
    except Exception as error:  # noqa: BLE001  importing a user's module can raise anything
        raise UserError(f"{kind} '{path}': cannot be imported: {type(error).__name__}: {error}") from error
    if kind == "model" and inspect.isfunction(cls):
        return cls  # a function that makes one, like torchvision.models.resnet18
    if not (inspect.isclass(cls) and issubclass(cls, base) and cls is not base and not inspect.isabstract(cls)):
        function = ", or a function that makes one" if kind == "model" else ""
        raise UserError(f"{kind} '{path}': expected a subclass of {base.__module__}.{base.__qualname__}{function}")
    return cls
