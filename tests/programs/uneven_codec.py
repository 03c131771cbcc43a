"""A codec that writes 5 words, from the FROM-th time on NUMBER on rank 1: uneven_codec.py FOLDER FROM NUMBER."""

import dataclasses
import sys

import torch
from mpi4py import MPI

import fedmpi
from fedmpi.aggregation.codecs import Codec

FROM, NUMBER = map(int, sys.argv[2:])


@dataclasses.dataclass(kw_only=True)
class Uneven(Codec):
    """The first values alone."""

    is_linear = True
    times = 0

    def encode(self, moves):
        self.times += 1
        return moves[: NUMBER if MPI.COMM_WORLD.rank and self.times >= FROM else 5].clone()

    def decode(self, words):
        return torch.cat([words, torch.zeros(self.layout.dim - len(words))])


fedmpi.train(algorithm="fedavg", rounds=6, codec=Uneven(), out=sys.argv[1])
