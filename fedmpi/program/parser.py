"""The argument parser of the programs that take options of their own."""

import argparse

from fedmpi.errors import UserError


class Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are `UserError`s: one line, no usage text."""

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message):
        raise UserError(f"{message} (see --help)")
