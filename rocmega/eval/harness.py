"""EleutherAI's lm-evaluation-harness asks a rocmega model.

    python -m rocmega.eval.harness run --model rocmega --model_args pretrained=DIR,path=mega --tasks ...

is the harness's own command with this model known to it. Log-likelihoods are those of teacher-forced decode steps
(rocmega.eval.scoring), so that the harness examines decoding, and path=standard and path=mega can be compared.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from rocmega.errors import RequestError
from rocmega.eval.scoring import score
from rocmega.llm import LLM, SamplingParams

ROWS = 16
_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "seed")


@register_model("rocmega")
class Harness(TemplateLM):
    """A checkpoint or pack for the harness.

    pretrained: its folder. batch_size: how many rows decode together; "auto" is 16. max_length: the longest context.
    max_gen_toks: of an answer, if a task does not say. target: auto, host, hip or cuda. settings: others of
    rocmega.LLM, such as activations. device: not heeded, for the harness says "cuda:0" if nobody has said anything.
    """

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = ROWS,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        path: str = "auto",
        target: str = "auto",
        device: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        rows = int(batch_size) if str(batch_size).isdigit() else max_batch_size or ROWS
        self.path, self.max_gen_toks = path, max_gen_toks
        self.llm = LLM(pretrained, path=path, device=target, max_rows=rows, max_model_len=max_length, **settings)

    @property
    def max_length(self) -> int:
        return self.llm.max_model_len

    @property
    def eot_token_id(self) -> int:
        if not self.llm.runner.eos_token_ids:
            raise RequestError("This model has no end-of-sequence token, which stands before texts without a context.")
        return min(self.llm.runner.eos_token_ids)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.llm.tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Contexts that are too long lose their beginnings, as in the harness's own models."""
        room = self.max_length + 1
        pairs = [(context[-max(1, room - len(wanted)) :], wanted) for _, context, wanted in requests]
        self.llm.engine.forget_prefixes()  # its pages are needed
        found = []
        for (key, _, _), made in zip(requests, score(self.llm.runner, pairs, self.path), strict=True):
            found.append((sum(made.logprobs), made.greedy))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, found[-1])
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        found = []
        for text, *_ in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            parts = self._loglikelihood_tokens([(None, *make_disjoint_window(window)) for window in windows])
            found.append(sum(logprob for logprob, _ in parts))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts, sampling = [], []
        for text, wanted in (request.args for request in requests):
            sampling.append(self._sampling(dict(wanted)))
            prompts.append(self.tok_encode(text)[-max(1, self.max_length - sampling[-1].max_tokens) :])
        texts = [output.outputs[0].text for output in self.llm.generate(prompts, sampling)] if prompts else []
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _sampling(self, wanted: dict[str, Any]) -> SamplingParams:
        """A task's generation arguments. Raises RequestError for those that nobody here knows."""
        until = wanted.pop("until", None) or []
        longest = int(wanted.pop("max_gen_toks", self.max_gen_toks))
        sampled = wanted.pop("do_sample", bool(wanted.get("temperature")))
        given = {name: wanted.pop(name) for name in _SAMPLED if name in wanted}
        if wanted:
            raise RequestError(f"Generation arguments that are not known here: {', '.join(sorted(wanted))}.")
        stops = [until] if isinstance(until, str) else list(until)
        return SamplingParams(max_tokens=min(longest, self.max_length - 1), stop=stops, **(given if sampled else {}))


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
