"""The path of a generation: encode, send every choice, and write what comes back, at once or at the end."""

import asyncio
import secrets
import time

from aiohttp import web

from gateway.answer import Answer
from gateway.call import INLINE_CHARS, Call
from gateway.dialects.registry import Dialect
from gateway.errors import GatewayError, InvalidRequest
from gateway.generate_choices import INLINE_ENTRIES, Choices
from gateway.generate_job import Generation, Keeping
from gateway.generate_prompt import Prompt, choice_inputs, encode_prompts, prompt_name
from gateway.limits import check_chars, check_choices, check_items, check_tokens
from gateway.stream import KEEP_ALIVE, EventStream, every
from gateway.tasks import GenerateOutcome, GenerateTask, Head, Piece, Text, num_entries

INLINE_MESSAGES = 16
_COUNTED = {"role", "content"}  # of a message; what else it has, its thoughts say, may be of any length


async def generate(request: web.BaseRequest, call: Call, task: GenerateTask, dialect: Dialect) -> web.StreamResponse:
    """Raises GatewayError; if the answer has begun, front.py makes its last event of it."""
    check_model(call, task)
    check_choices(task, call.gateway.config)
    prompts = await _encode(call, task)
    generation = _start(call, task, prompts)
    try:
        choices = Choices(call, task, prompts, generation)
        if task.stream:
            return await _stream(request, call, task, dialect, generation, choices)
        outcome = GenerateOutcome(_head(), await _collect(choices), choices.usage())
        return Answer(await _render(call, task, dialect, outcome), call.headers())
    except asyncio.CancelledError:
        generation.abort("deadline" if asyncio.get_running_loop().time() >= call.deadline else "disconnect")
        raise
    except GatewayError as error:
        if error.index is not None:
            error.param = prompt_name(task, error.index)
            error.message = f"{error.param}: {error.message}"
        raise
    finally:
        generation.abort("disconnect")  # of what has ended, nothing is left to abort


def check_model(call: Call, task: GenerateTask) -> None:
    """Whether the model does what is asked for at all. Raises InvalidRequest."""
    name, facts = call.model.name, call.facts
    if facts.task != "generate":
        text = f"model {name!r} does not generate text; it is one for {facts.task}"
        raise InvalidRequest(text, param="model")
    if call.model.generator is None:
        text = f"the tokenizer of model {name!r} cannot turn tokens into text one by one, so it cannot be used here"
        raise InvalidRequest(text, param="model")
    sampling = task.sampling
    if sampling.logprobs is not None and sampling.logprobs > facts.max_logprobs:
        param = "logprobs" if task.chat is None else "top_logprobs"
        text = f"{param} is {sampling.logprobs}; this model gives at most {facts.max_logprobs}"
        raise InvalidRequest(text, param=param)
    for param, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        if ids and max(ids) >= facts.vocab_size:
            text = f"{param} has the token id {max(ids)}; the model's vocabulary has {facts.vocab_size} tokens"
            raise InvalidRequest(text, param=param, code="token_out_of_range")


async def _encode(call: Call, task: GenerateTask) -> list[Prompt]:
    """Prompts as token ids, made on the pool unless there is little to do."""
    config = call.gateway.config
    start = time.perf_counter()
    if task.chat is None:
        check_items("prompt", len(task.prompts), config)
        num_chars = check_chars("prompt", task.prompts, call.facts.max_model_len, False, config, "shorten it")
    else:
        texts: list[Text] = [message["content"] for message in task.chat.messages if message.get("content")]
        num_chars = check_chars("messages", texts, call.facts.max_model_len, False, config, "shorten it")
    args = (task, call.model, call.facts)
    if num_chars <= INLINE_CHARS and _is_small(task):
        prompts = encode_prompts(*args)
    else:
        prompts = await asyncio.get_running_loop().run_in_executor(call.gateway.pool, encode_prompts, *args)
    seconds = time.perf_counter() - start
    call.tokenize_ms = seconds * 1000
    call.gateway.metrics.tokenize_seconds.observe(seconds)
    return prompts


def _is_small(task: GenerateTask) -> bool:
    """Whether there is nothing to do for its prompts but to encode their few characters."""
    if task.structure is not None or task.tools is not None or len(task.prompts) > INLINE_MESSAGES:
        return False
    if task.chat is None:
        return True
    messages, kwargs = task.chat.messages, task.chat.template_kwargs
    if len(messages) > INLINE_MESSAGES or not all(isinstance(value, bool) for value in kwargs.values()):
        return False
    return sum(map(len, kwargs)) <= INLINE_CHARS and all(message.keys() <= _COUNTED for message in messages)


def _start(call: Call, task: GenerateTask, prompts: list[Prompt]) -> Generation:
    gateway = call.gateway
    num_tokens = task.n * sum(len(prompt.input_ids) for prompt in prompts)
    check_tokens(num_tokens, gateway.config)
    gateway.metrics.prompt_tokens += num_tokens
    salt = gateway.config.cache_salt if task.cache_salt is None else task.cache_salt
    assert call.model.generator is not None, "check_model has seen it"
    inputs = choice_inputs(task, prompts, call.model.generator.defaults, call.facts, salt)
    keeping = Keeping(gateway.config.max_unsent_tokens, task.stream)
    return gateway.client.generate(call.model.name, inputs, call.priority, call.deadline, keeping)


def _head() -> Head:
    return Head(secrets.token_hex(12), int(time.time()))


async def _collect(choices: Choices) -> list[list[Piece]]:
    found: dict[int, list[Piece]] = {}
    while not choices.done:
        for piece in await choices.next():
            if piece.first:
                found[piece.choice] = []
            found[piece.choice].append(piece)
    return [found[i] for i in sorted(found)]


async def _render(call: Call, task: GenerateTask, dialect: Dialect, outcome: GenerateOutcome) -> bytes:
    """The answer's body, made on the pool if it is large."""
    pieces = [piece for choice in outcome.choices for piece in choice]
    if num_entries(pieces) <= INLINE_ENTRIES:
        return dialect.render(task, outcome)
    return await asyncio.get_running_loop().run_in_executor(call.gateway.pool, dialect.render, task, outcome)


async def _stream(
    request: web.BaseRequest, call: Call, task: GenerateTask, dialect: Dialect, generation: Generation, choices: Choices
) -> web.StreamResponse:
    assert dialect.events is not None, "only its routes give a GenerateTask"
    events = dialect.events(task, _head())
    stream = EventStream(request, {"X-Tokenize-Ms": f"{call.tokenize_ms:.2f}"})
    quiet_s = call.gateway.config.keep_alive_ms / 1000
    with every(quiet_s / 2, generation.wake):  # a timeout around each wait would cost more than all the rest
        while not choices.done:
            pieces = await choices.next()
            if pieces:
                for piece in pieces:
                    generation.streamed.add(piece.choice)
                if num_entries(pieces) <= INLINE_ENTRIES:
                    await stream.send(events.pieces(pieces))
                else:
                    loop = asyncio.get_running_loop()
                    await stream.send(await loop.run_in_executor(call.gateway.pool, events.pieces, pieces))
            elif stream.quiet_s() >= quiet_s / 2:
                await stream.send(KEEP_ALIVE)
    if task.include_usage:
        await stream.send(events.usage(choices.usage()))
    await stream.end()
    return stream.response
