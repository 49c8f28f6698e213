"""What a chat model's text is made of: reasoning, content and tool calls, told apart as the text comes. Pure."""

from msgspec import Struct

from gateway.reasoning import Reasoning, Split
from gateway.structured import Thinking
from gateway.tasks import Piece
from gateway.tool_calls import CallStart, Content, Event, ToolCallParser, ToolFormat


class AnswerForm(Struct, frozen=True):
    """What to look for. `tools`: None where the model has none to call."""

    thinking: Thinking = "never"
    tools: ToolFormat | None = None
    parallel_tool_calls: bool = True


class Answer:
    """One choice's answer. `enough`: it has the one call that it may have, and a second one was begun."""

    def __init__(self, form: AnswerForm) -> None:
        self.enough = False
        self.num_calls = 0
        self._form = form
        self._reasoning = None if form.thinking == "never" else Reasoning(opened=form.thinking == "begun")
        self._parser = None if form.tools is None else ToolCallParser(form.tools)

    def add(self, piece: Piece, text: str) -> None:
        """Puts `text` where it belongs in `piece`."""
        split = Split(content=text) if self._reasoning is None else self._reasoning.feed(text)
        self._put(piece, split)

    def finish(self, piece: Piece) -> None:
        """Puts what was held back into `piece`, once nothing more comes."""
        if self._reasoning is not None:
            self._put(piece, self._reasoning.finish())
        if self._parser is not None:
            self._put_events(piece, self._parser.finish())

    def _put(self, piece: Piece, split: Split) -> None:
        piece.reasoning += split.reasoning
        if self._parser is None:
            piece.text += split.content
        else:
            self._put_events(piece, self._parser.feed(split.content))

    def _put_events(self, piece: Piece, events: list[Event]) -> None:
        for event in events:
            self.enough = self.enough or (
                isinstance(event, CallStart) and self.num_calls == 1 and not self._form.parallel_tool_calls
            )
            if self.enough:
                return
            if isinstance(event, Content):
                piece.text += event.text
                continue
            self.num_calls += isinstance(event, CallStart)
            piece.calls.append(event)
