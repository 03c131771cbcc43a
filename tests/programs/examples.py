"""Run the examples in the docstrings of fedmpi's public names, in the folder that is the only argument.

Prints a line per name: the name, how many examples it has, and how many failed; before it, what failed.
"""

import doctest
import os
import sys

import fedmpi

FIRST = ("train",)  # its example leaves the run folder that other examples read


def main(folder):
    os.chdir(folder)
    for name in sorted(fedmpi.__all__, key=lambda name: (name not in FIRST, name)):
        item, runner = getattr(fedmpi, name), doctest.DocTestRunner()
        for test in doctest.DocTestFinder(recurse=False).find(item, name, globs={}):
            runner.run(test)
        print(name, runner.tries, runner.failures, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
