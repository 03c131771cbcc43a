"""Texts as streams of word numbers, of which every rank reads and keeps its own share only."""

import pathlib

import h5py
import numpy as np

from fedmpi.data.source import readable
from fedmpi.errors import UserError

END_OF_LINE, UNKNOWN = b"<eos>", b"<unk>"
WORD_ENDS = (ord(" "), ord("\n"))
WHITE_SPACE = tuple(b" \t\n\r\v\f")  # what parts words: that of bytes.split
LOOK_AHEAD = 4096  # bytes read at once in search of the end of a word


def is_text(path):
    """Whether an HDF5 file holds a text, and not labelled samples."""
    with readable(path) as file:
        return "train/text" in file


class Text:
    """An HDF5 file with train/text and test/text: [n] uint8, UTF-8 bytes, words parted by blanks.

    Raises:
        UserError: if the file cannot be read, or lacks one of them.
    """

    def __init__(self, path):
        self.path = pathlib.Path(path)
        with readable(self.path) as file:
            for key in ("train/text", "test/text"):
                data = file.get(key)
                if not isinstance(data, h5py.Dataset) or data.ndim != 1 or data.dtype != np.uint8 or not len(data):
                    raise UserError(f"{self.path}: expected {key}: uint8 [n], a text as UTF-8 bytes")

    def words(self, split, rank, num_ranks):
        """The words of a rank's share of the text, as bytes; a line ends with the word <eos>."""
        return self.share(split, rank, num_ranks).tobytes().replace(b"\n", b" " + END_OF_LINE + b" ").split()

    def share(self, split, part, num_parts):
        """One of `num_parts` shares of the text, [n] uint8.

        The shares are cut between words, are about equally long in bytes, and together are the text.
        """
        with readable(self.path) as file:
            text = file[f"{split}/text"]
            begin, end = (_word_begin(text, len(text) * r // num_parts) for r in (part, part + 1))
            return text[begin:end]

    def parts(self, split, num_parts):
        """The contiguous parts that `deal` makes of the text, as bytes: a list of [n] uint8, and their `word_edges`.

        Raises:
            UserError: if the words are too few for so many parts.
        """
        with readable(self.path) as file:
            text = file[f"{split}/text"][:]
        begins = _word_begins(text)
        edges = word_edges(len(begins), num_parts, f"{self.path}: {split}/text")
        return np.split(text, begins[edges[1:-1]]), edges


def word_edges(num_words, num_parts, name="a text"):
    """[num_parts + 1] words at which a text is cut into contiguous parts as even as can be.

    Raises:
        UserError: if a part would have fewer than two words; `name` says of what.
    """
    if num_words < 2 * num_parts:
        raise UserError(f"{name}: {num_words} words are too few for {num_parts} parts")
    return [num_words * part // num_parts for part in range(num_parts + 1)]


def _word_begins(text):
    """[n] where in a text, [..] uint8, each word begins; an end of line is a word."""
    is_space = np.isin(text, WHITE_SPACE)
    after_space = np.concatenate([[True], is_space[:-1]])
    return np.flatnonzero((~is_space & after_space) | (text == ord("\n")))


def _word_begin(text, position):
    """The first beginning of a word (or of white space behind one) at or after `position`."""
    if position == 0:
        return 0
    for start in range(position - 1, len(text), LOOK_AHEAD):
        ends = np.flatnonzero(np.isin(text[start : start + LOOK_AHEAD], WORD_ENDS))
        if len(ends):
            return start + int(ends[0]) + 1
    return len(text)


def agree_on_dictionary(link, words):
    """word -> number for all words of the text, in the order in which they first occur. Collective.

    <unk> comes last where the text has none.

    Args:
        link: over the ranks. words: of this rank's share, the shares in the order of the ranks.
    """
    mine = np.frombuffer(b" ".join(dict.fromkeys(words)) + b" ", np.uint8)
    everyones = link.alltoallv(mine, [np.arange(len(mine))] * link.size).tobytes().split()
    return {word: number for number, word in enumerate(dict.fromkeys([*everyones, UNKNOWN]))}


def numbers_of(words, dictionary):
    """[n] int32 numbers of words; those that the dictionary lacks are <unk>."""
    unknown = dictionary[UNKNOWN]
    return np.fromiter((dictionary.get(word, unknown) for word in words), np.int32, len(words))


def deal(link, numbers, num_parts, ranges):
    """This rank's parts of a stream that is cut into contiguous parts as even as can be. Collective.

    Args:
        link: over the ranks. numbers: [n] of this rank's share, the shares in the order of the ranks.
        num_parts: of all ranks. ranges: the parts of each rank, consecutive over the ranks.

    Returns:
        part -> [n] numbers; the parts begin and end at `word_edges`.
    """
    lengths = link.allgather([len(numbers)])[:, 0].astype(int)
    total, begin = int(lengths.sum()), int(lengths[: link.rank].sum())
    edges = word_edges(total, num_parts)
    within = np.clip(np.array(edges) - begin, 0, len(numbers))
    wanted = [np.arange(within[parts.start], within[parts.stop]) for parts in ranges]
    received = link.alltoallv(numbers, wanted)
    own = ranges[link.rank]
    return {part: received[edges[part] - edges[own.start] : edges[part + 1] - edges[own.start]] for part in own}
