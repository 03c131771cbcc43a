"""The user's code behind the names of classes and functions: compared between the ranks before any work.

Of a function its syntax tree is read, without docstrings and comments, and what the names in it stand for: the user's
functions and classes are read in turn, plain values are compared, of installed packages only names. Of a module's
variable with a plain value, the expressions that the module assigns to it are compared: counters and the rank may
differ. Nothing is called.
"""

import ast
import collections
import contextlib
import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import linecache
import os
import re
import site
import sys
import sysconfig
import tokenize
import types

import numpy as np
import torch

from fedmpi.comm.agreement import difference
from fedmpi.ground.errors import AgreedUserError
from fedmpi.ground.text import Log, short
from fedmpi.ground.version import PACKAGE

log = Log(__name__)

MOST = 100  # items of a list or dict that are compared; a longer one is data
DEEPEST = 5  # lists in lists
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range)
MODULE_PARTS = {*vars(torch.nn.Module()), "_is_full_backward_hook"}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu)(:\d+)?")  # ranks may have different ones
DATA = {"train", "test", "test_of", "collate", "load", "train_sets", "test_set"}  # of a task: each silo's own
# Of a class: what Python writes into it, and what does nothing.
WRITTEN = {
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slots__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__conditional_annotations__", "__firstlineno__", "__orig_bases__",
    "__static_attributes__", "__parameters__", "__abstractmethods__", "_abc_impl", "__dataclass_fields__",
    "__dataclass_params__", "__match_args__", "__hash__",
}  # fmt: skip


def check_same_code(link, objects, may_differ=None):
    """Check that the user's code behind some objects is the same on all ranks. Collective on the link.

    Args:
        objects: what it is ("model") -> class, function, instance or module; the same names on all ranks.
        may_differ: "code": a difference is only said.

    Raises:
        AgreedUserError: on every rank, with the first function or value that differs, and on which ranks.
    """
    if link.size == 1:
        return
    code = Code()
    for role, value in objects.items():
        code.add(role, value)
    code.read()
    if code.unread and link.rank == 0:
        log.warning(f"not compared between the ranks: {short(code.listed(), 300)}")
    found = difference(link, code.entries)
    if found and may_differ == "code":
        if link.rank == 0:
            log.warning(f"the ranks' code differs, as may_differ = code allows: {found}")
    elif found:
        hint = "the code must be the same on all ranks; if it may differ, say so: may_differ = code"
        raise AgreedUserError(f"the ranks differ: {found}: {hint}", link.rank == 0)


class Code:
    """What objects of the user do, as name -> text: equal texts mean equal code.

    Attributes:
        entries: name of a function, class, value or layer -> text. unread: what is not compared, and why.
    """

    def __init__(self):
        self.entries, self.unread = {}, []
        self._tasks = {}  # number of a task of which only some members are compared -> the task
        self._names, self._queue = {}, collections.deque()  # object's number -> name; those that are to be read

    def no_source(self, name):
        """Note that a function or class cannot be read."""
        self.unread.append(f"{name} (no source)")

    def listed(self):
        """What is not compared, as text."""
        return ", ".join(dict.fromkeys(self.unread))

    def add(self, role, value):
        """Take an object under the name of what it is."""
        try:
            self._add(role, value)
        except Exception as error:  # noqa: BLE001  attributes of the user's objects can raise anything
            self._give_up(role, error)

    def _give_up(self, name, error):
        self.unread.append(f"{name} ({type(error).__name__})")
        self.entries[name] = "unreadable"

    def _add(self, role, value):
        if isinstance(value, torch.nn.Module):
            for name, layer in value.named_modules():
                entry = f"{role} {type(value).__name__}, layer '{name}'" if name else role
                self.entries[entry] = self._layer(layer)
        elif isinstance(value, LossOf):
            self._tasks[id(value.owner)] = value.owner
            for name in value.names:
                found = inspect.getattr_static(value.owner, name, None)
                self.entries[f"{role} {value.name}.{name}"] = self._member(found, value.owner)
        else:
            self.entries[role] = self.text(value) + self._state(value)

    def read(self):
        """Read all functions and classes that have been met, and those that they name."""
        while self._queue:
            value, owner, name = self._queue.popleft()
            try:
                if isinstance(value, type):
                    self._class(value, name)
                else:
                    self._function(value, owner, name)
            except Exception as error:  # noqa: BLE001
                self._give_up(name, error)

    def text(self, value, depth=0):
        """A value as text; functions and classes of the user are read later."""
        if isinstance(value, enum.Enum):
            return f"{self.text(type(value))}.{value.name}"
        if isinstance(value, np.generic):
            return repr(value.item())
        if isinstance(value, str) and DEVICE.fullmatch(value):
            return "a device"
        if isinstance(value, PLAIN):
            return _shown(value)
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, type):
            return _name(value) if is_installed(value) else self._met(value)
        if depth > DEEPEST:
            return type(value).__name__
        if (found := self._callable(value, depth + 1)) is not None:
            return found
        if isinstance(value, tuple | list | set | frozenset | dict) and len(value) <= MOST:
            return f"{_name(type(value))}({', '.join(self._items(value, depth + 1))})"
        if isinstance(value, torch.nn.Module):
            return ", ".join(f"{name}: {self._layer(layer)}" for name, layer in value.named_modules())
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return str(value)
        return self.text(type(value))

    def _items(self, value, depth):
        if isinstance(value, dict):
            return [f"{self.text(key, depth)}: {self.text(item, depth)}" for key, item in value.items()]
        texts = [self.text(item, depth) for item in value]
        return sorted(texts) if isinstance(value, set | frozenset) else texts

    def _callable(self, value, depth):
        """The text of a function or of something that stands for one; None for all else."""
        if isinstance(value, types.FunctionType):
            return self._of_function(value, None, depth)
        if isinstance(value, types.MethodType):
            return f"{self.text(value.__func__, depth)} of {self.text(type(value.__self__), depth)}"
        if isinstance(value, staticmethod | classmethod):
            return f"{type(value).__name__}({self.text(value.__func__, depth)})"
        if isinstance(value, property):
            return f"property({', '.join(self.text(part, depth) for part in (value.fget, value.fset, value.fdel))})"
        if isinstance(value, functools.cached_property):
            return f"cached_property({self.text(value.func, depth)})"
        if isinstance(value, functools.partial | functools.partialmethod):
            names = ", ".join(f"{name!r}: {self.text(given, depth)}" for name, given in value.keywords.items())
            return f"partial({self.text(value.func, depth)}, {self.text(list(value.args), depth)}, dict({names}))"
        if isinstance(value, torch.jit.ScriptFunction):
            return f"script {_hash(value.code)}"
        if isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType | np.ufunc):
            name = _name(value)
            module = getattr(value, "__module__", None)
            if module and not _is_installed_module(module):
                self.no_source(name)
            return name
        wrapped = vars(value).get("__wrapped__") if hasattr(value, "__dict__") else None  # functools.lru_cache
        return None if wrapped is None else f"{_name(type(value))}({self.text(wrapped, depth)})"

    def _of_function(self, function, owner, depth):
        """A function of the user by its name, to be read; of an installed one also what it wraps."""
        if not is_installed(function):
            return self._met(function, owner)
        inner = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        inner += [vars(function)["__wrapped__"]] if "__wrapped__" in vars(function) else []
        inner = [value for value in inner if callable(value) and not isinstance(value, torch.nn.Module)]
        return f"{_name(function)}({', '.join(self.text(value, depth) for value in inner)})"

    def _met(self, value, owner=None):
        """The name of a function or class, which is read later."""
        if id(value) not in self._names:
            name, number = f"the code of {_name(value)}", 1
            while any(name == known for _, known in self._names.values()):
                number += 1
                name = f"the code of {_name(value)} ({number})"
            self._names[id(value)] = value, name
            self._queue.append((value, owner, name))
        return self._names[id(value)][1].removeprefix("the code of ")

    def _state(self, instance):
        """What an instance of the user's class holds besides the settings, as text."""
        if isinstance(instance, (type, *PLAIN)) or self._callable(instance, 0) is not None:
            return ""
        settings = _fields(instance)
        held = {name: value for name, value in getattr(instance, "__dict__", {}).items() if not name.startswith("__")}
        held = {k: v for k, v in held.items() if k not in settings or not isinstance(v, PLAIN)}  # those are compared
        return f" with {self._items(held, 1)}" if held else ""

    def _layer(self, layer):
        """A layer's class, plain attributes and hooks, as text."""
        cls = type(layer)
        if isinstance(layer, torch.jit.ScriptModule | torch.fx.GraphModule):
            with_code = getattr(layer, "code", None)
            code = f" {_hash(with_code)}" if isinstance(with_code, str) else ""
            return f"{getattr(layer, 'original_name', cls.__name__)}{code}"
        held = {k: v for k, v in vars(layer).items() if k not in MODULE_PARTS and not k.startswith("_")}
        held = {k: v for k, v in held.items() if not isinstance(v, torch.Tensor)}
        texts = [f"{name}={self.text(value, 1)}" for name, value in sorted(held.items())]
        texts += [self.text(hook, 1) for name in HOOKS for hook in vars(layer).get(name, {}).values()]
        name = cls.__name__ if cls.__module__.startswith("torch.nn.") else self.text(cls)
        return f"{name}({', '.join(texts)})"

    def _class(self, cls, entry):
        """Read a class: its bases and values; its functions are read later."""
        parts = [self.text(base) for base in cls.__bases__] + [self.text(type(cls))]
        for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
            parts.append(f"{field.name} = {self.text(field.default)}, {self.text(field.default_factory)}")
        settings = _fields(cls)
        for name, value in sorted(vars(cls).items()):
            if name not in WRITTEN and name not in settings and not _is_written(value):
                parts.append(f"{name} = {self._member(value, cls)}")
        if not _has_source(cls):
            self.no_source(_name(cls))
        self.entries[entry] = _hash("\n".join(parts))

    def _member(self, value, owner):
        """A member of a class or instance as text."""
        inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(inner, types.FunctionType):
            return self._of_function(inner, owner, 1)
        return self.text(value, 1)

    def _function(self, function, owner, name):
        """Read a function: its tree, and what it names."""
        tree = definition(function)
        if tree is None:
            self.no_source(_name(function))
            self.entries[name] = "without source"
            return
        self.entries[name] = ""  # its place is before those of what it names
        given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
        texts = [as_text(tree), *(self.text(value, 1) for value in given)]
        inside = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        inside = {k: cell.cell_contents for k, cell in inside.items() if k != "__class__" and _is_filled(cell)}
        known = {name: function.__globals__[name] for name in _global_names(function.__code__, function.__globals__)}
        own = function.__code__.co_varnames[:1] if id(owner) in self._tasks else ()
        for chain in chains(tree):
            root, *rest = chain
            if root in inside:
                self._named(f"'{root}' in {_name(function)}", inside[root], root, rest)
            elif root in known:
                self._named("", known[root], f"{function.__module__}.{root}", rest, function.__globals__)
            elif root in own and rest and rest[0] not in DATA:
                self._of_task(owner, rest[0])
        for module in imported(tree):
            self._named("", sys.modules[module[0]], module[0], module[1:])
        self.entries[name] = _hash("\n".join(texts))

    def _named(self, *arguments):
        """Take what a name with dots in a function stands for."""
        try:
            self._resolve(*arguments)
        except Exception as error:  # noqa: BLE001
            self._give_up(arguments[2], error)

    def _resolve(self, label, value, name, rest, module=None):
        variable = name.rpartition(".")[2]
        while rest and (isinstance(value, types.ModuleType) or not (isinstance(value, type) or callable(value))):
            if isinstance(value, types.ModuleType) and is_installed(value):
                break  # torch.tanh: the name says it
            held = getattr(value, "__dict__", {})
            if rest[0] not in held:  # a method
                break
            name = value.__name__ if isinstance(value, types.ModuleType) else name
            module, variable = held if isinstance(value, types.ModuleType) else None, rest[0]
            value, name, rest = held[rest[0]], f"{name}.{rest[0]}", rest[1:]
        text = self._of_variable(module, variable, value) or self.text(value, 1)
        if isinstance(value, type | types.FunctionType) and not is_installed(value) and text == name:
            return
        self.entries.setdefault(label or name, text)

    def _of_variable(self, module, name, value):
        """What a module says that one of its variables is, as text; "" if it does not, or its value says more.

        What a program has put into a list, or counted, since then may differ between the ranks; code in it may not.
        """
        is_list = isinstance(value, list | set | dict)
        given = assigned(module, name) if module and (is_list or _is_plain(value)) else ""
        code = sorted({self.text(item) for item in _code_in(value)}) if given and is_list else []
        return f"{given} with {', '.join(code)}" if code else given

    def _of_task(self, owner, name):
        """Take what a task's function names of its own object: ``self.NAME``."""
        held = {} if isinstance(owner, type) else vars(owner)
        cls = owner if isinstance(owner, type) else type(owner)
        value = held[name] if name in held else inspect.getattr_static(cls, name, None)
        if name not in _fields(cls) or not isinstance(value, PLAIN):
            self.entries.setdefault(f"{_name(cls)}.{name}", self._member(value, owner))


@dataclasses.dataclass(frozen=True)
class LossOf:
    """Those members of a task that are compared: not its data. owner: a task, or the class of a loaded one."""

    owner: object
    names: tuple = ("loss", "predict", "metrics", "model", "class_names", "goal")

    @property
    def name(self):
        """Of the task's class."""
        return (self.owner if isinstance(self.owner, type) else type(self.owner)).__name__


def is_installed(value):
    """Whether a class, function or module is of an installed package, of Python or of fedmpi."""
    if isinstance(value, types.FunctionType):
        path = value.__code__.co_filename
        if not path.startswith("<"):
            return _is_installed_file(path)
        return path.startswith("<frozen") or _is_installed_module(value.__module__)
    return _is_installed_module(value.__name__ if isinstance(value, types.ModuleType) else value.__module__)


def _is_installed_module(name):
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if path is None:  # of Python, or typed in at a prompt
        return name != "__main__" and module is not None and (name in sys.builtin_module_names or _is_frozen(module))
    return _is_installed_file(path)


def _is_frozen(module):
    """Whether a module without a file is of Python or a package; one that a program has made is not."""
    return getattr(module, "__spec__", None) is not None or module.__name__.partition(".")[0] in sys.stdlib_module_names


@functools.cache
def _is_installed_file(path):
    path = os.path.abspath(path)
    return any(path.startswith(folder) for folder in _installed_folders()) or bool(
        {"site-packages", "dist-packages"} & {*path.split(os.sep)}
    )


@functools.cache
def _installed_folders():
    paths = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [site.getusersitepackages(), str(PACKAGE)]
    return tuple({os.path.join(path, "") for path in [*paths, *map(os.path.realpath, paths)]})


def definition(function):
    """The syntax tree of a function of the user; None if there is no source."""
    code = function.__code__
    lines = _lines_of(code.co_filename, function.__globals__)
    if code.co_name != "<lambda>":
        return _first_function(lines[code.co_firstlineno - 1 :], code.co_name)
    lambdas = _lambdas_of(code.co_filename, lines).get(code.co_firstlineno, ())
    same = [node for node in lambdas if _compiled(node) == (code.co_code, code.co_names, _plain(code.co_consts))]
    return ([*same, *lambdas, None])[0] if same or len(lambdas) < 2 else ast.Tuple(elts=lambdas, ctx=ast.Load())


def _first_function(lines, name):
    """The tree of the function with which lines begin, if it has this name; the rest of a long file is not parsed."""
    try:
        block = "".join(inspect.getblock(lines)) if lines else ""
        tree = ast.parse(f"if True:\n{block}" if block[:1].isspace() else block)
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError):
        return None
    return next((node for node in ast.walk(tree) if getattr(node, "name", None) == name), None)


def _compiled(node):
    """(code, names, constants) of a lambda by itself."""
    code = compile(ast.Expression(node), "<lambda>", "eval").co_consts[0]
    return code.co_code, code.co_names, _plain(code.co_consts)


def _plain(constants):
    return [repr(value) for value in constants if not isinstance(value, types.CodeType)]


def _lines_of(path, module):
    return tuple(linecache.getlines(path, module))


@functools.lru_cache(maxsize=64)
def _lambdas_of(path, lines):
    """Number of a line -> the lambdas that begin there."""
    found = {}
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            found.setdefault(node.lineno, []).append(node)
    return found


def as_text(node):
    """A syntax tree as text, the same with all versions of Python: without places, docstrings and what is empty."""
    if isinstance(node, list):
        return f"[{','.join(map(as_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list) and not isinstance(node, ast.ExceptHandler):
            value = [part for number, part in enumerate(value) if number or not _is_docstring(node, part)]
        if name not in ("ctx", "kind", "type_comment") and value is not None and value != []:
            parts.append(f"{name}={as_text(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def _is_docstring(node, part):
    has_one = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    is_text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)
    return has_one and is_text


def assigned(module, name):
    """What a module assigns to one of its variables, as text; "" if that is not known. `module`: its globals."""
    expressions, origin = _assignments(_lines_of(module.get("__file__") or "", module)).get(name, ([], None))
    if origin is not None and not expressions and origin[0] in sys.modules and not _is_installed_module(origin[0]):
        return assigned(vars(sys.modules[origin[0]]), origin[1])
    try:
        return ", then ".join(_shown(ast.literal_eval(expression)) for expression in expressions)
    except ValueError:
        return f"an expression {_hash(as_text(expressions))}"


@functools.lru_cache(maxsize=64)
def _assignments(lines):
    """Name of a module's variable -> (the expressions that it is assigned, (module, name) if it is imported)."""
    found, queue = {}, collections.deque()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        queue.append(ast.parse("".join(lines)))
    while queue:
        node = queue.popleft()
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (part for whole in targets for part in ast.walk(whole) if isinstance(part, ast.Name)):
                found.setdefault(target.id, ([], None))[0].append(node.value)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, ([], (node.module, alias.name)))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            queue.extend(ast.iter_child_nodes(node))
    return found


def _is_plain(value, depth=0):
    """Whether a value consists of numbers and texts only."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, tuple | list | set | frozenset):
        return depth <= DEEPEST and all(_is_plain(part, depth + 1) for part in [*value][: MOST + 1])
    return isinstance(value, (*PLAIN, np.generic)) and not isinstance(value, enum.Enum)


def _code_in(value, depth=0):
    """The user's functions and classes in nested lists."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, tuple | list | set | frozenset):
        return [found for part in [*value][:MOST] for found in _code_in(part, depth + 1)] if depth <= DEEPEST else []
    inner = value.func if isinstance(value, functools.partial) else getattr(value, "__func__", value)
    return [value] if isinstance(inner, type | types.FunctionType) and not is_installed(inner) else []


def chains(tree):
    """The names in a tree with what follows their dots, like ("torch", "nn", "Linear"), each once, in order."""
    found, inner = {}, set()
    for node in ast.walk(tree):
        names, part = [], node
        while isinstance(part, ast.Attribute):
            names.append(part.attr)
            part = part.value
        if isinstance(part, ast.Name) and id(part) not in inner:
            inner.add(id(part))
            found[(part.id, *reversed(names))] = None
    return list(found)


def imported(tree):
    """What a function itself imports of the user's loaded modules, as `chains` has it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            renamed = {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
            found += [(renamed[root], *rest) for root, *rest in chains(tree) if root in renamed and rest]
    return [chain for chain in found if chain[0] in sys.modules and not _is_installed_module(chain[0])]


def _global_names(code, known):
    """The names of globals that a function and the functions in it use."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    for inner in code.co_consts:
        names += _global_names(inner, known) if isinstance(inner, types.CodeType) else []
    return [name for name in dict.fromkeys(names) if name in known]


def _is_filled(cell):
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_written(value):
    """Whether Python's dataclass or namedtuple has written a member of a class."""
    inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    inner = getattr(inner, "__wrapped__", inner)
    if isinstance(inner, types.FunctionType):
        return inner.__code__.co_filename in ("<string>", "<attrs generated>") and inner.__name__.startswith("__")
    return isinstance(inner, types.MemberDescriptorType | types.GetSetDescriptorType)


def _has_source(cls):
    """Whether the class's module is a text."""
    functions = [part for part in vars(cls).values() if isinstance(part, types.FunctionType) and not _is_written(part)]
    if functions:
        return True  # each is looked for by itself
    path = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return path is not None and bool(linecache.getlines(path))


def _fields(value):
    return {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()


def _name(value):
    """A class or function as users write it."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__name__
    name = name.removeprefix("_VariableFunctionsClass.")
    return f"{module}.{name}" if module and module != "builtins" else name


def _shown(value):
    """A plain value as text; of words, which may be of a silo's data, only a hash."""
    text = repr(value)
    return f"words with hash {_hash(text)}" if {*"'\""} & {*text} else text


def _hash(text):
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
