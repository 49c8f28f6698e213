"""What an encoder's request must be to enter the pool: everything that could hurt a step is checked again here.

The gateway has validated for the user's sake; this is for the neighbours' sake. Pure functions of request and facts.
"""

from itertools import accumulate

from ipc.sockets import MAX_MESSAGE_BYTES
from ipc.types import ModelFacts, OutputSpec
from scheduler.door import Invalid
from scheduler.request import Request


def admit(request: Request, facts: ModelFacts) -> None:
    """Opens `request`: offsets, costs and the size of its rows. Raises Invalid."""
    lengths = request.submit.lengths
    _check_lengths(lengths, facts)
    cu_seqlens = list(accumulate(lengths, initial=0))
    if len(request.frame) != 4 * cu_seqlens[-1]:
        raise Invalid(f"lengths add up to {cu_seqlens[-1]} tokens, the frame holds {len(request.frame) / 4:g}")
    _check_spec(request.submit.spec, facts)
    if request.submit.sampling is not None:
        raise Invalid(f"model {facts.name} does not generate: leave out the sampling parameters")
    if request.submit.type_starts:
        _check_type_starts(request.submit.type_starts, lengths)
    ids = request.input_ids
    if int(ids.min()) < 0 or int(ids.max()) >= facts.vocab_size:
        _raise_bad_id(request, cu_seqlens, facts.vocab_size)
    num_bytes = row_bytes(request.submit.spec, facts)
    if num_bytes * len(lengths) > MAX_MESSAGE_BYTES:
        raise Invalid(f"{len(lengths)} rows of {num_bytes} bytes do not fit one message: split the chunk")
    cu_cost = list(accumulate((n + n * n / facts.quadratic_tokens for n in lengths), initial=0.0))
    request.open(cu_seqlens, cu_cost, num_bytes)


def row_bytes(spec: OutputSpec, facts: ModelFacts) -> int:
    """Bytes of one output row; binary rows are bits, packed."""
    dimensions = spec.dimensions or facts.dimension
    return {"float32": 4 * dimensions, "int8": dimensions, "binary": -(-dimensions // 8)}[spec.dtype]


def max_row_tokens(facts: ModelFacts) -> int:
    """The longest sequence that fits the model and one step."""
    return min(facts.max_model_len, facts.max_num_batched_tokens)


def _check_lengths(lengths: list[int], facts: ModelFacts) -> None:
    limit = max_row_tokens(facts)
    if not lengths:
        raise Invalid("the chunk has no sequence")
    if min(lengths) < 1 or max(lengths) > limit:
        index = next(i for i, n in enumerate(lengths) if not 1 <= n <= limit)
        raise Invalid(f"sequence {index} has {lengths[index]} tokens; model {facts.name} takes 1 to {limit}", index)


def _check_spec(spec: OutputSpec, facts: ModelFacts) -> None:
    if spec.spans or spec.all_tokens:
        raise Invalid("one vector per sequence is all this scheduler plans: leave out spans and all_tokens")
    if spec.dimensions is not None and not 1 <= spec.dimensions <= facts.dimension:
        raise Invalid(f"dimensions is {spec.dimensions}; model {facts.name} gives 1 to {facts.dimension}")
    if facts.task == "score" and (spec.dtype != "float32" or spec.dimensions is not None):
        raise Invalid(f"model {facts.name} scores: its rows are float32 [{facts.dimension}], with no other output")


def _check_type_starts(type_starts: list[int], lengths: list[int]) -> None:
    if len(type_starts) != len(lengths):
        raise Invalid(f"{len(type_starts)} type_starts for {len(lengths)} sequences")
    for index, (start, length) in enumerate(zip(type_starts, lengths, strict=True)):
        if not 0 <= start <= length:
            raise Invalid(f"type_starts[{index}] is {start} in a sequence of {length} tokens", index)


def _raise_bad_id(request: Request, cu_seqlens: list[int], vocab_size: int) -> None:
    ids = request.input_ids
    position = int(((ids < 0) | (ids >= vocab_size)).argmax())
    index = next(i for i, end in enumerate(cu_seqlens[1:]) if position < end)
    raise Invalid(f"token id {ids[position]} in sequence {index} is outside the vocabulary of {vocab_size}", index)
