"""Tables and quantities as people read them."""

import pytest

from fedmpi.ground.text import (
    Table,
    format_bytes,
    format_count,
    format_metric,
    format_quantity,
    format_ranges,
    format_seconds,
    short,
    spread_in_words,
    table,
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (format_bytes(0), "0 B"), (format_bytes(1023), "1023 B"), (format_bytes(1536), "1.5 KiB"),
        (format_bytes(3 * 2**40), "3.0 TiB"), (format_seconds(0.5), "0.50 s"), (format_seconds(17.84), "17.8 s"),
        (format_seconds(119), "119 s"), (format_seconds(150), "2.50 min"), (format_seconds(7200), "2.00 h"),
        (format_count(15010), "15,010"), (format_quantity("rounds", 40), "40"),
        (format_quantity("gradients", 2.5e6), "2.50 millions"),
        (format_quantity("seconds", 10.0, 9.0, 12.0), "10.0 (9.0–12.0) s"),
        (format_quantity("seconds", 10.0, 10.0, 10.0), "10.0 s"),
        (format_quantity("bytes", 2048, 1024, 3072), "2.0 KiB (1.0 KiB–3.0 KiB)"),
    ],
)  # fmt: skip
def test_quantities(text, words):
    assert text == words


@pytest.mark.parametrize(
    ("kind", "number", "before", "words"),
    [
        ("bytes", 2**10, "1023 B", "1.0 KiB"), ("bytes", 2**20, "1024.0 KiB", "1.0 MiB"),
        ("bytes", 2**30, "1024.0 MiB", "1.0 GiB"), ("bytes", 2**40, "1024.0 GiB", "1.0 TiB"),
        ("rounds", 10**5, "99,999", "100 thousands"), ("gradients", 10**4, "9,999", "10.0 thousands"),
        ("gradients", 2 * 10**6, "2,000 thousands", "2.00 millions"),
        ("gradients", 2 * 10**9, "2,000 millions", "2.00 billions"),
        ("seconds", 120, "119 s", "2.00 min"), ("seconds", 7200, "120 min", "2.00 h"),
    ],
)  # fmt: skip
def test_the_unit_from_which_a_larger_one_is_used(kind, number, before, words):
    assert [format_quantity(kind, number - 1), format_quantity(kind, number)] == [before, words]


def test_a_long_text_is_cut_after_300_characters():
    assert short("x" * 300) == "x" * 300 and short("x" * 301) == "x" * 300 + "..."
    assert short("a\n\x1b b\t", 3) == "a b" and short("a bc", 3) == "a b..."


@pytest.mark.parametrize(
    ("value", "deviation", "words"),
    [
        (0.85123, 0.01, "0.8512 ± 0.0100"), (-0.25, None, "-0.2500"), (0.0, None, "0.0000"), (0.01, None, "0.0100"),
        (0.0098764, 0.001, "0.009876 ± 0.001"), (99.5, None, "99.5000"), (100.0, 2.25, "100.0 ± 2.2"),
        (12345.6, 10.4, "12,346 ± 10"), (1.5e7, None, "1.5e+07"),
    ],
)  # fmt: skip
def test_metrics_have_as_many_digits_as_are_worth_reading(value, deviation, words):
    assert format_metric(value, deviation) == words


def test_ranges_of_numbers():
    assert [format_ranges(numbers) for numbers in ([], [3], [0, 1, 2, 3, 8], [1, 3, 4])] == ["", "3", "0-3,8", "1,3-4"]


def test_tables_are_aligned():
    rows = [("name", "n"), ("a", "10"), ("long one", "2")]
    assert table(rows).splitlines() == ["  name      n", "  a         10", "  long one  2"]
    assert table(rows, right_from=1, indent="").splitlines() == ["name       n", "a         10", "long one   2"]
    shown = Table(["name", "n"], [["a", "10"]], frozenset({(0, 1)}))
    assert shown.text().splitlines() == ["  name   n", "  a     10"]
    assert shown.markdown() == "| name | n |\n| --- | ---: |\n| a | **10** |\n"


def test_values_of_clients_in_a_line():
    values = [0.9, float("nan"), 0.6, 0.75]
    line = "0.7500 on average, 0.6000 at worst (client 2, Bonn), spread 0.1225"
    assert spread_in_words(values, ["Ulm", "", "Bonn", ""]) == line
    assert spread_in_words(values, less_is_better=True) == line.replace("0.6000", "0.9000").replace("2, Bonn", "0")
    assert spread_in_words([float("nan")]) == "–"
