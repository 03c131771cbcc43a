"""Parts of the user's own that do not do what the page asks: one line with the part's name, and no wrong number."""

import dataclasses

import pytest
import torch
from helpers import PROGRAMS, start

import fedmpi
from fedmpi.aggregation import Aggregation
from fedmpi.aggregation.codecs import Codec
from fedmpi.aggregation.codecs.random_k import RandomK
from fedmpi.aggregation.robust import Median
from fedmpi.aggregation.stages import Stage
from fedmpi.ground.errors import Diverged, UserError


@dataclasses.dataclass(kw_only=True)
class Stacked(Aggregation):
    """The mean of the rows; each other class here changes one thing."""

    def average(self, out):
        out.copy_(torch.stack(self.kept_regions()).mean(0))


@dataclasses.dataclass(kw_only=True)
class Fills(Stacked):
    def average(self, out):
        pass


@dataclasses.dataclass(kw_only=True)
class HalfFills(Stacked):
    def average(self, out):
        out[:1] = torch.stack(self.kept_regions()).mean(0)[:1]


@dataclasses.dataclass(kw_only=True)
class Shorter(Aggregation):
    def average(self, out):
        self.reduce_slices(lambda slices: torch.stack(slices).mean(0)[1:], out)


@dataclasses.dataclass(kw_only=True)
class OfSeveral(Aggregation):
    def average(self, out):
        self.reduce_slices(torch.stack, out)


@dataclasses.dataclass(kw_only=True)
class Nothing(Aggregation):
    def average(self, out):
        self.reduce_slices(lambda slices: None, out)


@dataclasses.dataclass(kw_only=True)
class Named(Stacked):
    def add(self, client, rows, *, weight):
        super().add(client, rows, weight)


@dataclasses.dataclass(kw_only=True)
class Any(Stacked):
    def add(self, *given):
        assert len(given) == 3
        super().add(*given)


@dataclasses.dataclass(kw_only=True)
class Defaulted(Stacked):
    def add(self, client, rows, weight=None):
        assert weight is not None
        super().add(client, rows, weight)


@dataclasses.dataclass(kw_only=True)
class WithoutWeight(Stacked):
    def add(self, client, rows):
        super().add(client, rows, 1.0)


@dataclasses.dataclass(kw_only=True)
class Puts(Stage):
    def apply(self, sent):
        for name, row in sent.rows.items():
            sent.rows[name] = row * 0


@dataclasses.dataclass(kw_only=True)
class Removes(Stage):
    def apply(self, sent):
        sent.rows.popitem()


@dataclasses.dataclass(kw_only=True)
class Every(Codec):
    """Words of every second value, of which nothing is made."""

    is_linear = True

    def encode(self, moves):
        return moves[::2].clone()

    def decode(self, words):
        return words


@dataclasses.dataclass(kw_only=True)
class EveryOfSlices(Every):
    is_linear = False


@dataclasses.dataclass(kw_only=True)
class Table(Every):
    def encode(self, moves):
        return moves[None]


@dataclasses.dataclass(kw_only=True)
class Infinite(Codec):
    def encode(self, moves):
        return moves.clone()

    def decode(self, words):
        return words / 0


@dataclasses.dataclass(kw_only=True)
class Counts(Codec):
    """Multiples of a unit; each other class here changes one thing."""

    def encode(self, moves):
        return moves.mul(1024).round_().to(torch.int32)

    def decode(self, words):
        return words.to(self.layout.dtype).div_(1024)


@dataclasses.dataclass(kw_only=True)
class CountsInPlace(Counts):
    def encode(self, moves):
        return moves.mul_(1024).round_().to(torch.int32)


@dataclasses.dataclass(kw_only=True)
class ReadsIntegers(Counts):
    def decode(self, words):
        return words.clone()


@dataclasses.dataclass(kw_only=True)
class AddsIntegers(Counts):
    is_linear = True


@dataclasses.dataclass(kw_only=True)
class AddsWider(Every):
    def encode(self, moves):
        return moves.to(torch.complex128)


@dataclasses.dataclass(kw_only=True)
class AddsSome(Every):
    def encode(self, moves):
        return moves[moves > -2].clone()


def end(algorithm, **given):
    return fedmpi.simulate(
        algorithm, lambda i, x, sample: x - i, x0=[4.0, 2.0, 1.0], num_clients=3, rounds=2,
        sending=fedmpi.Sending(**given),
    )[-1]["rows"]["x"][0]  # fmt: skip


SHAPE = r"expected a tensor of shape \[3\]"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"aggregation": Fills()}, "aggregation fills made values of row x that are not finite"),
        ({"aggregation": HalfFills()}, "aggregation halffills made values of row x that are not finite"),
        ({"aggregation": Shorter()}, rf"aggregation shorter: what reduces .* a tensor of shape \[2\]: {SHAPE}"),
        ({"aggregation": OfSeveral()}, rf"aggregation ofseveral: .* returned a tensor of shape \[3, 3\]: {SHAPE}"),
        ({"aggregation": Nothing()}, f"aggregation nothing: .* returned a NoneType: {SHAPE}"),
        ({"aggregation": Named()}, r"aggregation named: add\(client, rows, \*, weight\): expected add\(client, region"),
        ({"stages": [Puts()]}, r"stage puts has put another tensor in the place of sent.rows\['x'\]: expected"),
        ({"stages": [Removes()]}, r"stage removes has put another tensor in the place of sent.rows\['x'\]"),
        ({"codec": Every()}, rf"aggregation mean in codec every: decode .* shape \[2\]: {SHAPE}"),
        ({"codec": EveryOfSlices()}, rf"aggregation mean in codec everyofslices: encode .* shape \[2\]: {SHAPE}"),
        ({"codec": Table()}, r"aggregation mean in codec table: encode .* shape \[1, 3\]: expected a tensor of shape"),
        ({"codec": ReadsIntegers()}, r"codec readsintegers: decode .* of torch.int32: expected the rows' type, torch"),
        ({"codec": AddsIntegers()}, "codec addsintegers: encode .* of torch.int32: expected the rows' type, torch"),
        ({"codec": AddsWider()}, "in codec addswider: encode .* of torch.complex128: expected the rows' type, torch"),
        ({"codec": AddsSome()}, "codec addssome: encode returned 3 words of client 2, and 2 of one before it"),
        ({"codec": Counts}, "^codec is class Counts: expected an object of Codec"),
        ({"codec": "half"}, "^codec is a str: expected an object of Codec"),
        ({"stages": [Puts]}, "^stage is class Puts: expected an object of Stage"),
        ({"aggregation": Median}, "^aggregation is class Median: expected an object of Aggregation"),
        ({"codec": Infinite()}, "aggregation mean in codec infinite made values of row x that are not finite"),
    ],
)  # fmt: skip
def test_one_line_names_the_part_and_what_it_did(given, said):
    with pytest.raises((UserError, Diverged), match=said):
        end(fedmpi.algorithms.FedAvg(step_size=0.5), **given)


@pytest.mark.parametrize("algorithm", [fedmpi.algorithms.FedAvg(step_size=0.5), fedmpi.algorithms.SCAFFOLD()])
def test_a_codec_may_overwrite_what_it_is_given(algorithm):
    found, expected = (end(algorithm, codec=codec) for codec in (CountsInPlace(), Counts()))
    assert torch.equal(torch.tensor(found), torch.tensor(expected))


@pytest.mark.parametrize("codec", [Every(), EveryOfSlices()])
def test_so_does_what_is_read_of_differences(codec):
    with pytest.raises(UserError, match=rf"codec {type(codec).__name__.lower()}: decode .* shape \[2\]: {SHAPE}"):
        end(fedmpi.algorithms.SCAFFOLD(step_size=0.5), codec=codec)


@pytest.mark.parametrize("aggregation", [Any(), Defaulted(), WithoutWeight()], ids=lambda each: type(each).__name__)
def test_add_may_be_written_in_every_way_that_takes_what_it_gets(aggregation):
    fedavg = fedmpi.algorithms.FedAvg(step_size=0.5)
    assert torch.equal(torch.tensor(end(fedavg, aggregation=aggregation)), torch.tensor(end(fedavg)))


def test_one_client_alone_is_refused_with_the_rules_own_reason():
    @dataclasses.dataclass(kw_only=True)
    class Hides(Stacked):
        exposes_rows = False

    with pytest.raises(UserError, match="ce_lsgd lets one client .*, and aggregation hides hides what single clients"):
        end(fedmpi.algorithms.CELSGD(), aggregation=Hides())
    with pytest.raises(UserError, match="and aggregation median needs at least 2: expected"):
        end(fedmpi.algorithms.CELSGD(), aggregation=Median())


@pytest.mark.rarely
@pytest.mark.parametrize("name", ["FAFED", "LocalAMSGrad", "FAFedZO"])
def test_random_k_sends_the_start_whole(name):
    """Steps divided by the root of the zeros in v grew without limit."""
    given = {"x0": torch.linspace(1, 2, 64), "num_clients": 3, "rounds": 40, "local_steps": 2}
    sending = fedmpi.Sending(codec=RandomK(fraction=0.1))
    algorithm = getattr(fedmpi.algorithms, name)(step_size=0.01)
    if algorithm.oracle == "two_point":
        given["loss"] = lambda i, x, sample: 0.5 * (x - i).square().sum()
        given["directions"] = lambda client, sample: 8 * torch.eye(64)
    else:
        given["gradient"] = lambda i, x, sample: x - i
    trace = fedmpi.simulate(algorithm, sending=sending, **given)
    start = next(record["rows"] for record in trace if record["round"] < 0 and record["step"] is None)
    assert (start["v"][0] > 0).all() and abs(trace[-1]["rows"]["x"]).max() < 3


@pytest.mark.rarely
@pytest.mark.parametrize(("first", "number"), [(1, 6), (4, 6), (1, 0)])
def test_ranks_that_write_other_numbers_of_words_end_in_one_line(first, number, tmp_path):
    ended = start(2, PROGRAMS / "uneven_codec.py", tmp_path, first, number)
    assert ended.returncode
    expected = (
        f"aggregation mean in codec uneven: encode returned {number} words on one rank, and 5 on another: expected"
    )
    assert expected in ended.stderr
