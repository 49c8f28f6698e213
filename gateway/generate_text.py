"""One choice's tokens on their way to text: detokenised, ended by stop strings, with what is known of each token.

Pure. Text, logprobs and the count of tokens end together: at the token that ends the generation, or that completes a
stop string. Of that token's text only what stands before the stop string is given out; it counts as generated.
"""

from collections.abc import Sequence

from gateway.detokenize import Detokenizer, TokenBytes
from gateway.generate_answer import Answer
from gateway.generate_prompt import Prompt
from gateway.stop_strings import Matcher, StopStrings
from gateway.tasks import GenerateTask, Piece, TokenInfo, TopToken
from ipc.submit import TokenDelta

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's stands for it
Top = Sequence[tuple[int, float]]


class ChoiceText:
    """`add` every delta of the choice in order, until a piece has a finish_reason.

    `stops` are of the request's stop strings. Of the prompt, only `echo` needs more than its form.
    """

    def __init__(
        self, choice: int, task: GenerateTask, tokens: TokenBytes, prompt: Prompt, stops: Matcher | None
    ) -> None:
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self._choice = choice
        self._task = task
        self._tokens = tokens
        self._detokenizer = Detokenizer(tokens, skip_special_tokens=task.skip_special_tokens, starts_text=False)
        self._stops = None if stops is None else StopStrings(stops, include_stop=task.include_stop)
        self._offset = 0  # characters of text so far, held back ones included
        self._held: list[TokenInfo] = []  # of tokens whose text is held back
        self._echo = _Echo(prompt, task, tokens) if task.echo else None
        self._answer = Answer(prompt.form) if prompt.form is not None else None
        self._drop = task.echo and task.max_tokens == 0  # one is generated all the same, for the prompt's logprobs
        self._begun = False

    def num_entries(self, delta: TokenDelta) -> int:
        """How much work `add` will be: tokens, and logprobs to be put into words."""
        num_tokens = len(delta.tokens)
        if self._echo is not None:
            num_tokens += self._echo.num_tokens
        return num_tokens * (1 + (self._task.sampling.logprobs or 0))

    def add(self, delta: TokenDelta) -> Piece | None:
        """What the client gets to see of these tokens; None if that is nothing yet."""
        piece = Piece(self._choice)
        self.num_cached_tokens = delta.num_cached_tokens or self.num_cached_tokens
        num_tokens = self.num_tokens
        if self._echo is not None:
            self._echo.add(delta)
            if delta.tokens or delta.finish_reason:
                piece.text, piece.tokens = self._echo.piece()
                self._offset, self._echo = len(piece.text), None
        if self._drop:
            piece.finish_reason = "length" if delta.tokens or delta.finish_reason else None
        else:
            self._add_tokens(piece, delta)
        self.num_draft_tokens += delta.num_draft_tokens
        self.num_accepted_tokens += min(delta.num_accepted_tokens, self.num_tokens - num_tokens)  # up to a stop string
        if not (piece.text or piece.reasoning or piece.calls or piece.finish_reason):
            return None
        piece.tokens = piece.tokens + self._held
        self._held = []
        piece.first, self._begun = not self._begun, True
        return piece

    def _add_tokens(self, piece: Piece, delta: TokenDelta) -> None:
        logprobs = self._task.sampling.logprobs is not None
        last = len(delta.tokens) - 1 if delta.finish_reason == "stop" and not self._task.include_stop else -1
        parts = []
        for i, token in enumerate(delta.tokens):
            text = "" if i == last else self._detokenizer.add((token,))
            self.num_tokens += 1
            if logprobs:
                top = delta.top_logprobs[i] if delta.top_logprobs else ()
                self._held.append(token_info(self._tokens, token, delta.logprobs[i], top, self._offset))
            self._offset += len(text)
            parts.append(self._until_stop(text))
            if self._stops is not None and self._stops.hit is not None:
                piece.finish_reason = "stop"
                break
        else:
            if delta.finish_reason is not None:
                parts.append(self._rest())
                hit = self._stops is not None and self._stops.hit is not None
                piece.finish_reason = "length" if delta.finish_reason == "length" and not hit else "stop"
        self._put(piece, "".join(parts))

    def _put(self, piece: Piece, text: str) -> None:
        """New text, and in the last piece what has been held back."""
        if self._answer is None:
            piece.text += text
            return
        self._answer.add(piece, text)
        if piece.finish_reason is not None:
            self._answer.finish(piece)
        if self._answer.enough or (piece.finish_reason == "stop" and self._answer.num_calls):
            piece.finish_reason = "tool_calls"

    def _until_stop(self, text: str) -> str:
        """`text` as far as it can be given out. Stop strings do not count before min_tokens."""
        if self._stops is None or self.num_tokens < self._task.sampling.min_tokens:
            return text
        return self._stops.feed(text)[0]

    def _rest(self) -> str:
        """What was held back, now that nothing comes after it."""
        text = self._detokenizer.finish()
        if self._stops is None:
            return text
        return self._stops.feed(text)[0] + self._stops.flush()


class _Echo:
    """The prompt, with the likelihoods of its tokens as they come in."""

    def __init__(self, prompt: Prompt, task: GenerateTask, tokens: TokenBytes) -> None:
        self._ids = prompt.input_ids
        self._text = prompt.text
        self._tokens = tokens
        self._logprobs: list[float] | None = None if task.sampling.prompt_logprobs is None else []
        self._top: list[Top] = []

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def add(self, delta: TokenDelta) -> None:
        if self._logprobs is not None:
            self._logprobs += delta.prompt_logprobs
            self._top += delta.prompt_top_logprobs

    def piece(self) -> tuple[str, list[TokenInfo]]:
        """Text and tokens of the prompt."""
        if self._logprobs is None and self._text is not None:
            return self._text, []
        detokenizer = Detokenizer(self._tokens, skip_special_tokens=self._text is not None)
        infos, parts, offset = [], [], 0
        for i, token in enumerate(self._ids):
            if self._logprobs is not None:
                logprob = self._logprobs[i - 1] if i else None
                top = self._top[i - 1] if i and self._top else ()
                infos.append(token_info(self._tokens, token, logprob, top, offset))
            parts.append(detokenizer.add((token,)))
            offset += len(parts[-1])
        return ("".join(parts) + detokenizer.finish() if self._text is None else self._text), infos


def token_info(tokens: TokenBytes, token: int, logprob: float | None, top: Top, offset: int) -> TokenInfo:
    text, raw = tokens.token_text(token)
    tops = [TopToken(*tokens.token_text(other), max(value, LEAST_LOGPROB)) for other, value in top]
    return TokenInfo(text, raw, None if logprob is None else max(logprob, LEAST_LOGPROB), tops, offset)
