"""The argument parser of all programs but fedmpi.train, whose options are the settings of a run."""

import argparse
import re

from fedmpi.ground.errors import UserError


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UserError` on a wrong command line, and accepts no abbreviated options."""

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def parse_known_args(self, args=None, namespace=None):
        if any("\0" in word for word in args or ()):
            raise UserError("an argument contains a NUL character: expected none")
        if bad := [word for word in args or () if re.fullmatch(r"--[\w-]+=--", word)]:  # argparse makes a list of it
            raise UserError(f"{bad[0]}: expected another value than --")
        return super().parse_known_args(args, namespace)

    def print_help(self, file=None):
        print(self.format_help(), end="", file=file, flush=True)  # argparse's own ignores a full disk

    def error(self, message):
        raise UserError(f"{message} (see {self.prog} --help)")


def count(text):
    """The type of an option that is a whole number >= 1, for `add_argument`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, not '{text}'")
    return int(text)
