"""The equations of the papers, one file per family, and nothing else."""

from fedmpi.algorithms.base import Algorithm, Exchange
from fedmpi.algorithms.fafed import FAFED
from fedmpi.algorithms.fedavg import FedAvg
from fedmpi.algorithms.naive import NaiveAdaptiveFedAvg

__all__ = ["Algorithm", "Exchange", "FAFED", "FedAvg", "NaiveAdaptiveFedAvg"]
