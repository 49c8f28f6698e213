"""A model's chat template: from messages to the prompt's text. Knows the model's files and Jinja, no HTTP.

The template comes with the model and runs in Jinja's sandbox, with bounds on its time and on what it writes.
Messages are data only: a special token that their texts spell stays text (`segments`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from jinja2 import Template, TemplateError, TemplateSyntaxError, meta
from msgspec import DecodeError, Struct, ValidationError
from msgspec.json import decode

from gateway.chat_environment import ChatEnvironment, TemplateLimit
from gateway.errors import InvalidRequest, cut
from gateway.tokenize import TextTokenizer

MAX_PROMPT_CHARS = 16 * 1024 * 1024
MAX_RENDER_SECONDS = 2.0
MAX_ERROR_CHARS = 300
_OURS = ("messages", "tools", "add_generation_prompt")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# A character that Unicode keeps for use inside a program: it stands within spelled special tokens of messages.
_MARK = "\ufdd0"


class ChatTemplateError(ValueError):
    """A chat template that cannot be used; the text says where and why."""


class Segment(NamedTuple):
    """A piece of a rendered prompt: one special token of the template's, or text in which all is text."""

    text: str
    special: bool


class ChatTemplate:
    """One model's template, or its absence. May be used from several threads at once."""

    def __init__(
        self, sources: Mapping[str, str], *, variables: Mapping[str, object] | None = None, special: Iterable[str] = ()
    ) -> None:
        """`sources` by name ("default", "tool_use"), none for a model that cannot chat; `variables`: bos_token and the
        like; `special`: what special tokens look like. Raises ChatTemplateError."""
        environment = ChatEnvironment()
        self._functions = frozenset(environment.globals)
        self._templates: dict[str, Template] = {}
        self._variables = dict(variables or {})
        self._special = sorted((token for token in special if len(token) > 1), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, self._special)) or r"(?!)")
        names: set[str] = set()
        for name, source in sources.items():
            try:
                tree = environment.parse(source)
                names |= meta.find_undeclared_variables(tree)
                self._templates[name] = environment.bounded(tree)
            except TemplateSyntaxError as error:
                raise ChatTemplateError(f"the chat template {name!r}, line {error.lineno}: {error.message}") from None
        self.source = "\n".join(sources.values())
        self.supports_tools = "tools" in names
        self.thinks = "<think>" in self.source

    @classmethod
    def read(cls, model_dir: Path) -> "ChatTemplate":
        """The template of a model directory: chat_template.jinja (and additional_chat_templates/*.jinja), else
        `chat_template` of tokenizer_config.json. Raises ChatTemplateError."""
        try:
            config = _read_object(model_dir / "tokenizer_config.json")
            sources, special = _read_sources(model_dir, config), _read_special(model_dir)
            return cls(sources, variables=_token_variables(config), special=special)
        except ChatTemplateError as error:
            raise ChatTemplateError(f"{model_dir}: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        /,
        **kwargs: object,
    ) -> str:
        """The prompt as text, as transformers' apply_chat_template gives it. `kwargs` go to the template
        (`enable_thinking`). Raises InvalidRequest: no template, or one that refuses the messages."""
        if not self._templates:
            raise InvalidRequest(
                "messages need a chat template, which this model lacks: use /v1/completions, or put a "
                "chat_template.jinja into its directory",
                param="messages",
            )
        if taken := kwargs.keys() & {*_OURS, *self._variables, *self._functions}:
            name = min(taken)
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"{param} cannot be set; leave it out", param=param)
        default = self._templates.get("default") or next(iter(self._templates.values()))
        template = self._templates.get("tool_use", default) if tools else default
        values = {"messages": [_for_template(message) for message in messages], "tools": tools or None}
        try:
            return ChatEnvironment.render(
                template,
                {**self._variables, **values, "add_generation_prompt": add_generation_prompt, **kwargs},
                max_chars=MAX_PROMPT_CHARS,
                max_seconds=MAX_RENDER_SECONDS,
            )
        except TemplateLimit as error:
            raise InvalidRequest(f"the chat template on these messages {error}", param="messages") from None
        except TemplateError as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {_told(error)}", param="messages"
            ) from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            text = f"the chat template cannot take these messages: {_told(error)}"
            raise InvalidRequest(text, param="messages") from None

    def segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        /,
        **kwargs: object,
    ) -> list[Segment]:
        """The prompt in pieces: special tokens that the template wrote, and texts. One that a message spells is text
        like the rest of it. Joined, the pieces are what `render` gives. Raises as `render`."""
        text = self.render(
            self._mark(messages), tools and self._mark(tools), add_generation_prompt, **self._mark(kwargs)
        )
        found: list[Segment] = []
        end = 0
        for match in self._spelled.finditer(text):
            found += [Segment(text[end : match.start()], False), Segment(match[0], True)]
            end = match.end()
        found.append(Segment(text[end:], False))
        return [Segment(text.replace(_MARK, ""), special) for text, special in found if text]

    def _mark(self, value: Any) -> Any:
        """A copy in which no string spells a special token."""
        if isinstance(value, str):
            return self._spelled.sub(lambda match: match[0][0] + _MARK + match[0][1:], value.replace(_MARK, "\ufffd"))
        if isinstance(value, Mapping):
            return {self._mark(key): self._mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(item) for item in value]
        return value


def prompt_ids(tokenizer: TextTokenizer, segments: Sequence[Segment]) -> list[int]:
    """Token ids of a prompt in pieces."""
    first = [segment.text for segment in segments[:1] if not segment.special]
    others = [segment.text for segment in segments[1:] if not segment.special]
    texts = iter(tokenizer.encode(first) + tokenizer.encode_inner(others))
    ids: list[int] = []
    for segment in segments:
        ids += tokenizer.special_ids(segment.text) if segment.special else next(texts)
    return ids


def _told(error: Exception) -> str:
    """A template may repeat what it was given."""
    return cut(str(error), MAX_ERROR_CHARS)


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: nothing that is null, thoughts under each of their names, and a call's
    arguments as an object, not as its JSON."""
    result = {name: value for name, value in message.items() if value is not None}
    if thoughts := [result[name] for name in _THOUGHTS if name in result]:
        result = {"thinking": thoughts[0], **result, "reasoning_content": thoughts[0]}
    if isinstance(calls := result.get("tool_calls"), list):
        result["tool_calls"] = [_call_for_template(call) for call in calls]
    return result


def _call_for_template(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"] or "{}")
    except orjson.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _read_sources(model_dir: Path, config: dict[str, Any]) -> dict[str, str]:
    file = model_dir / "chat_template.jinja"
    if file.exists():
        others = {path.stem: path for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja"))}
        return {name: path.read_text(encoding="utf-8") for name, path in {**others, "default": file}.items()}
    match config.get("chat_template"):
        case None:
            return {}
        case str(source):
            return {"default": source}
        case [*items] if all(isinstance(i, dict) and {"name", "template"} <= i.keys() for i in items):
            return {str(item["name"]): str(item["template"]) for item in items}
    raise ChatTemplateError("chat_template in tokenizer_config.json is neither a text nor a list of named ones")


def _token_variables(config: dict[str, Any]) -> dict[str, object]:
    """bos_token, eos_token and so on: texts, or objects with a `content`."""
    values = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


class _AddedToken(Struct):
    content: str
    special: bool = False


class _TokenizerFile(Struct):
    added_tokens: list[_AddedToken] = []


def _read_special(model_dir: Path) -> list[str]:
    file = model_dir / "tokenizer.json"
    if not file.exists():
        return []
    try:
        return [token.content for token in decode(file.read_bytes(), type=_TokenizerFile).added_tokens if token.special]
    except (DecodeError, ValidationError) as error:
        raise ChatTemplateError(f"tokenizer.json: {error}") from None


def _read_object(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ChatTemplateError(f"{file.name}: {error}") from None
    if not isinstance(content, dict):
        raise ChatTemplateError(f"{file.name} holds no object")
    return content
