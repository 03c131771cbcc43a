"""Checks of what an algorithm declares, before any work starts."""

from fedmpi.algorithms.base import KINDS, Algorithm, Client, Count, Server
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import misspelt

# What clients and the server have besides rows and what algorithms may use of them.
OTHERS = ("buffers", "carried", "counters", "kept", "num_gradients", "oracle", "own", "round", "rows", "skipped")


def check_rows(algorithm: Algorithm) -> None:
    """Check that an algorithm's rows are names, each in one place, and that it defines its local step, if it has any.

    Raises:
        UserError: one line: which declaration, what is expected.
    """
    name, seen = type(algorithm).__name__, set[str]()
    if wrong := misspelt(algorithm, Algorithm):
        raise UserError(f"algorithm {name}: {wrong}")
    has_none = getattr(type(algorithm), "local_step", None) is Algorithm.local_step
    if has_none and None in (exchange.work for exchange in algorithm.exchanges()):
        raise UserError(f"algorithm {name}: expected that it defines local_step, its local step")
    for kind in ("exchanged", "server_rows", "client_rows", "scratch"):
        rows = getattr(algorithm, kind)
        if not isinstance(rows, tuple) or not all(isinstance(row, str) for row in rows):
            raise UserError(f"{name}.{kind} = {rows!r}: expected a tuple of names, like ('x', 'm') or ('x',)")
        if taken := [row for row in rows if row in OTHERS or hasattr(Client, row) or hasattr(Server, row)]:
            raise UserError(f"{name}.{kind} = {rows!r}: {taken[0]} is not a row: expected another name")
        again = seen.intersection(rows) or {row for row in rows if rows.count(row) > 1}
        if again:
            raise UserError(
                f"{name}.{kind} = {rows!r}: {min(again)} is named already; expected each row once in exchanged, "
                "server_rows, client_rows and scratch together"
            )
        seen.update(rows)
    for row, kind in algorithm.kinds.items():
        if row not in seen:
            raise UserError(f"{name}.kinds: {row} is not in exchanged {algorithm.exchanged!r}")
        if kind not in KINDS:
            raise UserError(f"{name}.kinds: row {row} is {kind!r}: expected one of {', '.join(KINDS)}")
    if "x" not in (*algorithm.exchanged, *algorithm.server_rows):
        raise UserError(f"{name} has no row 'x', the model: name it in exchanged or server_rows")
    _check_exchanges(algorithm)


def _check_exchanges(algorithm: Algorithm) -> None:
    """Check that exchanges have rows that lie one after the other, from front to back."""
    name, order, done = type(algorithm).__name__, block_order(algorithm), 0
    of_round = [("an exchange has the rows", exchange.rows) for exchange in algorithm.exchanges()]
    for of, rows in [("exchanged_at_start =", algorithm.exchanged_at_start), *of_round]:
        if not isinstance(rows, tuple):
            raise UserError(f"{name}: {of} {rows!r}: expected a tuple of names, like ('x', 'm') or ('x',)")
        if missing := [row for row in rows if row not in order]:
            raise UserError(f"{name}: {of} {rows!r}: {missing[0]} is not in exchanged {algorithm.exchanged!r}")
        first = order.index(rows[0]) if rows else 0
        if order[first : first + len(rows)] != rows:
            raise UserError(
                f"{name}: {of} {rows!r}: expected consecutive ones of {order!r}, what it exchanges (rows that skip "
                "rounds come first)"
            )
    skipping = skipping_rows(algorithm)  # a client keeps them, in whatever order
    for _, rows in of_round:
        first = algorithm.exchanged.index(rows[0]) if rows and rows[0] not in skipping else done
        if first < done:
            raise UserError(
                f"{name}: an exchange has the rows {rows!r}, and one before it {algorithm.exchanged[done]}: expected "
                f"exchanges from front to back of exchanged = {algorithm.exchanged!r}"
            )
        done = first


def skipping_rows(algorithm: Algorithm) -> tuple[str, ...]:
    """The exchanged rows that skip rounds: their exchange has `due`."""
    skipping = {row for exchange in algorithm.exchanges() if exchange.due is not None for row in exchange.rows}
    return tuple(row for row in algorithm.exchanged if row in skipping)


def block_order(algorithm: Algorithm) -> tuple[str, ...]:
    """The exchanged rows as they lie in a block: those that skip rounds are first, because buffers are behind."""
    skipping = skipping_rows(algorithm)
    return (*skipping, *(row for row in algorithm.exchanged if row not in skipping))


def most_numbers(algorithm: Algorithm, local_steps: int) -> int:
    """How many numbers are averaged at most in one exchange, the start among them; see `number_of`."""
    counts = [exchange.numbers for exchange in algorithm.exchanges()]
    return max(number_of(count, local_steps) for count in (*counts, algorithm.numbers_at_start))


def number_of(count: Count, local_steps: int) -> int:
    """How many numbers a `Count` means, if clients make at most `local_steps` in a round.

    Raises:
        UserError: if it means none.
    """
    number = count(local_steps) if callable(count) else count
    if not isinstance(number, int) or number < 0:
        raise UserError(f"numbers = {number!r}: expected a whole number >= 0, or a function that returns one")
    return number
