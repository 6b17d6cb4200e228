"""What rocmega raises. Every message is one paragraph for a person: what went wrong, where, and what to do about it."""

from __future__ import annotations


class RocmegaError(Exception):
    """Anything rocmega refuses or finds wrong. The command line prints it as it is and exits with code 2."""


class ConfigError(RocmegaError):
    """A model configuration that cannot be run; the message lists every reason."""


class CheckpointError(RocmegaError):
    """A weight file that is missing, damaged or of another shape than its configuration says."""


class PackError(RocmegaError):
    """A pack that cannot be written, is damaged, or is for something else than what it is wanted for."""


class ToolchainError(RocmegaError):
    """No compiler, or one that refused the source."""


class DriverError(RocmegaError):
    """A device, or the library that drives it, is missing or failed."""


class RequestError(RocmegaError):
    """Bad input from the user: a token out of range, too many rows, too long a context."""


class BusyError(RequestError):
    """As many requests wait as may: the same request can succeed later."""


class StepError(RocmegaError):
    """A kernel gave up waiting: a step of the mega-task that did not complete.

    stage is the stage's name where it is known, else its number; expected and seen are the epoch tags.
    """

    def __init__(self, rank: int, block: int, stage: str | int, task: int, expected: int, seen: int, note: str = ""):
        self.rank, self.block, self.stage, self.task = rank, block, stage, task
        self.expected, self.seen = expected, seen
        message = (
            f"the step did not complete: on rank {rank}, block {block} waited in stage {stage}, task {task}, "
            f"for tag {expected} and saw {seen}."
        )
        super().__init__(f"{message} {note}".rstrip())
