"""Structured output: from `response_format`, patterns and forced tool calls to a grammar that ranks run (llguidance).

Makes the grammar's text and compiles it once to know that it is right; knows nothing of tokens or models' files.
Compiling takes about 1 ms, and 0.3 ms a KiB for large schemas (on one core; other threads go on meanwhile).
"""

import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.errors import InvalidRequest, cut
from gateway.reasoning import CLOSE, OPEN
from gateway.schema_bounds import MAX_SCHEMA_BYTES, check_schema
from gateway.tool_calls import ToolFormat
from gateway.tools import Tool, ToolChoice

MAX_PATTERN_CHARS = 16 * 1024
MAX_CHOICES = 4096
MAX_CALLS = 16  # that one answer may be made to hold
MAX_ERROR_CHARS = 300
MAX_COMPILE_SECONDS = 5.0  # of one core; ranks compile it again, and are killed when a step takes too long
# Between JSON's tokens. Without an end to it small models go on with white space for ever.
WHITE_SPACE = r"[ \n\r\t]{1,32}"

_NO_START = "no text can begin as it asks"  # references in a circle, say

Thinking = Literal["never", "maybe", "begun"]
_NAMED = re.compile(r"<[^<>\s]+>")


class Grammars:
    """Makes grammars, and remembers which ones it found right or wrong. May be used from several threads at once.

    Every method raises InvalidRequest, naming the field at fault. `thinking` says what may come before the
    structure: nothing, a think block, or the rest of a block that the prompt has begun.
    """

    def __init__(self, added_tokens: Iterable[str] = (), *, capacity: int = 512) -> None:
        """`added_tokens`: how the added tokens of the model's tokenizer are spelled. A tag that is one of them, as
        Qwen's `<tool_call>`, is forced as that token, since its letters would be something else to the model."""
        self._added = frozenset(token for token in added_tokens if _NAMED.fullmatch(token))
        self._capacity = capacity
        self._errors: OrderedDict[bytes, str] = OrderedDict()  # by the grammar's digest; empty for a right one
        self._lock = threading.Lock()
        self._tokenizer = _byte_tokenizer(self._added)

    def of_format(self, response_format: Mapping[str, Any] | None, thinking: Thinking = "never") -> str | None:
        """OpenAI's `response_format`. Without `strict`, a schema's keywords that cannot be enforced are passed over;
        with it they are refused."""
        match response_format:
            case None | {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return self._checked(_json({"type": "object"}, strict=True), thinking, "response_format")
            case {"type": "json_schema", "json_schema": {"schema": dict(schema), **rest}}:
                param = "response_format.json_schema.schema"
                check_schema(schema, param)
                return self._checked(_json(schema, strict=rest.get("strict") is True), thinking, param)
            case {"type": "json_schema"}:
                text = "response_format.json_schema.schema must be a JSON schema (an object)"
                raise InvalidRequest(text, param="response_format.json_schema.schema")
        text = "response_format.type must be one of text, json_object, json_schema"
        raise InvalidRequest(text, param="response_format.type")

    def of_schema(self, schema: object, param: str, thinking: Thinking = "never") -> str:
        """A JSON schema in a field of another name."""
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{param} must be a JSON schema (an object)", param=param)
        check_schema(schema, param)
        return self._checked(_json(schema, strict=False), thinking, param)

    def of_regex(self, pattern: str, param: str, thinking: Thinking = "never") -> str:
        """All of the answer matches `pattern` (the syntax of Rust's regex: no look-around, no back-references)."""
        if not 0 < len(pattern) <= MAX_PATTERN_CHARS:
            text = f"{param} has {len(pattern)} characters; a pattern may have 1 to {MAX_PATTERN_CHARS}"
            raise InvalidRequest(text, param=param)
        if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # the compiler would pass over it
            raise InvalidRequest(f"{param} ends within an escape: a backslash with nothing behind it", param=param)
        return self._checked(f"/{regex_to_lark(pattern, '')}/", thinking, param)

    def of_choice(self, choices: Sequence[str], param: str, thinking: Thinking = "never") -> str:
        """The answer is one of `choices`."""
        if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
            raise InvalidRequest(f"{param} must hold 1 to {MAX_CHOICES} texts, none of them empty", param=param)
        if sum(map(len, choices)) > MAX_SCHEMA_BYTES:
            raise InvalidRequest(f"{param} has more than {MAX_SCHEMA_BYTES} characters in all", param=param)
        return self._checked(" | ".join(map(json.dumps, choices)), thinking, param)

    def of_tools(
        self,
        form: ToolFormat | None,
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        parallel: bool = True,
        thinking: Thinking = "never",
    ) -> str | None:
        """A choice of "required" or "named": the answer is calls in the format `form`, and nothing else. Others force
        nothing."""
        if choice.mode in ("none", "auto"):
            return None
        if form is None:
            text = "tool_choice cannot force calls: this model's chat template teaches no format of them that is known"
            raise InvalidRequest(text, param="tool_choice", code="unsupported")
        named = choice.mode == "named"
        chosen = [tool for tool in tools if not named or tool.name == choice.name]
        num_bytes = sum(len(json.dumps(tool.parameters)) for tool in chosen)
        if num_bytes > MAX_SCHEMA_BYTES:  # ranks take no larger grammar, and compiling to say so would take seconds
            text = f"the parameters of tools have {num_bytes} bytes in all; calls of at most {MAX_SCHEMA_BYTES} can be "
            raise InvalidRequest(text + "forced: give fewer or smaller tools, or name one", param="tools")
        for tool in chosen:  # each alone, for the right one to be named
            param = f"tools[{tools.index(tool)}].function.parameters"
            check_schema(tool.parameters, param)
            self._checked(_json(tool.parameters, strict=tool.strict), "never", param)
        call = " ".join(part for part in (self._literal(form.open), "call", self._literal(form.close)) if part)
        if parallel and not named:
            call += f" ({self._literal(form.between)} {call}){{0,{MAX_CALLS - 1}}}"
        return self._checked(call, thinking, "tools", *_call_rules(form, chosen))

    def _checked(self, body: str, thinking: Thinking, param: str, *rules: str) -> str:
        """The grammar `body`, compiled to see that it can be."""
        lines = ["%llguidance {}", *self._thinking(thinking), f"body: {body}", *rules, ""]
        grammar: str = LLMatcher.grammar_from_lark("\n".join(lines))
        name = hashlib.blake2b(grammar.encode(), digest_size=16).digest()  # grammars themselves are large
        with self._lock:
            error = self._errors.get(name)
            if error is not None:
                self._errors.move_to_end(name)
        if error is None:
            error = _shorten(self._compile(grammar))
            with self._lock:
                self._errors[name] = error
                if len(self._errors) > self._capacity:
                    self._errors.popitem(last=False)
        if error:
            raise InvalidRequest(f"{param} cannot be enforced: {error}", param=param)
        return grammar

    def _compile(self, grammar: str) -> str:
        """What is wrong with it, or nothing: it compiles, in good time, and something can be written by it."""
        start = time.thread_time()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            error: str = matcher.get_error().partition("\n<state>")[0].strip()
            return _NO_START if error in ("", "NoExtensionBias") else error
        seconds = time.thread_time() - start
        return f"it takes {seconds:.1f} s to compile" if seconds > MAX_COMPILE_SECONDS else ""

    def _thinking(self, thinking: Thinking) -> list[str]:
        """The rules of the start: the body, and the thinking before it."""
        if thinking == "never":
            return ["start: body"]
        if CLOSE in self._added:
            block = [f"block: /(.|\\n)*/ {CLOSE} space"]
        else:
            block = ["block: thought space", f'thought[suffix="{CLOSE}"]: /(.|\\n)*/']
        start = "start: block body" if thinking == "begun" else f"start: ({self._literal(OPEN)} block)? body"
        return [start, *block, r"space: /[ \n]{0,4}/"]

    def _literal(self, text: str) -> str:
        """Text in a grammar, the tokens in it by their names."""
        parts = re.split(f"({'|'.join(map(re.escape, self._added))})", text) if self._added else [text]
        return " ".join(part if part in self._added else json.dumps(part) for part in parts if part)


def _json(schema: dict[str, Any], *, strict: bool) -> str:
    """`x-guidance` in a schema are options of the compiler: ours, not the client's."""
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _call_rules(form: ToolFormat, tools: Sequence[Tool]) -> list[str]:
    """A schema of its own for each tool's arguments, so that references in it begin at its root."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{form.arguments}": ')
        rules.append(f'call_{i}: {head} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: {_json(tool.parameters, strict=tool.strict)}")
    return rules


def _byte_tokenizer(added: Iterable[str]) -> LLTokenizer:
    """Enough of a tokenizer to compile grammars: one token a byte, and the named ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", *sorted(added)])
    return LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("<|end|>"))


def _shorten(error: str) -> str:
    """The compiler's message without the grammar around the fault, which the client has not seen.

    Cut first: a client's text may stand in it, and the search begins anew at every line of white space.
    """
    message = re.split(r"\n\s*\d+ \| ", error.strip()[: 2 * MAX_ERROR_CHARS])[0]
    message = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema:", "", message)
    return cut(" ".join(message.split()), MAX_ERROR_CHARS)
