"""`rocmega serve`: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from rocmega.errors import RequestError


def serve(
    directory: Path = typer.Argument(..., metavar="DIR", help="Checkpoint: config.json and safetensors, as published."),
    host: str = typer.Option("127.0.0.1", help="Where to listen. Only this machine can reach the default."),
    port: int = typer.Option(8000, min=0, max=65535, help="0: a free one."),
    api_key: str | None = typer.Option(
        None, envvar="ROCMEGA_API_KEY", help="Asked of every client. The environment variable keeps it out of `ps`."
    ),
    model_name: str | None = typer.Option(None, help="What clients call the model; the folder's name if not given."),
    path: str = typer.Option("auto", help="mega, fused, standard, or auto: the first that can."),
    device: str = typer.Option("auto", help="auto, host, hip or cuda."),
    max_rows: int = typer.Option(16, min=1, help="How many requests run together; others wait."),
    max_model_len: int | None = typer.Option(None, min=2, help="Longest context, prompt and answer together."),
    cache_pages: int | None = typer.Option(None, min=1, help="Pages of 64 tokens; enough for all rows if not given."),
    draft_tokens: int = typer.Option(0, min=0, help="Tokens to guess ahead for each request, in rows to spare."),
    draft_method: str = typer.Option("lookup", help="Where guesses come from: lookup, or mtp, the model's own layer."),
    tokens_per_launch: str = typer.Option("1", help="Steps of the mega-task in one launch: a number, or auto."),
    max_waiting: int = typer.Option(256, min=1, help="How many requests may wait; more are told to come back (429)."),
    max_body: int = typer.Option(4 << 20, min=1, help="Bytes of a request's body."),
    shutdown_seconds: int = typer.Option(
        20, min=0, help="After SIGTERM or Ctrl-C, how long answers that have begun may go on; then they end."
    ),
) -> None:
    """Serve completions and chats over HTTP, as OpenAI's API has them."""
    try:
        import uvicorn

        from rocmega.server.app import Options, create_app
    except ImportError as error:
        raise RequestError(f"The server needs its own packages ({error}): pip install 'rocmega[serve]'.") from None
    from rocmega.cli.output import progress
    from rocmega.llm import LLM

    with progress() as show:
        llm = LLM(
            directory,
            device=device,
            path=path,
            max_rows=max_rows,
            max_model_len=max_model_len,
            cache_pages=cache_pages,
            draft_tokens=draft_tokens,
            draft_method=draft_method,
            tokens_per_launch=_launch(tokens_per_launch),
            progress=show,
        )
    with llm:
        llm.engine.max_waiting = max_waiting
        options = Options(model_name or directory.resolve().name, api_key, max_body)
        uvicorn.run(
            create_app(llm, options),
            host=host,
            port=port,
            log_level="info",
            timeout_graceful_shutdown=shutdown_seconds,  # its own default waits for ever for a client that never reads
        )


def _launch(tokens: str) -> int | Literal["auto"]:
    if tokens == "auto":
        return "auto"
    if not tokens.isdecimal():
        raise RequestError(f"--tokens-per-launch {tokens!r}: a number, or auto.")
    return int(tokens)
