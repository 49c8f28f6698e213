"""A generation's prompts to token ids: text, token ids as given, or a conversation put into the model's template.

Pure; runs on any thread.
"""

import secrets
from array import array

import msgspec
from msgspec import Struct

from gateway.chat_template import Segment, prompt_ids
from gateway.encode import bad_id
from gateway.errors import InvalidRequest
from gateway.generate_answer import AnswerForm
from gateway.generate_job import ChoiceInput
from gateway.generation_defaults import GenerationDefaults
from gateway.models import Generator, ServedModel
from gateway.reasoning import CLOSE, opened_by
from gateway.structured import Grammars, Thinking
from gateway.tasks import ChatPrompt, GenerateTask, Structure, place
from gateway.tool_calls import HERMES, detect_format
from gateway.tool_prompt import with_tools
from ipc.types import ModelFacts


class Prompt(Struct):
    """`text` as the client gave it or the template made it, None for token ids; `form` for chat only."""

    input_ids: list[int]
    text: str | None = None
    form: AnswerForm | None = None
    grammar: str | None = None


def encode_prompts(task: GenerateTask, model: ServedModel, facts: ModelFacts) -> list[Prompt]:
    """Raises InvalidRequest, naming the prompt that is too long and why, or the field of an impossible grammar."""
    assert model.generator is not None, "checked before: the model's files are those of one that generates"
    if task.chat is not None:
        prompts = [_chat_prompt(task, task.chat, model, model.generator)]
    else:
        prompts = _prompts(task, model, facts)
        grammar = _structure_grammar(task.structure, model.generator.grammars, "never")
        for prompt in prompts:
            prompt.grammar = grammar
    for i, prompt in enumerate(prompts):
        _check_length(prompt_name(task, i), len(prompt.input_ids), task, facts)
    return prompts


def _prompts(task: GenerateTask, model: ServedModel, facts: ModelFacts) -> list[Prompt]:
    texts = [text for text in task.prompts if isinstance(text, str)]
    encoded = iter(model.tokenizer.encode(texts))
    prompts = []
    for i, given in enumerate(task.prompts):
        if isinstance(given, str):
            ids = model.tokenizer.single.prefix + next(encoded)  # what ends a text would end the generation, too
            if not ids:
                name = prompt_name(task, i)
                raise InvalidRequest(f"{name} has no tokens; give some text", param=name)
            prompts.append(Prompt(ids, given))
        else:
            if max(given) >= facts.vocab_size:
                raise bad_id(prompt_name(task, i), given, facts)
            prompts.append(Prompt(given))
    return prompts


def _chat_prompt(task: GenerateTask, chat: ChatPrompt, model: ServedModel, generator: Generator) -> Prompt:
    template, grammars = generator.chat, generator.grammars
    form = detect_format(template.source) if template.supports_tools else None
    if form is None:
        messages, tools = with_tools(chat.messages, chat.tools), []
    else:
        messages, tools = chat.messages, chat.tools
    segments = template.segments(messages, tools, chat.add_generation_prompt, **chat.template_kwargs)
    if chat.continue_final_message:
        segments = cut_behind(segments, chat.messages[-1]["content"].strip())
    ids = prompt_ids(model.tokenizer, segments)
    if not ids:
        raise InvalidRequest("the model's chat template makes no text of these messages", param="messages")
    text = "".join(segment.text for segment in segments)
    thinking = _thinking(text) if template.thinks else "never"
    use = task.tools
    if use is None:
        grammar = _structure_grammar(task.structure, grammars, thinking)
        return Prompt(ids, text, AnswerForm(thinking), grammar)
    form = form or HERMES
    grammar = grammars.of_tools(form, use.tools, use.choice, parallel=use.parallel, thinking=thinking)
    return Prompt(ids, text, AnswerForm(thinking, form, use.parallel), grammar)


def _thinking(prompt: str) -> Thinking:
    """What may come before the answer proper, of a model that thinks."""
    if opened_by(prompt):
        return "begun"
    return "never" if prompt.rstrip().endswith(CLOSE) else "maybe"


def _structure_grammar(structure: Structure | None, grammars: Grammars, thinking: Thinking) -> str | None:
    if structure is None:
        return None
    value, param = structure.value, structure.param
    match structure.kind:
        case "format":
            return grammars.of_format(value, thinking)
        case "schema":
            return grammars.of_schema(value, param, thinking)
        case "regex":
            return grammars.of_regex(value, param, thinking)
        case "choice":
            return grammars.of_choice(value, param, thinking)


def cut_behind(segments: list[Segment], content: str) -> list[Segment]:
    """The prompt up to the end of the last message's content, so that the model goes on with it."""
    for i in range(len(segments) - 1, -1, -1):
        if segments[i].special:
            continue
        text = segments[i].text
        before = text[::-1].find(content[::-1])  # `rfind` takes the product of both lengths where much is alike
        if before >= 0:
            return [*segments[:i], Segment(text[: len(text) - before], False)]
    text = "continue_final_message: the model's chat template does not show the last message as it is"
    raise InvalidRequest(text, param="continue_final_message")


def _check_length(name: str, num_prompt: int, task: GenerateTask, facts: ModelFacts) -> None:
    limit = facts.max_model_len
    asked = task.max_tokens
    if asked is not None and num_prompt + asked > limit:
        text = (
            f"{name} has {num_prompt} tokens and max_tokens is {asked}: {num_prompt} + {asked} = {num_prompt + asked}, "
            f"but the model's context holds {limit}; shorten the prompt or lower max_tokens"
        )
        raise InvalidRequest(text, param=name, code="context_length_exceeded")
    if num_prompt >= limit:
        text = (
            f"{name} has {num_prompt} tokens; the model's context of {limit} leaves no room for an answer; shorten it"
        )
        raise InvalidRequest(text, param=name, code="context_length_exceeded")
    least, most = task.sampling.min_tokens, _max_tokens(task, num_prompt, facts)
    if least > most:
        text = f"min_tokens is {least}, but there may be {most} at most; lower it or raise max_tokens"
        raise InvalidRequest(text, param="min_tokens")


def _max_tokens(task: GenerateTask, num_prompt: int, facts: ModelFacts) -> int:
    """At least one: a generation of none is none."""
    if task.max_tokens is not None:
        return max(task.max_tokens, 1)
    left = facts.max_model_len - num_prompt
    return left if task.usual_max_tokens is None else min(task.usual_max_tokens, left)


def choice_inputs(
    task: GenerateTask, prompts: list[Prompt], defaults: GenerationDefaults, facts: ModelFacts, cache_salt: str
) -> list[ChoiceInput]:
    """One for each choice, in their order. Seeds are drawn where none is given: a choice that must begin anew
    elsewhere takes the same ones."""
    choices = []
    usual = defaults.fill(task.sampling, task.left_open)
    for i, prompt in enumerate(prompts):
        max_tokens = _max_tokens(task, len(prompt.input_ids), facts)
        seed = task.sampling.seed if task.sampling.seed is not None else secrets.randbits(63)
        frame = array("i", prompt.input_ids).tobytes()
        for j in range(task.n):
            sampling = msgspec.structs.replace(
                usual, max_tokens=max_tokens, seed=_wrap(seed + j), grammar=prompt.grammar
            )
            choices.append(ChoiceInput(i, frame, len(prompt.input_ids), sampling, cache_salt.encode()))
    return choices


def _wrap(seed: int) -> int:
    """`seed` as a signed 64-bit number."""
    return (seed + 2**63) % 2**64 - 2**63


def prompt_name(task: GenerateTask, index: int) -> str:
    """How an error calls a prompt."""
    if task.chat is not None:
        return "messages"
    return "prompt" if len(task.prompts) == 1 else place("prompt", index)
