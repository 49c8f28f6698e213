"""A task's texts to the token ids a model wants: prompts, frames, templates, limits. Pure; runs on any thread."""

from gateway.errors import InvalidRequest
from gateway.models import ServedModel
from gateway.tasks import EmbedTask, Encoded, ScoreTask, Text, place
from gateway.template import DOCUMENT_PROMPTS, QUERY_PROMPTS, RerankTemplate, reranker_head
from gateway.tokenize import longest_first
from ipc.types import ModelFacts


def token_limit(model: ServedModel, facts: ModelFacts) -> int:
    """Tokens of one sequence, special tokens included: what files and running model both allow.

    For generation the running model alone decides: tokenizers of language models name limits of other origins.
    """
    if facts.task == "generate":
        return facts.max_model_len
    return min(model.max_seq_length or facts.max_model_len, facts.max_model_len)


def encode_embed(task: EmbedTask, model: ServedModel, facts: ModelFacts) -> Encoded:
    """Raises InvalidRequest, naming input, count and limit of the first text that is too long."""
    prompt = model.prompts.get(task.prompt_name)
    return Encoded(_sequences("input", task.inputs, prompt, task.truncate, model, facts))


def encode_score(task: ScoreTask, model: ServedModel, facts: ModelFacts) -> Encoded:
    """One sequence per pair; with an embedding model one per query, then one per document. Raises InvalidRequest."""
    if task.instruction is not None:
        _check_instruction(task, model, facts)
    if facts.task == "embed":
        return _encode_both_sides(task, model, facts)
    if task.joined:
        return _encode_joined(task, model, facts)
    if model.template is not None:
        return _encode_template(task, model, model.template, facts)
    return _encode_pairs(task, model, facts)


def _check_instruction(task: ScoreTask, model: ServedModel, facts: ModelFacts) -> None:
    """Raises InvalidRequest where the instruction would change nothing."""
    if facts.task == "embed" or model.template is None:
        text = f"instruction is for generative rerankers, and {model.name!r} is none; leave it out"
        raise InvalidRequest(text, param="instruction", code="unsupported")
    if task.joined:
        text = "instruction does not go with joined token ids, which are taken as given; leave it out"
        raise InvalidRequest(text, param="instruction")


def _encode_both_sides(task: ScoreTask, model: ServedModel, facts: ModelFacts) -> Encoded:
    query_field, document_field, joined_field = task.fields
    if task.joined:
        text = f"pairs: {model.name!r} is an embedding model, which scores two texts, not joined token ids"
        raise InvalidRequest(text, param=joined_field)
    prompts = model.prompts
    queries = _sequences(query_field, task.queries, prompts.first(QUERY_PROMPTS), task.truncate, model, facts)
    documents = _sequences(document_field, task.documents, prompts.first(DOCUMENT_PROMPTS), task.truncate, model, facts)
    return Encoded(queries + documents)


def _encode_joined(task: ScoreTask, model: ServedModel, facts: ModelFacts) -> Encoded:
    field, limit = task.fields[2], token_limit(model, facts)
    for i, ids in enumerate(task.joined):
        if max(ids) >= facts.vocab_size:
            raise bad_id(place(field, i), ids, facts)
        _check_length(place(field, i), len(ids), limit, "shorten it")
    if not model.uses_token_types:
        return Encoded(task.joined)
    starts = task.joined_type_starts or [_second_part(ids, model) for ids in task.joined]
    return Encoded(task.joined, starts)


def _second_part(ids: list[int], model: ServedModel) -> int:
    """Where a joined pair's second text begins: behind the first separator."""
    middle = model.tokenizer.pair.middle
    if middle and middle[0] in ids:
        return min(ids.index(middle[0]) + (model.tokenizer.pair.type_start or 0), len(ids))
    return len(ids)


def _encode_pairs(task: ScoreTask, model: ServedModel, facts: ModelFacts) -> Encoded:
    limit = token_limit(model, facts)
    room = limit - model.tokenizer.pair.num_tokens
    cut = room if task.truncate else None
    queries = _bare(task.fields[0], task.queries, cut, model, facts)
    documents = _bare(task.fields[1], task.documents, cut, model, facts)
    encoded = Encoded([])
    for q, d in task.pairs:
        query, document = queries[q], documents[d]
        if not task.truncate:
            length = len(query) + len(document) + model.tokenizer.pair.num_tokens
            _check_length(place(task.fields[1], d), length, limit, "with its query; shorten it or set truncate to true")
        num_query, num_document = longest_first(len(query), len(document), room)
        ids, type_start = model.tokenizer.frame_pair(query[:num_query], document[:num_document])
        encoded.sequences.append(ids)
        if model.uses_token_types:
            encoded.type_starts.append(type_start)
    return encoded


def _encode_template(task: ScoreTask, model: ServedModel, template: RerankTemplate, facts: ModelFacts) -> Encoded:
    limit = token_limit(model, facts)
    room = limit - template.num_tokens
    heads = _heads(task, model, room)
    texts = []
    for q, d in task.pairs:
        document = task.documents[d]
        if not isinstance(document, str):
            raise _needs_text(place(task.fields[1], d), model)
        texts.append(heads[q] + document)
    if task.truncate:
        bodies = model.tokenizer.encode_cut(texts, room)
    else:
        bodies = model.tokenizer.encode(texts)
        for (_, d), ids in zip(task.pairs, bodies, strict=True):
            hint = "with query and template; shorten it or set truncate to true"
            _check_length(place(task.fields[1], d), len(ids) + template.num_tokens, limit, hint)
    return Encoded([template.frame(ids) for ids in bodies])


def _heads(task: ScoreTask, model: ServedModel, room: int) -> list[str]:
    """Template and query as they stand before a document. A query that leaves it no room is an error."""
    heads = []
    for i, query in enumerate(task.queries):
        if not isinstance(query, str):
            raise _needs_text(place(task.fields[0], i), model)
        heads.append(reranker_head(query, task.instruction))
    for i, ids in enumerate(model.tokenizer.encode_cut(heads, room)):
        if len(ids) >= room:
            name = place(task.fields[0], i)
            text = f"{name} leaves no room for a document: with its instruction it may have {room - 1} tokens"
            raise InvalidRequest(text, param=name, code="context_length_exceeded")
    return heads


def _needs_text(name: str, model: ServedModel) -> InvalidRequest:
    text = f"{name} has token ids, which do not fit the template of {model.name!r}; send text, or pairs of joined ids"
    return InvalidRequest(text, param=name)


def _sequences(
    field: str, inputs: list[Text], prompt: str, truncate: bool, model: ServedModel, facts: ModelFacts
) -> list[list[int]]:
    """Framed sequences of texts; token ids as given."""
    limit = token_limit(model, facts)
    room = limit - model.tokenizer.single.num_tokens
    prompted: list[Text] = [prompt + text if isinstance(text, str) else text for text in inputs] if prompt else inputs
    bare = _bare(field, prompted, room if truncate else None, model, facts)
    sequences = []
    for i, (given, ids) in enumerate(zip(inputs, bare, strict=True)):
        sequence = model.tokenizer.frame(ids) if isinstance(given, str) else ids
        if len(sequence) > limit:
            if not truncate:
                _check_length(place(field, i), len(sequence), limit, "shorten it or set truncate to true")
            sequence = sequence[:limit]
        sequences.append(sequence)
    return sequences


def _bare(field: str, inputs: list[Text], cut: int | None, model: ServedModel, facts: ModelFacts) -> list[list[int]]:
    """Ids without special tokens: texts encoded (and cut to `cut` ids), token ids checked."""
    texts = [text for text in inputs if isinstance(text, str)]
    encoded = iter(model.tokenizer.encode(texts) if cut is None else model.tokenizer.encode_cut(texts, cut))
    result = []
    for i, given in enumerate(inputs):
        if isinstance(given, str):
            result.append(next(encoded))
        else:
            if max(given) >= facts.vocab_size:
                raise bad_id(place(field, i), given, facts)
            result.append(given)
    return result


def bad_id(name: str, ids: list[int], facts: ModelFacts) -> InvalidRequest:
    """What is wrong with `ids`, one of which is beyond the vocabulary."""
    at = next(i for i, token in enumerate(ids) if token >= facts.vocab_size)
    text = f"{name} has the token id {ids[at]} at place {at}; the model's vocabulary has {facts.vocab_size} tokens"
    return InvalidRequest(text, param=name, code="token_out_of_range")


def _check_length(name: str, num_tokens: int, limit: int, hint: str) -> None:
    if num_tokens > limit:
        text = f"{name} has {num_tokens} tokens, the model takes at most {limit}; {hint}"
        raise InvalidRequest(text, param=name, code="context_length_exceeded")
