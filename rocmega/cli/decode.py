"""`rocmega decode`: complete prompts with a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rocmega.errors import RequestError

if TYPE_CHECKING:
    import torch

    from rocmega.llm import LLM, RequestOutput


def decode(
    directory: Path = typer.Argument(..., metavar="DIR", help="Checkpoint: config.json and safetensors, as published."),
    tokens: list[str] = typer.Option([], metavar="IDS", help="A prompt as ids: 1,2,3. Repeat for several rows."),
    prompt: list[str] = typer.Option([], metavar="TEXT", help="A prompt as text. Repeat for several rows."),
    max_new_tokens: int = typer.Option(16, min=1, help="How many tokens to generate at most."),
    path: str = typer.Option("auto", help="mega, fused, standard, or auto: the first that can."),
    blocks: int | None = typer.Option(None, min=1, help="Blocks of the mega-task. Any number gives the same bits."),
    seed: int | None = typer.Option(None, help="Of the CPU target's scheduler. Any seed gives the same bits."),
    device: str = typer.Option("auto", help="auto, host, hip or cuda."),
    kv_cache_dtype: str = typer.Option("auto", help="How the cache is stored, where a model leaves a choice."),
    activations: str = typer.Option("auto", help="What big matrices meet: bf16, fp8, f32, or auto: see the docs."),
    max_rows: int = typer.Option(16, min=1, help="How many prompts may run together."),
    max_model_len: int | None = typer.Option(None, min=2, help="Longest context, prompt and answer together."),
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Go on after an end-of-sequence token."),
    save_logits: Path | None = typer.Option(
        None, metavar="FILE", help="Write the logits of every generated token to a safetensors file."
    ),
    timeline: Path | None = typer.Option(
        None, metavar="FILE", help="Write what each block did in the last step, for Perfetto; needs the mega-task."
    ),
    json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Complete prompts, greedily: a prompt by the standard path, the rest by the mega-task."""
    from rocmega.cli.output import print_json, progress
    from rocmega.llm import LLM, SamplingParams

    prompts = _prompts(tokens, prompt)
    for name, file in (("save-logits", save_logits), ("timeline", timeline)):
        if file is not None and not file.absolute().parent.is_dir():
            raise RequestError(f"--{name} {file}: its folder does not exist.")
    if timeline is not None and path in ("standard", "fused"):
        raise RequestError(f"--timeline: there is no timeline of the {path} path, only of the mega-task.")
    saved = _SavedLogits(len(prompts))
    with progress(quiet=json) as show:
        llm = LLM(
            directory,
            device=device,
            path=path,
            max_rows=max_rows,
            max_model_len=max_model_len,
            blocks=blocks,
            seed=seed,
            activations=activations,
            kv_cache_dtype=kv_cache_dtype,
            timeline=timeline is not None,
            progress=show,
        )
        sampling = SamplingParams(max_tokens=max_new_tokens, ignore_eos=ignore_eos)
        results = llm.generate(prompts, sampling, observer=saved if save_logits is not None else None)
    if save_logits is not None:
        saved.write(save_logits, results)
    if json:
        print_json(_report(llm, path, results))
    else:
        _print(llm, results)
    if timeline is not None:
        _take_apart(llm, timeline, quiet=json)
    llm.close()


def _prompts(tokens: list[str], prompts: list[str]) -> list[Any]:
    if bool(tokens) == bool(prompts):
        raise RequestError("Give prompts either as --tokens 1,2,3 or as --prompt TEXT (each may be repeated).")
    return [_ids(text) for text in tokens] if tokens else prompts


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise RequestError(f"--tokens {text!r} is not a list of token ids such as 1,2,3.") from None


class _SavedLogits:
    """Keeps each token's logits. In the file: `logits.<row>` f32 [tokens, vocab] and `tokens.<row>` int64 [tokens]."""

    def __init__(self, rows: int) -> None:
        self.rows: list[list[torch.Tensor]] = [[] for _ in range(rows)]

    def __call__(self, request: int, number: int, logits: torch.Tensor) -> None:
        self.rows[request].append(logits.detach().float().cpu().clone())

    def write(self, file: Path, results: list[RequestOutput]) -> None:
        import torch
        from safetensors.torch import save_file

        tensors = {f"logits.{row}": torch.stack(kept) for row, kept in enumerate(self.rows)}
        tensors |= {f"tokens.{row}": torch.tensor(r.outputs[0].token_ids) for row, r in enumerate(results)}
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            save_file(tensors, partial)
            partial.replace(file)  # complete, or not there
        except OSError as error:
            raise RequestError(f"--save-logits {file} could not be written: {error}.") from None
        finally:
            partial.unlink(missing_ok=True)


def _take_apart(llm: LLM, file: Path, quiet: bool) -> None:
    """The last step: its trace to the file, its stages to the terminal."""
    from rich import box
    from rich.table import Table

    from rocmega.cli.output import console
    from rocmega.timeline import HEADER, cells

    made = llm.runner.timeline()
    made.write(file, f"{llm.runner.directory.name}, last step, on {llm.runner.where}")
    if quiet:
        return
    title = f"The last step: {made.length:.0f} {made.unit} with stamps, which cost something, on {made.blocks} blocks"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for number, name in enumerate(HEADER):
        table.add_column(name, justify="right" if number else "left")
    for line in cells(made.stages(), made.layers):
        table.add_row(*line)
    console().print(table)
    console().print(f"Waiting and working of a task in {made.unit}, then of all blocks' time.")
    console().print(made.diagnosis(llm.runner.stage_producers()))


def _report(llm: LLM, path: str, results: list[RequestOutput]) -> dict[str, Any]:
    return {
        "model": str(llm.runner.directory),
        "device": llm.runner.target,
        "path": path,
        "activations": llm.runner.activations,
        "outputs": [
            {
                "request_id": result.request_id,
                "prompt": result.prompt,
                "prompt_token_ids": result.prompt_token_ids,
                "token_ids": result.outputs[0].token_ids,
                "text": result.outputs[0].text,
                "finish_reason": result.outputs[0].finish_reason,
            }
            for result in results
        ],
        "metrics": llm.metrics(),
    }


def _print(llm: LLM, results: list[RequestOutput]) -> None:
    from rich.table import Table
    from rich.text import Text

    from rocmega.cli.output import console

    out = console()
    table = Table("row", "prompt", "tokens", "text", "end")
    for row, result in enumerate(results):
        answer = result.outputs[0]
        shown = result.prompt if result.prompt is not None else f"{len(result.prompt_token_ids)} tokens"
        ids = " ".join(map(str, answer.token_ids))
        table.add_row(str(row), Text(shown), ids, Text(answer.text or "(no tokenizer)"), answer.finish_reason)
    out.print(table)
    metrics = llm.metrics()
    ran = [f"{steps} by the {path} path" for path, steps in metrics["steps"].items() if steps]
    out.print(f"Steps: {', '.join(ran)}, on {llm.runner.where}")
    for reason, count in metrics["fallback_reasons"].items():
        out.print(Text(f"{count} steps fell back: {reason}"))
