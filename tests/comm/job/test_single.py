"""Programs of one process: their command line, their exit codes, their one line of error."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT, start

from fedmpi.cli.bench.__main__ import read_arguments
from fedmpi.cli.report.__main__ import main as report
from fedmpi.cli.sweep.__main__ import main as sweep
from fedmpi.comm.job.parser import Parser
from fedmpi.comm.job.single import run_single
from fedmpi.ground.errors import UserError
from fedmpi.prepare.__main__ import main as data


def parser():
    parser = Parser(prog="python -m it")
    parser.add_argument("--number", type=int)
    parser.add_subparsers().add_parser("inner").add_argument("name")
    return parser


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--number", "x"], "argument --number: invalid int value: 'x' (see python -m it --help)"),
        (["--num=3"], "unrecognized arguments: --num=3 (see python -m it --help)"),
        (["inner"], "the following arguments are required: name (see python -m it inner --help)"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_names_the_program(words, message):
    with pytest.raises(UserError) as error:
        parser().parse_args(words)
    assert str(error.value) == message


@pytest.mark.parametrize("program", [data, report, sweep, read_arguments])
def test_all_programs_have_the_one_parser(capsys, program):
    words = ["--no-such-option"] if program is not sweep else ["--ranks", "x"]
    try:
        program(words)
    except SystemExit as ended:
        assert ended.code == 2
        text = capsys.readouterr().err
    except UserError as error:
        text = str(error)
    assert text.strip().endswith("--help)") and "(see fedmpi " in text and text.strip().count("\n") == 0


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [(UserError("too few"), 2, "fedmpi: error: too few\n"), (KeyboardInterrupt(), 130, "fedmpi: interrupted\n")],
)
def test_exit_codes(capsys, error, code, text):
    with pytest.raises(SystemExit) as ended:
        run_single(lambda arguments: fail(error), [])
    assert ended.value.code == code and capsys.readouterr().err == text


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_closed_output_ends_the_program_silently(lines):
    program = f"from fedmpi.comm.job.single import run_single; run_single(lambda _: print('line\\n' * {lines}), [])"
    command = f'{sys.executable} -c "{program}" | true'
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # a short output is then written at the very end
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, timeout=300, env=buffered)
    assert not ended.stderr


def test_the_garbage_collector_of_a_users_program_is_left_alone(tmp_path):
    program = tmp_path / "own.py"
    program.write_text(
        "import gc, fedmpi\ngc.disable()\nfedmpi.train.main()\nprint('left', gc.isenabled(), gc.get_freeze_count())\n"
    )
    assert "left False 0" in start(1, program, "--list", "stages", is_forked=False).stdout
