"""Text to token ids and back, by the tokenizer that lies in the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rocmega.errors import RequestError

FILE, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")

Message = Mapping[str, Any]  # "role" and "content", and what else the template knows


class Tokenizer:
    """The checkpoint's `tokenizer.json`. Raises RequestError where it, or the `tokenizers` package, is missing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / FILE
        if not path.is_file():
            raise RequestError(
                f"{directory} has no {FILE}, so text cannot be turned into tokens. Give token ids instead "
                "(--tokens on the command line), or put the model's tokenizer beside its weights."
            )
        try:
            import tokenizers
        except ImportError as error:
            raise RequestError(
                "Text needs the 'tokenizers' package: pip install 'rocmega[demo]', or give token ids instead "
                "(--tokens on the command line)."
            ) from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise RequestError(f"{path} is not a tokenizer that the 'tokenizers' package can read: {error}") from error
        self._template: Any = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds by itself."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation, as the model was trained to see it.

        messages: such as {"role": "user", "content": "..."}. add_generation_prompt: end with what opens the
        assistant's turn. variables: others that the template knows, such as tools or enable_thinking. Raises
        RequestError if the checkpoint has no template, or the template refuses the messages.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)  # the template has put them where they belong

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The same as text."""
        config = self._config()
        if self._template is None:
            self._template = _compile(self._source(config), self.directory)
        special = {name: _text(config[name]) for name in _SPECIAL if config.get(name) is not None}
        values = {**special, "messages": list(messages), "add_generation_prompt": add_generation_prompt, **variables}
        try:
            return str(self._template.render(**values))
        except Exception as error:  # whatever a template's code may raise
            raise RequestError(f"The chat template of {self.directory} refuses these messages: {error}") from None

    def _config(self) -> dict[str, Any]:
        path = self.directory / CONFIG
        if not path.is_file():
            return {}
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            raise RequestError(f"{path} is damaged: it is no JSON object. Fetch it again.")
        return config

    def _source(self, config: dict[str, Any]) -> str:
        """The template's text: a file of its own, or in tokenizer_config.json, where several may have names."""
        if (self.directory / TEMPLATE).is_file():
            return (self.directory / TEMPLATE).read_text(encoding="utf-8")
        source = config.get("chat_template")
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            raise RequestError(
                f"{self.directory} has no chat template, neither {TEMPLATE} nor one in {CONFIG}: give the prompt as "
                "text."
            )
        return source


def _text(token: Any) -> str:
    """A special token, which may be a string or an object with one."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _compile(source: str, directory: Path) -> Any:
    """A template comes with the weights, from whoever made them: it runs in jinja's sandbox."""
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise RequestError("Chat templates need the 'jinja2' package: pip install jinja2.") from error

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def now(format: str) -> str:
        import datetime

        return datetime.datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json  # jinja's own escapes HTML
    environment.globals |= {"raise_exception": refuse, "strftime_now": now}
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise RequestError(f"The chat template of {directory} is no template that jinja can read: {error}") from None


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def find(directory: Path) -> Tokenizer | None:
    """The checkpoint's tokenizer, or None if it has none that can be read: output then comes as token ids only."""
    try:
        return Tokenizer(directory)
    except RequestError:
        return None
