"""Language modelling: the text's words, the order of pieces, the hidden state, perplexity."""

import math
import re

import h5py
import numpy as np
import pytest
import torch
from helpers import train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

import fedmpi
from fedmpi.comm.solo import SoloLink
from fedmpi.data.sampler import SequentialSampler
from fedmpi.data.text import Text, agree_on_dictionary, deal, numbers_of
from fedmpi.federation.client import Client
from fedmpi.ground.errors import UserError
from fedmpi.ground.streams import FIRST, WHOLE
from fedmpi.models.lstm import LSTM
from fedmpi.oracles import AutogradOracle
from fedmpi.oracles.base import LocalObjective
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.tasks.base import RankContext
from fedmpi.tasks.language import Language


def write(path, train_text, test_text="the cat sat\n" * 20, **attributes):
    with h5py.File(path, "w") as file:
        for split, text in (("train", train_text), ("test", test_text)):
            file[f"{split}/text"] = np.frombuffer(text.encode(), np.uint8)
    return path


def story(num_lines=60, seed=0):
    """Lines of one to five words out of nine."""
    draw = np.random.default_rng(seed)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "rats"]
    return "".join(" ".join(draw.choice(words, draw.integers(1, 6))) + " \n" for _ in range(num_lines))


def load(path, num_clients=1, **task):
    place = RankContext(num_clients, range(num_clients), 0, 1, 0, None, torch.device("cpu"), torch.float64)
    loaded = Language(data=str(path), **task).load(place, None)
    loaded.synchronise(SoloLink())
    return loaded


@pytest.mark.rarely
def test_silo_texts_are_the_clients_parts(tmp_path):
    """Every rank opens only its own clients' files; words of all silos are one dictionary."""
    tales = [story(40 + 9 * client, client) + f"only{client}\n" for client in range(3)]
    for client, tale in enumerate(tales):
        write(tmp_path / f"silo_{client}.h5", tale, test_text=f"the cat sat {client}\n" * 20)
    loaded = load(tmp_path / "silo_{client}.h5", num_clients=3)
    assert [loaded.num_samples(client) for client in range(3)] == [len(words_of(tale)) for tale in tales]
    assert loaded.num_classes == len(set(words_of("".join(tales)))) + 1  # and <unk>
    assert sum(len(stream) for stream in loaded._test.values()) == 3 * 20 * 5
    one, two = loaded.batch(1, torch.arange(7)), loaded.batch(2, torch.arange(7))
    assert not torch.equal(one.inputs, two.inputs)

    words = ["--task", "language", "--data", tmp_path / "silo_{client}.h5", "--clients", 3, "--rounds", 3]
    words += ["--local_steps", 2, "--batch_size", 2, "--model", "lstm", "--model.hidden", 8]
    outputs = [train(ranks, tmp_path, *words, "--name", f"on-{ranks}") for ranks in (1, 2)]
    assert [ended.returncode for ended in outputs] == [0, 0], outputs
    perplexities = [float(re.search(r"^  perplexity +(\S+)", ended.stdout, re.MULTILINE)[1]) for ended in outputs]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-3)
    assert not (tmp_path / "on-1" / "partition.h5").exists()  # they are split already
    (tmp_path / "silo_1.h5").unlink()
    ended = train(2, tmp_path, *words)
    assert ended.returncode == 2 and "client 1 has no file" in ended.stderr
    write(tmp_path / "silo_1.h5", "a")
    ended = train(2, tmp_path, *words)
    assert ended.returncode == 2 and "client 1 has 1 words: too few" in ended.stderr


@pytest.mark.rarely
@pytest.mark.parametrize("ranks", [1, 2])
def test_words_of_a_single_silo_are_unknown(tmp_path, ranks):
    """Names of patients stay in their silo: no file of the run has them, unless the user asks for it."""
    for client, name in enumerate(["Ada-Planted", "Bob-Planted", "Cid-Planted"]):
        write(tmp_path / f"silo_{client}.h5", f"{name} and shared{min(client, 1)} \n" + story(40, client))
    words = ["--task", "language", "--data", tmp_path / "silo_{client}.h5", "--clients", 3, "--rounds", 1]
    words += ["--local_steps", 1, "--batch_size", 2, "--model", "lstm", "--model.hidden", 4, "--algorithm", "fedavg"]

    def run(name, *further):
        ended = train(ranks, tmp_path, *words, "--name", name, *further)
        files = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        found = {word for path in files for word in re.findall(rb"\w+-Planted|shared\d", path.read_bytes())}
        return ended, found

    ended, found = run("default")
    assert ended.returncode == 0 and found == {b"shared1"}, ended.stderr
    assert "words that at least 2 clients have are known, others are <unk>" in ended.stderr
    ended, found = run("all", "--least", 1)
    assert found == {b"Ada-Planted", b"Bob-Planted", b"Cid-Planted", b"shared0", b"shared1"}, ended.stderr
    assert ranks == 1 or "least = 1: all ranks get the list of the words in all clients' texts" in ended.stderr
    ended, found = run("three", "--least", 3)
    assert ended.returncode == 0 and not found, ended.stderr
    ended, _ = run("four", "--least", 4)
    assert "least = 4: no word can be in so many of 3 clients' texts: expected 1 to 3" in ended.stderr
    (tmp_path / "words.txt").write_text("the\ncat\nmat\n")
    ended, found = run("file", "--task.vocabulary", tmp_path / "words.txt")
    assert ended.returncode == 0 and not found, ended.stderr
    assert 4 < fedmpi.load_run(tmp_path / "file").final("perplexity") < 7  # of the, cat, mat, <eos> and <unk>
    ended, _ = run("none", "--task.vocabulary", tmp_path / "lacks.txt")
    assert ended.returncode == 2 and "lacks.txt: cannot be read" in ended.stderr, ended.stderr


def words_of(tale):
    return tale.replace("\n", " <eos> ").split()


@pytest.mark.rarely
@given(text=st.text(alphabet="ab \nü", min_size=1, max_size=80), num_ranks=st.integers(1, 9))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shares_of_a_text_are_the_text(tmp_path, text, num_ranks):
    shares = Text(write(tmp_path / "text.h5", text))
    words = [word for rank in range(num_ranks) for word in shares.words("train", rank, num_ranks)]
    assert words == text.replace("\n", " <eos> ").encode().split()


def test_the_split_that_is_saved_names_words_of_the_text(tmp_path):
    path = write(tmp_path / "text.h5", story())
    loaded, whole = load(path, num_clients=3), load(path)
    loaded.write_split(tmp_path)
    with h5py.File(tmp_path / "partition.h5") as file:
        assert dict(file.attrs) == {"data": str(path), "unit": "words"}
        parts = [file[f"client_{client}"][:].tolist() for client in range(3)]
    assert parts[0][0] == 0 and parts[2][1] == len(words_of(story()))
    for client, (begin, end) in enumerate(parts):
        assert torch.equal(loaded._train[client], whole._train[0][begin:end])


def test_words_longer_than_one_look_ahead(tmp_path):
    text = "a" * 10_000 + " b\n" + "c" * 5_000
    shares = Text(write(tmp_path / "text.h5", text))
    words = [word for rank in range(4) for word in shares.words("train", rank, 4)]
    assert words == [b"a" * 10_000, b"b", b"<eos>", b"c" * 5_000]


def test_the_dictionary_is_that_of_the_training_text():
    words = b"b a <unk> b <eos>".split()
    dictionary = agree_on_dictionary(SoloLink(), words)
    assert dictionary == {b"b": 0, b"a": 1, b"<unk>": 2, b"<eos>": 3}
    assert numbers_of([b"a", b"zebra", b"b"], dictionary).tolist() == [1, 2, 0]
    assert agree_on_dictionary(SoloLink(), [b"a"]) == {b"a": 0, b"<unk>": 1}


def test_parts_are_contiguous_and_even():
    parts = deal(SoloLink(), np.arange(11), 3, [range(3)])
    assert [part.tolist() for part in parts.values()] == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10]]


def test_wikitext2_has_its_33278_words(data_dir):
    text = Text(data_dir / "wikitext2.h5")
    words = text.words("train", 0, 1)
    dictionary = agree_on_dictionary(SoloLink(), words)
    assert (len(words), len(dictionary)) == (2_088_628, 33_278)
    assert numbers_of(words[:5], dictionary).tolist() == [0, 1, 2, 3, 4]
    assert len(text.words("test", 0, 1)) == 245_569


@given(st.integers(2, 90), st.integers(1, 7), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_pieces_are_batchified_text(num_words, columns, steps):
    sampler = SequentialSampler(num_words, columns, 3, steps)
    columns = min(columns, num_words // 2)
    text = torch.arange(num_words)
    plain = text[: num_words // columns * columns].view(columns, -1).t()  # PyTorch's word_language_model
    drawn = [sampler(number) for number in range(2 * sampler.batches_per_pass)]
    one_pass = drawn[: sampler.batches_per_pass]
    assert torch.equal(torch.cat(one_pass), plain[:-1])
    assert torch.equal(torch.cat(one_pass) + 1, plain[1:])
    assert all(len(piece) == steps for piece in one_pass[:-1])
    assert all(torch.equal(a, b) for a, b in zip(one_pass, drawn[sampler.batches_per_pass :]))
    assert torch.equal(sampler(WHOLE), plain[:-1])
    assert sampler(FIRST).shape[1] == min(3, num_words // 2) and len(sampler(FIRST)) <= steps


def oracle_for(loaded, flat, seed=0, **options):
    sampler = loaded.sampler(0, 4, 2, seed, "cpu")
    objective = LocalObjective(flat, loaded, sampler, seed, **options)
    return AutogradOracle(Client(0, buffers=flat.buffers), objective, torch.zeros(2, flat.dim).double())


def small_lstm(loaded, dropout=0.0):
    torch.manual_seed(1)
    return LSTM(loaded.num_classes, hidden=6, dropout=dropout).double()


@pytest.mark.rarely
def test_training_is_truncated_back_propagation(tmp_path):
    """Two passes and a bit, step by step, against a plain loop with torch alone."""
    loaded = load(write(tmp_path / "text.h5", story()), bptt=5)
    module = small_lstm(loaded)
    plain = small_lstm(loaded)
    flat = FlatModule(module)
    oracle, x = oracle_for(loaded, flat, clip_norm=0.25), flat.x.clone()
    stream = loaded._train[0].long()
    columns = stream[: len(stream) // 4 * 4].view(4, -1).t()
    oracle.draw_first(), oracle.gradient(x, oracle.draw_first())  # moves nothing
    done = 0
    while done < 100:
        state = None  # reset at each new pass
        for begin in range(0, len(columns) - 1, 5):
            inputs, targets = columns[begin : begin + 5], columns[begin + 1 : begin + 6]
            inputs = inputs[: len(targets)]
            x.add_(oracle.gradient(x, oracle.draw()), alpha=-0.5)
            if done % 10 == 0:
                oracle.gradient(x, oracle.whole())  # exact gradients in between leave the state alone
            scores, state = plain(inputs, state)
            state = tuple(part.detach() for part in state)
            plain.zero_grad()
            functional.cross_entropy(scores.flatten(0, 1), targets.flatten()).backward()
            norm = math.sqrt(sum(float((p.grad**2).sum()) for p in plain.parameters()))
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter -= 0.5 * min(1, 0.25 / norm) * parameter.grad
            done += 1
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(x, expected, rtol=1e-8, atol=1e-10)


def test_both_gradients_of_a_pair_start_from_the_same_state(tmp_path):
    loaded = load(write(tmp_path / "text.h5", story()), bptt=5)
    flat = FlatModule(small_lstm(loaded, dropout=0.5))
    oracle = oracle_for(loaded, flat)
    elsewhere = flat.x * 1.3
    for _ in range(4):
        xi = oracle.draw()
        before = xi.batch.state
        g, _ = (row.clone() for row in oracle.gradient_pair(flat.x, elsewhere, xi))
        after = oracle.client.carried["state"]
        again, at_other = (row.clone() for row in oracle.gradient_pair(flat.x, elsewhere, xi))
        assert torch.equal(g, again) and not torch.equal(g, at_other)
        assert xi.batch.state is before
        assert oracle.client.carried["state"] is after  # only the first evaluation carries the state on
        assert not after[0].requires_grad
    assert before is not None


def test_the_state_begins_anew_with_each_pass(tmp_path):
    loaded = load(write(tmp_path / "text.h5", story(20)), bptt=5)
    flat = FlatModule(small_lstm(loaded))
    oracle = oracle_for(loaded, flat)
    per_pass = loaded.sampler(0, 4, 4, 0, "cpu").batches_per_pass
    for number in range(2 * per_pass + 1):
        xi = oracle.draw()
        assert (xi.batch.state is None) == (number % per_pass == 0)
        oracle.gradient(flat.x, xi)


class Uniform(torch.nn.Module):
    """Every word is as likely as any other."""

    def __init__(self, num_classes):
        super().__init__()
        self.scores = torch.nn.Parameter(torch.zeros(num_classes))

    def forward(self, tokens, state=None):
        return self.scores.expand(*tokens.shape, -1), state


def test_perplexity_of_a_uniform_guess_is_the_number_of_words(tmp_path):
    loaded = load(write(tmp_path / "text.h5", story(200)), num_clients=3)
    metrics = loaded.evaluate(Uniform(loaded.num_classes), SoloLink())
    assert metrics["perplexity"] == pytest.approx(loaded.num_classes)
    assert metrics["train_loss"] == pytest.approx(math.log(loaded.num_classes))
    fewer = load(tmp_path / "text.h5", num_clients=3, evaluation_words=60)
    assert fewer.evaluate(Uniform(fewer.num_classes), SoloLink())["perplexity"] == pytest.approx(fewer.num_classes)


def test_every_silo_is_tested_on_its_own_text(tmp_path):
    """A silo with less than two words has no value; the mean counts each other silo once, `_samples` each word."""
    for client, text in enumerate(["the cat sat\n" * 10, "one", "a mat on a mat\n" * 30]):
        write(tmp_path / f"silo_{client}.h5", story(100, seed=client), text)
    loaded = load(tmp_path / "silo_{client}.h5", num_clients=3, bptt=6)
    metrics = evaluated(loaded, small_lstm(loaded))
    alone = {}
    for client in (0, 2):
        other = load(tmp_path / "silo_{client}.h5", num_clients=3, bptt=6)
        other._test = {client: loaded._test[client]}
        alone[client] = evaluated(other, small_lstm(other))
    of_clients = metrics.clients
    assert of_clients["test_loss"] == pytest.approx(
        [alone[0]["test_loss"], math.nan, alone[2]["test_loss"]], nan_ok=True
    )
    assert of_clients["perplexity"] == pytest.approx(np.exp(of_clients["test_loss"]), nan_ok=True)
    numbers = [3 * (40 // 3 - 1), 15 * (180 // 15 - 1)]  # of predicted words: columns * (their length - 1)
    losses = of_clients["test_loss"][::2]
    assert metrics["test_loss"] == pytest.approx(np.mean(losses))
    assert metrics["test_loss_samples"] == pytest.approx(np.average(losses, weights=numbers))
    for name in ("", "_samples"):
        assert metrics[f"perplexity{name}"] == pytest.approx(math.exp(metrics[f"test_loss{name}"]))
    assert len(of_clients["train_loss"]) == 3 and "holdout_loss" not in of_clients
    for client in (0, 2):
        write(tmp_path / f"silo_{client}.h5", story(100, seed=client), "one")
    with pytest.raises(UserError, match="no client has a test text of at least 2 words"):
        load(tmp_path / "silo_{client}.h5", num_clients=3)


def evaluated(loaded, module):
    with torch.no_grad():
        return loaded.evaluate(module.double().eval(), SoloLink())


@pytest.mark.rarely
def test_it_trains_and_ranks_agree(tmp_path):
    write(tmp_path / "text.h5", story(100), story(40, seed=1))
    words = ["--task", "language", "--data", tmp_path / "text.h5", "--model", "lstm", "--model.hidden", 8]
    words += [
        "--clients",
        2,
        "--rounds",
        3,
        "--eval-every",
        3,
        "--batch-size",
        4,
        "--dtype",
        "float64",
        "--model.dropout",
        0.2,
    ]
    outputs = [train(ranks, tmp_path, *words, "--name", f"on-{ranks}").stdout for ranks in (1, 2)]
    found = [[line.split()[-1] for line in output.splitlines() if "perplexity " in line][-1] for output in outputs]
    assert found[0] == found[1]
    assert 1 < float(found[0]) < 11


@pytest.mark.parametrize(
    ("train_text", "test_text", "message"),
    [
        ("a b c", "a b " * 40, "3 words are too few for 2 parts"),
        ("a b " * 40, "a b c", "3 words are too few for 20 parts"),
        ("", "a b", r"contains no text train/text: expected uint8 \[n\]"),
    ],
)
def test_a_text_that_is_too_short(tmp_path, train_text, test_text, message):
    with pytest.raises(UserError, match=message):
        load(write(tmp_path / "text.h5", train_text, test_text), num_clients=2)


def test_a_model_that_is_not_recurrent(tmp_path):
    loaded = load(write(tmp_path / "text.h5", story()))
    with pytest.raises(UserError, match=r"model Linear does not work on inputs of shape \[35\] with 11 classes"):
        loaded.try_out(torch.nn.Linear(3, 3), 0)


class Hidden(tuple):
    """A state that a checkpoint cannot hold."""


class OddState(LSTM):
    def forward(self, tokens, state=None):
        scores, state = super().forward(tokens, state)
        return scores, Hidden(state)


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_round(tmp_path):
    """It was refused by the first checkpoint, after the rounds before it."""
    write(tmp_path / "text.h5", story())
    settings = {"rounds": 2, "local_steps": 2, "batch_size": 2, "clients": 1, "threads": 1, "out": str(tmp_path)}
    with pytest.raises(UserError, match=r"a sample leaves to the next one, carried\['state'\] is a Hidden: "):
        fedmpi.train(task="language", data=str(tmp_path / "text.h5"), model=OddState, name="run", **settings)
    assert not (tmp_path / "run").exists()


def test_too_few_words_end_the_job_with_one_line(tmp_path):
    write(tmp_path / "short.h5", "a b c")
    ended = train(2, tmp_path / "runs", "--task", "language", "--data", tmp_path / "short.h5")
    lines = [line for line in ended.stderr.splitlines() if line.startswith("fedmpi: error: ")]
    assert len(lines) == 1 and "3 words are too few for 2 parts" in lines[0], ended.stderr
    assert ended.returncode == 2


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "bytes.h5").write_bytes(b"nothing")
    with pytest.raises(UserError, match="bytes.h5: cannot be read as HDF5"):
        Text(tmp_path / "bytes.h5")
