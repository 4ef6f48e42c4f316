"""Prompts as transformers would make them, a bare user turn where the run asks for chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from intellect_protocol.environments.base import Problem
from intellect_protocol.environments.prompts import Prompts
from intellect_protocol.errors import ConfigError

# As in SmolLM2 and Qwen2.5: a default system prompt is put in front.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As in Gemma: no system turn at all.
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + message['content'] }}{% endfor %}"
)
# As in Llama 2: the system prompt is folded into the user turn.
FOLDED = (
    "{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] %}{% else %}{% set s = '' %}"
    "{% endif %}[I]{{ s }}{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
    "{% endfor %}[/I]"
)
# As in Llama 3: begins with the bos token.
WITH_BOS = "{{ bos_token }}" + CHATML
PROBLEM = Problem("arithmetic", 0, "What is 4 + 3?", "7")


def make_folder(folder: Path, template: str | None = None, **config: Any) -> Path:
    """A character tokenizer in a checkpoint folder."""
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|bos|>"]
    vocabulary = {token: i for i, token in enumerate([*special, "\n", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.add_special_tokens(special)
    from tokenizers.decoders import Fuse

    tokenizer.decoder = Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": {"__type": "AddedToken", "content": "<|bos|>"},
    } | config
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_plain_prompts_are_the_question_and_decode_back(tmp_path: Path) -> None:
    prompts = Prompts(make_folder(tmp_path), chat=False)
    assert prompts.decode(prompts.encode(PROBLEM)) == PROBLEM.question
    assert prompts.decode(prompts.encode_answer(PROBLEM)) == PROBLEM.answer
    assert prompts.decode([*prompts.encode_answer(PROBLEM), *prompts.stop_ids]) == PROBLEM.answer
    assert prompts.vocab_size == 100


def test_a_target_length_is_asked_for_in_words(tmp_path: Path) -> None:
    prompts = Prompts(make_folder(tmp_path), chat=False)
    asked = msgspec.structs.replace(PROBLEM, target_length=250)
    text = prompts.decode(prompts.encode(asked))
    assert "250 tokens" in text
    assert text.endswith(PROBLEM.question)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "<|im_start|>user\nWhat is 4 + 3?<|im_end|>\n<|im_start|>assistant\n"),
        (WITH_BOS, "<|bos|><|im_start|>user\nWhat is 4 + 3?<|im_end|>\n<|im_start|>assistant\n"),
        (NO_SYSTEM, "<|bos|><|im_start|>userWhat is 4 + 3?"),
        (FOLDED, "[I]What is 4 + 3?[/I]"),
    ],
)
def test_a_chat_prompt_is_a_bare_user_turn(template: str, expected: str, tmp_path: Path) -> None:
    prompts = Prompts(make_folder(tmp_path, template), chat=True)
    reference = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert prompts.encode(PROBLEM) == reference.encode(expected, add_special_tokens=False).ids


def test_a_model_whose_turns_open_with_its_bos_token_gets_it_once(tmp_path: Path) -> None:
    prompts = Prompts(make_folder(tmp_path, CHATML, bos_token="<|im_start|>"), chat=True)
    assert prompts.encode(PROBLEM).count(1) == 2  # the user's turn and the assistant's


@pytest.mark.parametrize("template", [NO_SYSTEM, FOLDED])
def test_templates_without_a_default_system_prompt_render_as_in_transformers(
    template: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, template)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROBLEM.question}], add_generation_prompt=True, return_dict=False
    )
    assert Prompts(folder, chat=True).encode(PROBLEM) == ids


def test_the_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, FOLDED)
    (folder / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}!")
    prompts = Prompts(folder, chat=True)
    assert prompts.decode(prompts.encode(PROBLEM)) == "What is 4 + 3?!"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [9, 4]}, "config.json": {"eos_token_id": 5}}, [4, 9]),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 5}}, [5]),
        ({"config.json": {"eos_token_id": None}}, [2]),
        ({}, [2]),
    ],
)
def test_stop_ids_come_from_the_nearest_configuration(
    files: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    folder = make_folder(tmp_path)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    assert Prompts(folder, chat=False).stop_ids == expected


def test_a_tokenizer_without_an_end_has_no_stop_ids(tmp_path: Path) -> None:
    prompts = Prompts(make_folder(tmp_path, eos_token=None), chat=False)
    with pytest.raises(ConfigError, match="end of text"):
        _ = prompts.stop_ids


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in %}",
        "{{ messages[0].__class__.__mro__[1].__subclasses__()[0]() }}",
        "{{ undefined.attribute }}",
        "{{ raise_exception('never') }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_bad_templates_are_errors_of_the_configuration(template: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, template)
    with pytest.raises(ConfigError, match="chat template"):
        Prompts(folder, chat=True).encode(PROBLEM)


def test_chat_without_a_template_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        Prompts(make_folder(tmp_path), chat=True)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"[" * 1000])
def test_bad_tokenizers_are_errors_of_the_configuration(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Prompts(tmp_path, chat=False)
    with pytest.raises(ConfigError):
        Prompts(tmp_path / "nowhere", chat=False)


@pytest.mark.parametrize("tokens", [[-1], [2**40]])
def test_ids_that_are_none_do_not_decode(tokens: list[int], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token ids"):
        Prompts(make_folder(tmp_path), chat=False).decode(tokens)
