"""Texts as sequences of word numbers, of which every rank reads and stores only its own share."""

import pathlib

import h5py
import numpy as np

from fedmpi.data.common_words import num_holders
from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.hdf5 import readable
from fedmpi.ground.files.limits import check_file

END_OF_LINE, UNKNOWN = b"<eos>", b"<unk>"
WORD_ENDS = (ord(" "), ord("\n"))
WHITE_SPACE = tuple(b" \t\n\r\v\f")  # what separates words, as in bytes.split
LOOK_AHEAD = 4096  # bytes read at once to find the end of a word


def is_text(path):
    """Whether an HDF5 file contains a text and not labelled samples."""
    with readable(path) as file:
        return "train/text" in file


class Text:
    """An HDF5 file with train/text and test/text: [n] uint8, UTF-8 bytes, words separated by white space.

    Raises:
        UserError: if the file cannot be read, or does not contain both.
    """

    def __init__(self, path):
        self.path = pathlib.Path(path)
        with readable(self.path) as file:
            for key in ("train/text", "test/text"):
                data = file.get(key)
                if not isinstance(data, h5py.Dataset) or data.ndim != 1 or data.dtype != np.uint8 or not len(data):
                    raise UserError(f"{self.path}: contains no text {key}: expected uint8 [n], UTF-8 bytes, n >= 1")

    def words(self, split, rank, num_ranks):
        """A list of the words in a rank's share of the text, as bytes; a line ends with the word <eos>."""
        return self.share(split, rank, num_ranks).tobytes().replace(b"\n", b" " + END_OF_LINE + b" ").split()

    def share(self, split, part, num_parts):
        """Share number `part` of `num_parts` of the text, [n] uint8: what one rank reads.

        The shares are cut between words and have about equal numbers of bytes; together they are the text.
        """
        with readable(self.path) as file:
            text = file[f"{split}/text"]
            begin, end = (_word_begin(text, len(text) * r // num_parts) for r in (part, part + 1))
            return text[begin:end]

    def parts(self, split, num_parts):
        """(list of [n] uint8, their `word_edges`): the contiguous parts that `deal` makes of the text, as bytes.

        Raises:
            UserError: if the text has too few words for so many parts.
        """
        with readable(self.path) as file:
            text = file[f"{split}/text"][:]
        begins = _word_begins(text)
        edges = word_edges(len(begins), num_parts, f"{self.path}: {split}/text")
        return np.split(text, begins[edges[1:-1]]), edges


def word_edges(num_words, num_parts, name="a text"):
    """[num_parts + 1] word numbers at which a text is cut into contiguous parts as even as possible.

    Raises:
        UserError: if a part would have fewer than two words; `name` is that of the text in the message.
    """
    if num_words < 2 * num_parts:
        raise UserError(f"{name}: {num_words} words are too few for {num_parts} parts: expected at least 2 per part")
    return [num_words * part // num_parts for part in range(num_parts + 1)]


def _word_begins(text):
    """[num_words] positions at which the words of a text begin; `text` is [n] uint8; an end of line is a word."""
    is_space = np.isin(text, WHITE_SPACE)
    after_space = np.concatenate([[True], is_space[:-1]])
    return np.flatnonzero((~is_space & after_space) | (text == ord("\n")))


def _word_begin(text, position):
    """The first position from `position` on that follows a blank or an end of line: no word is cut there."""
    if position == 0:
        return 0
    for start in range(position - 1, len(text), LOOK_AHEAD):
        ends = np.flatnonzero(np.isin(text[start : start + LOOK_AHEAD], WORD_ENDS))
        if len(ends):
            return start + int(ends[0]) + 1
    return len(text)


def agree_on_dictionary(link, words):
    """word -> number for all words of the text, in the order in which they first occur. Collective on the link.

    <unk> comes last if the text does not contain it. `words` are of this rank's share, in the order of the ranks.
    """
    return _numbered(_of_all_ranks(link, dict.fromkeys(words)))


def common_dictionary(link, texts, least):
    """word -> number for the words that at least `least` clients have, in alphabetical order. Collective on the link.

    <eos> is among them if it is any client's, and <unk> comes last. No other word leaves its rank in a form that can
    be read; see `fedmpi.data.common_words`. `texts`: lists of words, one of each client of this rank.
    """
    number = num_holders(link, [{*words} for words in texts])
    return _numbered(sorted({*_of_all_ranks(link, [w for w in number if number[w] >= least or w == END_OF_LINE])}))


def read_vocabulary(path):
    """word -> number of the words of a file of text, each between white space; <eos> and <unk> follow.

    Raises:
        UserError: if the file cannot be read, or contains no word.
    """
    check_file(path, "task.vocabulary = ")
    with attempt("read", path):
        words = pathlib.Path(path).read_bytes().split()
    if not words:
        raise UserError(f"{path}: contains no word: expected words, one per line")
    return _numbered([*words, END_OF_LINE])


def _of_all_ranks(link, words):
    """All ranks' words, one after the other. Collective on the link."""
    of_this_rank = np.frombuffer(b" ".join(words) + b" ", np.uint8)
    return link.alltoallv(of_this_rank, [np.arange(len(of_this_rank))] * link.size, "words").tobytes().split()


def _numbered(words):
    return {word: number for number, word in enumerate(dict.fromkeys([*words, UNKNOWN]))}


def numbers_of(words, dictionary):
    """[n] int32 numbers of words; words that are not in the dictionary get the number of <unk>."""
    unknown = dictionary[UNKNOWN]
    return np.fromiter((dictionary.get(word, unknown) for word in words), np.int32, len(words))


def deal(link, numbers, num_parts, ranges):
    """This rank's parts of a text that is cut into contiguous parts as even as possible. Collective on the link.

    Args:
        link: over the ranks. numbers: [n] of the words in this rank's share; the shares are in the order of the ranks.
        num_parts: of all ranks. ranges: for each rank, the range of its parts; consecutive over the ranks.

    Returns:
        part -> [n] numbers of its words; the parts begin and end at `word_edges`.
    """
    lengths = link.allgather([len(numbers)], "sample counts")[:, 0].astype(int)
    total, begin = int(lengths.sum()), int(lengths[: link.rank].sum())
    edges = np.array(word_edges(total, num_parts))
    local_edges = np.clip(edges - begin, 0, len(numbers))  # as positions in this rank's share
    wanted = [np.arange(local_edges[parts.start], local_edges[parts.stop]) for parts in ranges]
    received = link.alltoallv(numbers, wanted, "texts")
    parts = ranges[link.rank]
    offsets = edges - edges[parts.start]  # as positions in what was received
    return {part: received[offsets[part] : offsets[part + 1]] for part in parts}
