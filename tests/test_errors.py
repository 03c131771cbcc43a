"""What a file that cannot be read or written is called: one line, without numbers of the system."""

import pytest

from fedmpi.ground.errors import INTERRUPTED, STOPPED, UserError, attempt, cannot, one_line


def test_an_error_is_one_line():
    assert one_line(FileNotFoundError(2, "No such file or directory", "a.h5")) == "No such file or directory"
    assert one_line(ValueError("first\n  second\x1b")) == "first second"
    assert (one_line(KeyError("x")), one_line(MemoryError())) == ("KeyError: 'x'", "MemoryError")
    assert len(one_line(ValueError("x" * 9999))) < 400


def test_a_message_is_one_line_of_at_most_2000_characters():
    assert str(UserError("first\n\x1bsecond")) == "first  second" and str(UserError(3)) == "3"
    assert str(UserError("x" * 2000)) == "x" * 2000 and str(UserError("x" * 2001)) == "x" * 2000 + "..."


def test_exit_codes_are_those_that_job_scripts_rely_on():
    assert (STOPPED, INTERRUPTED) == (75, 130)


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        ("read", "a.h5: cannot be read: odd"),
        ("write", "a.h5: cannot be written: odd"),
        ("read as HDF5", "a.h5: cannot be read as HDF5: odd"),
    ],
)
def test_a_file_that_cannot_be_used(verb, text):
    assert str(cannot(verb, "a.h5", OSError(5, "odd"))) == text


def test_only_the_expected_errors_are_about_the_file():
    with pytest.raises(UserError, match="^a.h5: cannot be read: odd$"), attempt("read", "a.h5"):
        raise OSError(5, "odd")
    with pytest.raises(ValueError), attempt("read", "a.h5"):
        raise ValueError
    with pytest.raises(UserError, match="^a.h5: cannot be read: odd$"), attempt("read", "a.h5", ValueError):
        raise ValueError("odd")
    with pytest.raises(UserError, match="^what it says$"), attempt("read", "a.h5", Exception):
        raise UserError("what it says")
