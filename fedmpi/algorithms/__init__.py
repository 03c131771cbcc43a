"""The equations of the papers, one file per family, and nothing else."""

from fedmpi.algorithms.amsgrad import LocalAMSGrad
from fedmpi.algorithms.base import Algorithm, Exchange
from fedmpi.algorithms.fafed import FAFED
from fedmpi.algorithms.fedavg import FedAvg, FedProx
from fedmpi.algorithms.fedopt import FedAdagrad, FedAdam, FedAMS, FedYogi
from fedmpi.algorithms.lamb import FedLAMB
from fedmpi.algorithms.mime import MimeAdam
from fedmpi.algorithms.minmax import CODA, CODASCA, FMGDA, LocalSGDA, MomentumLocalSGDA
from fedmpi.algorithms.momentum import SCAFFOLDM, SCAFFOLDMVR, FedAvgM, FedAvgMVR
from fedmpi.algorithms.naive import NaiveAdaptiveFedAvg
from fedmpi.algorithms.scaffold import SCAFFOLD
from fedmpi.algorithms.stem import STEM
from fedmpi.algorithms.storm import CELSGD, MBSTORM
from fedmpi.algorithms.zeroth_order import FAFedZO, FedZO

__all__ = [
    "Algorithm",
    "CELSGD",
    "CODA",
    "CODASCA",
    "Exchange",
    "FAFED",
    "FAFedZO",
    "FMGDA",
    "FedAMS",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedAvgMVR",
    "FedLAMB",
    "FedProx",
    "FedYogi",
    "FedZO",
    "LocalAMSGrad",
    "LocalSGDA",
    "MBSTORM",
    "MimeAdam",
    "MomentumLocalSGDA",
    "NaiveAdaptiveFedAvg",
    "SCAFFOLD",
    "SCAFFOLDM",
    "SCAFFOLDMVR",
    "STEM",
]
