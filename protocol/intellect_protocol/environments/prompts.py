"""Problems to token ids and completions back to text, with the checkpoint's own tokenizer.

Coordinator, validator and node parents do this without torch or transformers: `tokenizers` reads
tokenizer.json and a sandboxed jinja renders the chat template, both from the checkpoint folder.

A chat prompt is a bare user turn. Many templates put a default system prompt in front when there is
none; it is cut off again by rendering with a marker for a system prompt and removing what renders
for the marker alone. A template that folds the system prompt into the user turn, or knows none, is
rendered as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..engines.weights import MAX_CONFIG_BYTES, read_json
from ..errors import ConfigError
from .base import Problem

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

MAX_TOKENIZER_BYTES = 64 << 20
_MARKER = "system prompt to be removed"


class Prompts:
    """A checkpoint's tokenizer and prompt format."""

    def __init__(self, checkpoint_dir: Path, *, chat: bool) -> None:
        """Read tokenizer.json and, for `chat`, the chat template of a folder.

        Raises:
            ConfigError: a file is missing, too large or malformed.
        """
        self._folder = checkpoint_dir
        self._tokenizer = _load_tokenizer(checkpoint_dir / "tokenizer.json")
        self._special = _special_tokens(checkpoint_dir)
        self._chat = chat
        if chat:
            self._template  # noqa: B018 - a missing template is an error now, not at the first prompt

    def text(self, problem: Problem) -> str:
        """What the policy reads, before any chat template.

        A target length is asked for as INTELLECT-2 did: in words, ahead of the question.
        """
        if problem.target_length is None:
            return problem.question
        return f"Think for {problem.target_length} tokens before giving a response. {problem.question}"

    def encode(self, problem: Problem) -> list[int]:
        """Prompt token ids.

        Raises:
            ConfigError: the chat template fails.
        """
        text = self.text(problem)
        if self._chat:
            # Special tokens stand in the rendered text.
            return list(self._tokenizer.encode(self._user_turn(text), add_special_tokens=False).ids)
        return list(self._tokenizer.encode(text).ids)

    def encode_answer(self, problem: Problem) -> list[int]:
        """Token ids of the right answer without an end: what supervised warm-up teaches."""
        return list(self._tokenizer.encode(problem.answer, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a completion, special tokens left out.

        Raises:
            ConfigError: a token id does not fit into 32 bits.
        """
        try:
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
        except (OverflowError, TypeError) as error:
            raise ConfigError(f"not token ids: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows, added tokens included."""
        return int(self._tokenizer.get_vocab_size())

    @cached_property
    def stop_ids(self) -> list[int]:
        """End-of-text ids of generation_config.json, else of config.json, else the tokenizer's eos token.

        Raises:
            ConfigError: none is given.
        """
        for name in ("generation_config.json", "config.json"):
            if (self._folder / name).is_file():
                value = read_json(self._folder / name).get("eos_token_id")
                ids = value if isinstance(value, list) else [value]
                if ids and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                    return sorted(set(ids))
        eos = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        if eos is None:
            raise ConfigError(
                f"{self._folder}: neither a configuration nor the tokenizer names an end of text"
            )
        return [int(eos)]

    @cached_property
    def _template(self) -> Template:
        from jinja2 import TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # As transformers sets it up; a template is written against these settings.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        try:
            return environment.from_string(_template_text(self._folder))
        except TemplateSyntaxError as error:
            raise ConfigError(f"{self._folder}: chat template: {error}") from error

    def _render(self, messages: list[dict[str, str]], *, answer_next: bool) -> str:
        return self._template.render(messages=messages, add_generation_prompt=answer_next, **self._special)

    def _user_turn(self, text: str) -> str:
        from jinja2 import TemplateError

        user = {"role": "user", "content": text}
        system = {"role": "system", "content": _MARKER}
        try:
            alone = self._render([system], answer_next=False)
            both = self._render([system, user], answer_next=True)
        except (TemplateError, TypeError, ValueError, ArithmeticError):
            alone = both = ""
        if _MARKER in alone and both.startswith(alone):
            turn = both.removeprefix(alone)
            bos = self._special.get("bos_token", "")
            # Some models open every turn with their bos token (SmolLM2): then the turn has it already.
            return turn if not alone.startswith(bos) or turn.startswith(bos) else bos + turn
        try:
            return self._render([user], answer_next=True)
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"{self._folder}: chat template: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _load_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        size = path.stat().st_size
        if size > MAX_TOKENIZER_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_TOKENIZER_BYTES} bytes")
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # the library raises plain Exception for anything it cannot parse
        raise ConfigError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token and so on, as tokenizer_config.json writes them (text or object)."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    tokens: dict[str, str] = {}
    for key, value in read_json(path).items():
        if key.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[key] = content
    return tokens


def _template_text(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            content = path.read_bytes()[: MAX_CONFIG_BYTES + 1]
            if len(content) > MAX_CONFIG_BYTES:
                raise ConfigError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes")
            return content.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
    path = folder / "tokenizer_config.json"
    template: Any = read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(template, list):  # several named templates
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if not isinstance(template, str):
        raise ConfigError(f"{folder}: the run asks for chat prompts and the tokenizer has no chat template")
    return template
