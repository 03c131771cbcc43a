"""The equations of the papers, one file per family, and nothing else."""

from fedmpi.algorithms.amsgrad import LocalAMSGrad
from fedmpi.algorithms.base import Algorithm, Exchange
from fedmpi.algorithms.fafed import FAFED
from fedmpi.algorithms.fedavg import FedAvg, FedProx
from fedmpi.algorithms.fedopt import FedAdagrad, FedAdam, FedAMS, FedYogi
from fedmpi.algorithms.lamb import FedLAMB
from fedmpi.algorithms.mime import MimeAdam
from fedmpi.algorithms.momentum import SCAFFOLDM, SCAFFOLDMVR, FedAvgM, FedAvgMVR
from fedmpi.algorithms.naive import NaiveAdaptiveFedAvg
from fedmpi.algorithms.scaffold import SCAFFOLD
from fedmpi.algorithms.stem import STEM
from fedmpi.algorithms.storm import CELSGD, MBSTORM

__all__ = [
    "Algorithm",
    "CELSGD",
    "Exchange",
    "FAFED",
    "FedAMS",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedAvgMVR",
    "FedLAMB",
    "FedProx",
    "FedYogi",
    "LocalAMSGrad",
    "MBSTORM",
    "MimeAdam",
    "NaiveAdaptiveFedAvg",
    "SCAFFOLD",
    "SCAFFOLDM",
    "SCAFFOLDMVR",
    "STEM",
]
