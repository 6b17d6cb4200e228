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

    stage is the stage's name where it is known, else its number; expected and seen are the epoch tags; peer is the rank
    that was waited for, None if it was this one.
    """

    def __init__(
        self,
        rank: int,
        block: int,
        stage: str | int,
        task: int,
        expected: int,
        seen: int,
        note: str = "",
        *,
        peer: int | None = None,
    ):
        self.peer = peer
        self.rank, self.block, self.stage, self.task = rank, block, stage, task
        self.expected, self.seen = expected, seen
        message = (
            f"the step did not complete: on rank {rank}, block {block} waited in stage {stage}, task {task}, "
            f"for {'' if peer is None else f'rank {peer} and '}tag {expected} and saw {seen}."
        )
        super().__init__(f"{message} {note}".rstrip())


class PeerError(RocmegaError):
    """Another rank failed, or cannot be reached. `rank` is its number, None if it is not known which."""

    def __init__(self, rank: int | None, what: str):
        self.rank, self.what = rank, what
        super().__init__(f"{'another rank' if rank is None else f'rank {rank}'} {what}")
