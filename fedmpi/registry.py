"""Finding a class by its name on the command line or by its dotted path; there is no table to edit."""

import importlib
import inspect
import pkgutil
import types
from typing import Any

from fedmpi.errors import UserError
from fedmpi.settings import nearest


def command_name(cls: type) -> str:
    """The name of a class on the command line: its own `name` or its class name in lower case."""
    return str(vars(cls).get("name") or cls.__name__.lower())


def plain(name: str) -> str:
    """A name as names are compared: "fed_avg", "Fed-Avg" and "FedAvg" are all "fedavg"."""
    return name.lower().replace("-", "").replace("_", "")


def known(package: types.ModuleType, base: type) -> dict[str, Any]:
    """Name -> class of every subclass of `base` defined in the modules of `package`.

    Args:
        package: an imported package, for example `fedmpi.algorithms`.
        base: the base class; it is not listed itself.
    """
    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("_"):
            continue  # an entry point
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for cls in vars(module).values():
            is_ours = inspect.isclass(cls) and cls.__module__ == module.__name__
            if is_ours and issubclass(cls, base) and cls is not base and not cls.__name__.startswith("_"):
                found[command_name(cls)] = cls
    return dict(sorted(found.items()))


def find(kind: str, name: str, package: types.ModuleType, base: type) -> Any:
    """The class that the user means by `name`.

    Args:
        kind: what it is, for the message ("algorithm").
        name: a name as `known` lists it ("fafed"; case, "-" and "_" do not matter), or the
            dotted path of a subclass of `base` that can be imported ("mypackage.MyAlgorithm").
        package, base: see `known`.

    Raises:
        UserError: one line with the known names and the nearest.
    """
    classes = known(package, base)
    if "." in name:
        return _import(kind, name, base)
    also_called = {other: own for own, cls in classes.items() for other in vars(cls).get("also_called", ())}
    # fed_ams is another paper's name for local_amsgrad, while FedAMS is a class here: an exact other name is refused.
    is_refused = name.lower().replace("-", "_") in also_called
    meant = next((cls for own, cls in classes.items() if plain(own) == plain(name)), None)
    if meant is not None and not is_refused:
        return meant
    own = next((own for other, own in also_called.items() if plain(other) == plain(name)), None)
    hint = nearest(name, classes) if own is None else f": here it is called '{own}'"
    raise UserError(
        f"unknown {kind} '{name}'{hint}; known: {', '.join(classes)}, "
        f"or the dotted path of your own class, like mypackage.MyClass"
    )


def _import(kind: str, path: str, base: type) -> Any:
    module_name, _, class_name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # noqa: BLE001  importing a user's module can raise anything
        raise UserError(f"{kind} '{path}': cannot be imported: {type(error).__name__}: {error}") from error
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        raise UserError(f"{kind} '{path}': expected a subclass of {base.__module__}.{base.__qualname__}")
    return cls
