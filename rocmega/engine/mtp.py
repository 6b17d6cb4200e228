"""Guesses of the model's own layer for them, where its checkpoint has one (multi-token prediction; models/*/draft.py).

It runs in PyTorch: after each step over what the step ran, and once more for each guess after the first. A guess is
chosen as the answer's token will be, by the request's parameters and with the random number of that token: where layer
and model agree about the distribution, guess and answer are the same draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rocmega.engine.drafts import Drafter
from rocmega.engine.request import Request
from rocmega.errors import RequestError

if TYPE_CHECKING:
    import torch

    from rocmega.engine.accept import Acceptor
    from rocmega.engine.rows import Run
    from rocmega.runner import Runner


def load_layer(runner: Runner) -> Any:
    """The layer of a loaded model's checkpoint or pack, a family's DraftPath.

    Raises RequestError where it cannot be had, CheckpointError if the checkpoint has none, ConfigError if the family
    does not know it.
    """
    from rocmega.cache import TorchMemory
    from rocmega.checkpoint import Checkpoint
    from rocmega.packing import open_pack
    from rocmega.registry import family_module

    if runner.tp > 1 or runner.pipeline is not None:
        raise RequestError(
            "draft_method='mtp': the layer runs in PyTorch, on one rank and node alone, and this model is shared by "
            "several. Take draft_method='lookup'."
        )
    family = family_module(runner.family, "draft")
    if runner.packed:
        weights = family.load_packed(open_pack(runner.directory), runner.config, runner.device)
    else:
        checkpoint = Checkpoint(runner.directory)
        activations = "f32" if runner.activations == "f32" else "bf16"
        weights = family.load(checkpoint, runner.config, runner.device, activations)
        checkpoint.close()
    return family.DraftPath(runner.standard, weights, TorchMemory(str(runner.device)))


class LayerDrafts(Drafter):
    """The model's layer for guessing ahead.

    room(request, count): gives a request pages for up to `count` tokens more, and says for how many.
    """

    wants_residual = True

    def __init__(self, runner: Runner, acceptor: Acceptor, room: Callable[[Request, int], int]) -> None:
        super().__init__(runner)
        self.layer, self.acceptor, self.room = load_layer(runner), acceptor, room

    def prefill(self, request: Request, tokens: Sequence[int]) -> None:
        import torch

        sequence = request.sequence
        assert sequence is not None
        begin, seen = sequence.length, list[torch.Tensor]()
        self.runner.prefill(sequence, tokens, seen.append)
        following = torch.tensor([request.token(begin + at + 1) for at in range(len(tokens))])
        [table] = self.runner.block_table([sequence])
        output = self.layer.prefill_draft(following, torch.cat(seen), begin, table)
        request.draft_state = (sequence.length - 1, output)

    def guess(self, wanted: Sequence[tuple[Request, int]], share: int) -> None:
        """Of requests whose last cached token the layer has seen; it saw none of a prompt that others had cached."""
        import torch

        goals: list[tuple[Request, int]] = []
        for request, most in wanted:
            known = request.draft_state is not None and request.draft_state[0] == request.length - 2
            count = self.room(request, min(most, share)) if known else 0
            if count > 0:
                goals.append((request, count))
        states = [request.draft_state[1] for request, _ in goals if request.draft_state is not None]
        while goals:
            outputs = torch.stack(states)
            for (request, _), logits in zip(goals, self.layer.logits(outputs), strict=True):
                request.guesses.append(self._choose(request, logits))
            left = [row for row, (request, count) in enumerate(goals) if len(request.guesses) < count]
            goals = [goals[row] for row in left]
            if goals:  # each one position on, from the layer's own output
                requests = [request for request, _ in goals]
                positions = [request.length - 2 + len(request.guesses) for request in requests]
                states = list(self._advance(requests, [r.guesses[-1] for r in requests], outputs[left], positions))

    def took(self, runs: Sequence[Run], begins: Sequence[int], residual: torch.Tensor | None) -> None:
        """The layer's cache follows the model's: it runs over every row that was right, all requests' at once."""
        assert residual is not None
        requests, positions, rows, row = list[Request](), list[int](), list[int](), 0
        for run, begin in zip(runs, begins, strict=True):
            right = 0 if run.request.finished else run.sequence.length - begin
            requests += [run.request] * right
            positions += range(begin, begin + right)
            rows += range(row, row + right)
            row += len(run.tokens)
        if not requests:
            return
        following = [request.token(position + 1) for request, position in zip(requests, positions, strict=True)]
        outputs = self._advance(requests, following, self.layer.model_output(residual[rows]), positions)
        for request, position, output in zip(requests, positions, outputs, strict=True):
            request.draft_state = (position, output.clone())

    def _advance(
        self, requests: Sequence[Request], following: Sequence[int], hidden: torch.Tensor, positions: Sequence[int]
    ) -> torch.Tensor:
        sequences = [request.sequence for request in requests if request.sequence is not None]
        output: torch.Tensor = self.layer.advance(following, hidden, positions, self.runner.block_table(sequences))
        return output

    def _choose(self, request: Request, logits: torch.Tensor) -> int:
        from rocmega.sampling.choose import choose

        choice = self.acceptor.choice(request, request.guesses)
        return int(logits.argmax()) if choice is None else choose(logits, choice)
