import json
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


# A template in the manner of GLM's: a prefix, a tag for each role, tools, an opened answer.
TEMPLATE = """[gMASK]<sop>
{%- if tools %}<|system|>{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("unknown role " ~ message.role) }}
    {%- endif %}
    {%- if message.content == "stop" %}{% break %}{% endif %}
    {{- "<|" ~ message.role ~ "|>" ~ message.content ~ (eos_token if message.role == "assistant" else "") }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
SPECIAL = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<eos>"]
CHAT = [
    {"role": "user", "content": "the quick fox"},
    {"role": "assistant", "content": "brown"},
    {"role": "user", "content": "fox"},
]


@pytest.fixture
def chat_folder(tmp_path):
    """A tokenizer whose special tokens are those of the template, and tokenizer_config.json beside it."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(["<unk>", *SPECIAL, *WORDS[1:]])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<unk>", *SPECIAL])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[gMASK] $A", special_tokens=[("[gMASK]", vocabulary["[gMASK]"])]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"__type": "AddedToken", "content": "<eos>", "special": True},
        "chat_template": TEMPLATE,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_chat_template(chat_folder):
    tokenizer = Tokenizer(chat_folder)
    text = "[gMASK]<sop><|user|>the quick fox<|assistant|>brown<eos><|user|>fox"
    assert tokenizer.render_chat(CHAT, add_generation_prompt=False) == text
    assert tokenizer.render_chat(CHAT) == f"{text}<|assistant|>"
    # [gMASK] once: the template writes it, and the tokenizer's own is left out.
    assert tokenizer.apply_chat_template(CHAT) == [1, 2, 4, 7, 8, 10, 5, 9, 6, 4, 10, 5]
    assert tokenizer.encode("fox") == [1, 10]
    tools = [{"name": "größe", "of": "<x>"}]
    assert '<|system|>[{"name": "größe", "of": "<x>"}]<|user|>' in tokenizer.render_chat(CHAT, tools=tools)
    assert tokenizer.render_chat([*CHAT[:1], {"role": "user", "content": "stop"}, *CHAT]).count("fox") == 1


def test_chat_template_as_transformers_has_it(chat_folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(chat_folder)
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert Tokenizer(chat_folder).apply_chat_template(CHAT) == list(expected)


def test_where_the_chat_template_is(chat_folder):
    path = chat_folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    expected = Tokenizer(chat_folder).render_chat(CHAT)
    path.write_text(json.dumps({**config, "chat_template": [{"name": "default", "template": TEMPLATE}]}))
    assert Tokenizer(chat_folder).render_chat(CHAT) == expected
    (chat_folder / "chat_template.jinja").write_text("own file, {{ messages | length }}")
    assert Tokenizer(chat_folder).render_chat(CHAT) == "own file, 3"
    (chat_folder / "chat_template.jinja").unlink()
    path.unlink()
    with pytest.raises(RequestError, match="has no chat template"):
        Tokenizer(chat_folder).apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (TEMPLATE, [{"role": "robot", "content": "x"}], "refuses these messages: unknown role robot"),
        ("{% for %}", CHAT, "no template that jinja can read"),
        ("{{ messages.append(1) }}", CHAT, "refuses these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", CHAT, "refuses these messages"),
    ],
)
def test_chat_templates_are_not_trusted(template, messages, message, chat_folder):
    (chat_folder / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match=message):
        Tokenizer(chat_folder).render_chat(messages)


def test_a_damaged_tokenizer_config(chat_folder):
    (chat_folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(RequestError, match=r"tokenizer_config\.json is damaged"):
        Tokenizer(chat_folder).apply_chat_template(CHAT)
