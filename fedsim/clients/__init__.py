"""Client algorithms: how a worker trains its model in a round, what it keeps between rounds, and what it sends."""

from fedsim.clients.adapters import KeptState, as_algorithm
from fedsim.clients.adaptive import Adagrad, Adam, AdamW
from fedsim.clients.algorithm import ClientAlgorithm, GradientAt, RoundNumbers, SampleNoise, WorkerRound, exchanges
from fedsim.clients.base import OuterProductGrad, State, Stepper
from fedsim.clients.capabilities import (
    CohortGradient,
    FeatureLoss,
    GradientMessage,
    PersonalModel,
    UpdateCorrection,
    client_algorithm,
    needs_local_steps,
)
from fedsim.clients.clustered import IFCA
from fedsim.clients.corrections import FedDyn, FedNova, Mime, MimeLite, Scaffold
from fedsim.clients.lr_schedules import LRSchedule, lr_schedule
from fedsim.clients.muon import Muon
from fedsim.clients.personal import FedBN, FedPer, FedRep, LGFedAvg, LocalOnly
from fedsim.clients.personal_models import APFL, Ditto, PerFedAvg, PFedMe
from fedsim.clients.sgd import DPSGD, SGD, FedProx, FedSAM, LocalSGD, Moon
from fedsim.clients.streaming import Streamed

__all__ = [
    "APFL",
    "DPSGD",
    "IFCA",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "ClientAlgorithm",
    "CohortGradient",
    "Ditto",
    "FeatureLoss",
    "FedBN",
    "FedDyn",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSAM",
    "GradientAt",
    "GradientMessage",
    "KeptState",
    "LGFedAvg",
    "LRSchedule",
    "LocalOnly",
    "LocalSGD",
    "Mime",
    "MimeLite",
    "Moon",
    "Muon",
    "OuterProductGrad",
    "PFedMe",
    "PerFedAvg",
    "PersonalModel",
    "RoundNumbers",
    "SampleNoise",
    "Scaffold",
    "State",
    "Stepper",
    "Streamed",
    "UpdateCorrection",
    "WorkerRound",
    "as_algorithm",
    "client_algorithm",
    "exchanges",
    "lr_schedule",
    "needs_local_steps",
]
