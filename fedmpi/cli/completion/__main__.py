"""Completion of fedmpi's commands in a shell: ``fedmpi completion bash > ~/.local/share/fedmpi.bash``.

A script for bash, zsh or tcsh that completes the options and choices of fedmpi train, fedmpi data and the other
commands; load it from the shell's start file.
"""

import argparse
import importlib
import re
import sys

from fedmpi.comm.job.parser import Parser
from fedmpi.comm.job.single import run_single
from fedmpi.ground.errors import UserError
from fedmpi.ground.version import PACKAGE

SHELLS = ("bash", "zsh", "tcsh")


def main(arguments=None):
    """Entry point; `arguments` default to those of the process."""
    run_single(_run, sys.argv[1:] if arguments is None else arguments)


def make_parser():
    """The parser of the program's options."""
    parser = Parser(prog="fedmpi completion", description=__doc__)
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for")
    return parser


def _run(arguments):
    shell = make_parser().parse_args(arguments).shell
    try:
        import shtab
    except ImportError:
        raise UserError('completion needs shtab: pip install "fedmpi[completion]" (or pip install shtab)') from None
    whole = argparse.ArgumentParser(prog="fedmpi")
    commands = whole.add_subparsers()
    for name, parser in sorted(_parsers().items()):
        commands.add_parser(name, parents=[parser], add_help=False, help=f"see fedmpi {name} --help")
    print(shtab.complete(whole, shell=shell))


def _parsers():
    """Program -> the argparse parser of its options."""
    modules = {path.parent.name: f"fedmpi.cli.{path.parent.name}" for path in (PACKAGE / "cli").glob("*/__main__.py")}
    modules["data"] = "fedmpi.prepare"
    programs = {name: importlib.import_module(f"{module}.__main__") for name, module in modules.items()}
    found = {name: program.make_parser() for name, program in programs.items() if hasattr(program, "make_parser")}
    return {**found, "train": _training()}


def _training():
    """A parser of every setting of training: the run's, and those of all classes."""
    from fedmpi.aggregation import stages
    from fedmpi.aggregation.stages.base import Stage
    from fedmpi.config.build import CHOICES
    from fedmpi.config.grammar import FLAGS, SHORT
    from fedmpi.config.help import FLAG_HELP, declared_settings
    from fedmpi.config.presets import preset_names
    from fedmpi.ground.registry import known
    from fedmpi.training.settings import RunSettings

    classes = {group: known(choice.package, choice.base) for group, choice in CHOICES.items()}
    settings = declared_settings(RunSettings, {})
    for group, of_group in classes.items():
        for cls in of_group.values():
            settings |= declared_settings(RunSettings, {group: cls})
    for name, cls in known(stages, Stage).items():
        settings |= declared_settings(RunSettings, {f"stages.{name}": cls})
    parser = argparse.ArgumentParser(add_help=False)
    for setting in settings.values():
        words = re.search(r" \[([\w |]+)\]$", setting.help)  # as the help of a setting ends that is one of some words
        choices = words[1].split(" | ") if words else ["true", "false"] if setting.type is bool else None
        parser.add_argument(f"--{setting.key}", help=setting.help.replace("%", "%%"), choices=choices)
    for group, of_group in classes.items():
        parser.add_argument(f"--{group}", choices=list(of_group), help=f"which {group}")
    parser.add_argument("--stages", help="names of stages, separated by commas")
    for key, long in SHORT.items():
        parser.add_argument(f"--{key}", help=f"short for --{long}")
    choices = {"preset": preset_names(), "list": [f"{group}s" for group in (*CHOICES, "preset", "stage")]}
    for flag, text in FLAG_HELP.items():
        more = {"choices": choices.get(flag)} if flag in FLAGS else {"action": "store_true"}
        parser.add_argument(f"--{flag}", help=text, **more)
    return parser


if __name__ == "__main__":
    main()
