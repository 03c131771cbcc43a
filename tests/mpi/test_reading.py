"""Ranks that share one file read it about once together, however the parts lie in it."""

import math
import os
import pathlib
import re

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI

from fedmpi.data.common_words import num_holders
from fedmpi.data.hidden_sum import hidden_sum
from fedmpi.data.partitions import IID, Even, Shared
from fedmpi.data.shared_file import ClientRows
from fedmpi.data.source import HDF5Source
from fedmpi.data.text import Text, agree_on_dictionary, common_dictionary, deal, numbers_of
from fedmpi.federation.participation import spread
from fedmpi.ground.errors import UserError
from fedmpi.tasks.base import RankContext
from fedmpi.tasks.classification import Classification

pytestmark = pytest.mark.mpi

NUM, CHUNK = 6_000, 200
IO = pathlib.Path("/proc/self/io")


def write(path, num_train=NUM, shape=(16, 16), first_label=0, **attributes):
    """A data set of random images in gzip chunks, every image the number of its row in its first bytes."""
    draw = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for split, num in (("train", num_train), ("test", 100)):
            images = draw.integers(0, 256, (num, *shape), dtype=np.uint8)
            images.reshape(num, -1)[:, :2] = np.arange(num, dtype=np.uint16).view(np.uint8).reshape(num, 2)
            file.create_dataset(f"{split}/images", data=images, chunks=(min(CHUNK, num), *shape), compression="gzip")
            file[f"{split}/labels"] = np.arange(num) % 10 + first_label
        file.attrs.update(attributes)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all ranks of a run."""
    name = np.zeros(4096, dtype=np.uint8)
    if MPI.COMM_WORLD.rank == 0:
        path = os.fsencode(tmp_path_factory.mktemp("data"))
        name[: len(path)] = np.frombuffer(path, np.uint8)
        write(pathlib.Path(os.fsdecode(path)) / "shared.h5")
    MPI.COMM_WORLD.Bcast(name)
    return pathlib.Path(os.fsdecode(name.tobytes().rstrip(b"\0")))


def bytes_read():
    """Bytes that this process has read from files so far."""
    return int(IO.read_text().split()[1])


@pytest.mark.parametrize("partition", [Even(), IID(), Shared()], ids=str)
@pytest.mark.parametrize("num_clients", [4, 7])
def test_every_client_gets_its_rows(link, folder, partition, num_clients):
    source = HDF5Source(folder / "shared.h5")
    parts = partition(source.labels["train"], num_clients, seed=3)
    rows = ClientRows(source, parts, spread(num_clients, link.size)[link.rank], link.rank, link.size).collect(link)
    assert list(rows) == list(spread(num_clients, link.size)[link.rank])
    for client, mine in rows.items():
        assert np.array_equal(mine, source.read("train", parts[client]))


@pytest.mark.skipif(not IO.exists(), reason="no /proc/self/io: bytes read cannot be counted")
@pytest.mark.parametrize("partition", [Even(), IID()], ids=str)
@pytest.mark.parametrize("several", [1, 3])
def test_bytes_read_and_memory_are_the_ranks_share(link, folder, partition, several):
    path = folder / "shared.h5"
    source = HDF5Source(path)
    parts = partition(source.labels["train"], several * link.size, seed=3)
    mine = spread(several * link.size, link.size)[link.rank]
    before = bytes_read()
    reader = ClientRows(source, parts, mine, link.rank, link.size)
    read = bytes_read() - before
    held = reader._rows.nbytes if isinstance(reader._rows, np.ndarray) else sum(r.nbytes for r in reader._rows.values())
    rows = reader.collect(link)
    share, chunk = 1 / link.size, CHUNK / NUM
    # A chunk more at the border of two clients' rows. 20 kB: HDF5's own tables and the edges of a read
    assert read < (share + (several + 1) * chunk) * path.stat().st_size + 20_000
    assert held <= (share + 2 * chunk) * NUM * 256
    assert [rows[client].nbytes for client in mine] == [len(parts[client]) * 256 for client in mine]


def place(link, num_clients=None):
    num_clients = num_clients or link.size
    clients = spread(num_clients, link.size)[link.rank]
    return RankContext(num_clients, clients, link.rank, link.size, 0, None, torch.device("cpu"), torch.float32)


def silos(link, folder, name, facts):
    """Every rank writes the files of its own clients, in a folder of its own."""
    own = folder / f"{name}-{link.rank}"
    own.mkdir(exist_ok=True)
    for client in place(link).clients:
        write(own / f"silo_{client}.h5", **facts(client))
    return Classification(data=str(own / "silo_{client}.h5"))


def test_a_rank_opens_its_own_silo_files_only(link, folder):
    task = silos(link, folder, "own", lambda client: {"num_train": 300 + client})
    loaded = task.load(place(link), Even())
    loaded.synchronise(link)
    assert loaded.num_samples(link.rank) == 300 + link.rank and loaded.num_classes == 10


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            lambda client: {"shape": (16, 16) if client else (8, 8)},
            r"client 1 has uint8 samples \[16, 16\].*client 0 has",
        ),
        (lambda client: {"num_classes": 10 + client}, "client 1 has .*11 classes"),
    ],
    ids=["shape", "classes"],
)
def test_silo_files_that_differ_are_one_line_on_every_rank(link, folder, facts, message):
    if link.size == 1:
        pytest.skip("needs two silos")
    loaded = silos(link, folder, "differ", lambda client: {"num_train": 300, **facts(client)}).load(place(link), Even())
    with pytest.raises(UserError, match=message):
        loaded.synchronise(link)


def test_labels_with_gaps_between_silo_files_end_all_ranks(link, folder):
    if link.size == 1:
        pytest.skip("needs two silos")
    task = silos(link, folder, "gaps", lambda client: {"num_train": 300, "first_label": 20 * client})
    loaded = task.load(place(link), Even())
    with pytest.raises(UserError) as error:
        loaded.synchronise(link)
    text = "on rank 1: .*silo_1.h5: contains the labels 20, 21, 22, 23, 24 and 5 more, but no client has the label 10, "
    text = "on rank 1: an error, which that rank prints" if link.rank == 0 else text if link.rank == 1 else ""
    assert re.match(text, str(error.value)) and error.value.is_printed == (link.rank == 1)


class Recorded:
    """A link that remembers the bytes that this rank has sent."""

    def __init__(self, link):
        self._link, self.sent = link, b""

    def __getattr__(self, name):
        verb = getattr(self._link, name)
        if name not in ("allgather", "allgatherv", "alltoallv"):
            return verb

        def recorded(values, *rest):
            values = np.asarray(values)
            plain = values.astype(np.uint8) if values.size and np.all((values >= 0) & (values < 256)) else values
            self.sent += values.tobytes() + plain.tobytes()
            return verb(values, *rest)

        return recorded


@pytest.mark.parametrize("clients_of_a_rank", [1, 2])
def test_words_of_one_silo_stay_there_and_are_counted(link, clients_of_a_rank):
    """Client k has the words both, at_most_k and k_alone; at_most_k is in the clients from k on."""
    first, number = link.rank * clients_of_a_rank, link.size * clients_of_a_rank
    texts = [[b"both", f"{k}_alone".encode(), *(f"until_{j}".encode() for j in range(k, number))]
             for k in range(first, first + clients_of_a_rank)]  # fmt: skip
    recorded = Recorded(link)
    found = num_holders(recorded, map(set, texts))
    right = {b"both": number} | {f"until_{j}".encode(): j + 1 for j in range(number)}
    for k in range(first, first + clients_of_a_rank):
        right[f"{k}_alone".encode()] = 1
    assert found == {word: right[word] for text in texts for word in text}
    assert link.size == 1 or not any(word in recorded.sent for text in texts for word in text)
    for least in range(2, number + 1):
        recorded.sent = b""
        dictionary = common_dictionary(recorded, texts, least)
        assert list(dictionary) == [*sorted(word for word in right if _number(word, number) >= least), b"<unk>"]
        assert not any(word in recorded.sent for word in right if _number(word, number) < least)


def _number(word, number):
    """How many clients have a word of the test above."""
    return number if word == b"both" else 1 if word.endswith(b"alone") else int(word.removeprefix(b"until_")) + 1


def test_sums_are_exact_and_hide_their_parts(link):
    values = np.random.default_rng(link.rank).standard_normal(7) * 10.0 ** np.array([0, 3, -300, 300, 9, -9, 0])
    everyone = link.allgather(values)
    recorded = Recorded(link)
    found = hidden_sum(recorded, values)
    assert found.tolist() == [math.fsum(column) for column in everyone.T]
    assert link.size == 1 or len(recorded.sent) > 2 * 7 * 288  # masks, and what is masked
    assert hidden_sum(link, [-float(link.rank), 2**53]).tolist() == [-sum(range(link.size)), link.size * 2**53]


@pytest.mark.parametrize("lists", [[[]], [[b"a"]]])
def test_ranks_without_words_take_part(link, lists):
    lists = lists if link.rank == 0 else [[]]
    assert num_holders(link, lists) == {word: 1 for words in lists for word in words}


def test_a_text_is_read_numbered_and_dealt_by_all_ranks(link, folder):
    path = folder / "text.h5"
    text = " ".join(f"w{number % 97} \n" if number % 13 == 0 else f"w{number % 97}" for number in range(1000))
    if link.rank == 0:
        with h5py.File(path, "w") as file:
            file["train/text"] = file["test/text"] = np.frombuffer(text.encode(), np.uint8)
    link.barrier()
    words = text.replace("\n", "<eos>").encode().split()
    mine = Text(path).words("train", link.rank, link.size)
    dictionary = agree_on_dictionary(link, mine)
    assert list(dictionary) == [*dict.fromkeys(words), b"<unk>"]
    ranges = spread(6, link.size)
    parts = deal(link, numbers_of(mine, dictionary), 6, ranges)
    assert list(parts) == list(ranges[link.rank])
    everything = numbers_of(words, dictionary)
    for client, part in parts.items():
        edges = [len(words) * c // 6 for c in (client, client + 1)]
        assert part.tolist() == everything[slice(*edges)].tolist()
