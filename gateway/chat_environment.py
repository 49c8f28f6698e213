"""The Jinja sandbox that chat templates run in: what transformers gives them, with bounds. Knows no messages.

Every loop step and every call looks at the clock, and what is written is counted. That bounds a template which is
slow on many messages; it is no wall against one written to exhaust memory, whose author also chose the weights.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_PRODUCT = 2**32
_BUDGET = "budget of this rendering"  # a variable that no template can name


class TemplateLimit(Exception):
    """A template that takes too long or writes too much."""


class _Budget:
    def __init__(self, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._deadline = time.monotonic() + max_seconds

    def check(self) -> None:
        if time.monotonic() > self._deadline:
            raise TemplateLimit(f"takes more than {self._max_seconds:g} seconds")


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks an assistant's words for training: just its body."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters[_BUDGET] = _steps
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        del self.globals["lipsum"]

    def bounded(self, tree: nodes.Template) -> Template:
        """The template of a syntax tree, each of whose loops counts its steps."""
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _BUDGET, [], [], None, None, lineno=loop.lineno)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def call(self, context: Context, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call a template makes, its macros' included."""
        context[_BUDGET].check()
        return super().call(context, target, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Products that no template of a conversation needs, and that would take all memory."""
        sizes = [len(side) if isinstance(side, Sized) else abs(side) for side in (left, right)]
        if operator == "**" or sizes[0] * sizes[1] > MAX_PRODUCT:
            raise TemplateLimit(f"computes a product beyond {MAX_PRODUCT}")
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def render(template: Template, values: Mapping[str, object], *, max_chars: int, max_seconds: float) -> str:
        """Raises TemplateLimit, and what the template raises."""
        parts: list[str] = []
        num_chars = 0
        for part in template.generate({**values, _BUDGET: _Budget(max_seconds)}):
            parts.append(part)
            num_chars += len(part)
            if num_chars > max_chars:
                raise TemplateLimit(f"writes more than {max_chars} characters")
        return "".join(parts)


@pass_context
def _steps(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    budget: _Budget = context[_BUDGET]
    for item in iterable:
        budget.check()
        yield item


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers': Jinja's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
