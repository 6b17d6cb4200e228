"""The protocol checker: kernels on the CPU target, under caches that are not coherent and orders that are hostile.

A `Subject` is what is checked: a model's mega-task, or a kernel of your own (`Kernel`). `check` runs it for many
cases, each a seed, a number of blocks and of rows; what fails is made as short as possible by `shorten`. `explore` goes
through all orders with few preemptions of one small case.
"""

from rocmega.check.explore import explore as explore
from rocmega.check.kernel import Kernel as Kernel
from rocmega.check.search import Summary as Summary
from rocmega.check.search import check as check
from rocmega.check.shorten import shorten as shorten
from rocmega.check.subject import Case as Case
from rocmega.check.subject import Failure as Failure
from rocmega.check.subject import Subject as Subject
from rocmega.check.subject import load as load
from rocmega.check.subject import run as run
