from pathlib import Path

import pytest

from rocmega import LLM, SamplingParams
from rocmega.errors import RequestError
from rocmega.tokenizer import Tokenizer

WORDS = ["<s>", "the", "quick", "brown", "fox"]


def write_tokenizer(directory: Path) -> None:
    """One word per token; every other token id of the tiny vocabulary is a word w5, w6, ..."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(WORDS)} | {f"w{n}": n for n in range(len(WORDS), 512)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>"])
    made.save(str(directory / "tokenizer.json"))


def test_text_becomes_tokens_and_back(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("the fox") == [1, 4]
    assert tokenizer.decode([2, 0, 3]) == "quick brown"


def test_generate_from_text(tiny_copy):
    write_tokenizer(tiny_copy)
    with LLM(tiny_copy, path="standard", max_rows=2, max_model_len=64) as llm:
        [text, ids] = llm.generate(["the quick fox", [1, 2, 4]], SamplingParams(max_tokens=4))
    assert text.prompt == "the quick fox"
    assert text.prompt_token_ids == [1, 2, 4]
    assert text.outputs[0].token_ids == ids.outputs[0].token_ids
    assert text.outputs[0].text == ids.outputs[0].text
    assert len(text.outputs[0].text.split()) == 4


def test_no_tokenizer(tmp_path):
    with pytest.raises(RequestError, match="token ids instead"):
        Tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_named(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_an_empty_text_is_an_empty_prompt(tiny_copy):
    write_tokenizer(tiny_copy)
    with (
        LLM(tiny_copy, path="standard", max_rows=1, max_model_len=64) as llm,
        pytest.raises(RequestError, match="empty"),
    ):
        llm.generate("", SamplingParams(max_tokens=4))
