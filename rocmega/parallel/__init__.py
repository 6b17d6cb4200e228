"""Ranks that share a model: how they find each other, agree, and write each other's memory.

A `Group` is what one of them knows of the others: `TorchGroup` where each is a process. `ThreadRanks` are ranks as
threads of one process (the CPU target's checker runs them in one launch), `Loopback` is one rank that plays all of
them, to measure its part of the work.
"""

from rocmega.parallel.agreement import Agreement as Agreement
from rocmega.parallel.loopback import Loopback as Loopback
from rocmega.parallel.pipeline import Pipeline as Pipeline
from rocmega.parallel.processes import TorchGroup as TorchGroup
from rocmega.parallel.processes import local_rank as local_rank
from rocmega.parallel.processes import wants_ranks as wants_ranks
from rocmega.parallel.symmetric import Group as Group
from rocmega.parallel.symmetric import SymmetricBuffer as SymmetricBuffer
