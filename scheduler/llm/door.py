"""What a generation must be to enter the pool: everything that could hurt a step is checked again here.

Token ids are not: one outside the vocabulary fails at the rank, alone. Pure functions of request and facts.
"""

from ipc.codec import encode
from ipc.step_ring import MIN_PARAMS_BYTES
from ipc.types import ModelFacts, OutputSpec, SamplingParams
from scheduler.door import Invalid
from scheduler.request import Request


def open_request(request: Request, facts: ModelFacts) -> None:
    """Opens `request` as one row. Raises Invalid."""
    submit = request.submit
    if len(submit.lengths) != 1:
        raise Invalid(f"a generation is one sequence; the chunk has {len(submit.lengths)}: send a chunk for each")
    num_prompt = submit.lengths[0]
    if len(request.frame) != 4 * num_prompt:
        raise Invalid(f"lengths say {num_prompt} tokens, the frame holds {len(request.frame) / 4:g}")
    if submit.sampling is None or submit.spec != OutputSpec() or submit.type_starts:
        raise Invalid(f"model {facts.name} generates: send sampling parameters, no output spec and no token types")
    if num_prompt < 1:
        raise Invalid("the prompt is empty: it must have a token at least")
    _check_lengths(num_prompt, submit.sampling, facts)
    _check_params(submit.sampling, facts)
    request.open([0, num_prompt], [0.0, float(num_prompt)], 0)


def _check_lengths(num_prompt: int, params: SamplingParams, facts: ModelFacts) -> None:
    if params.max_tokens < 1 or params.min_tokens > params.max_tokens:
        raise Invalid(f"max_tokens is {params.max_tokens}, min_tokens {params.min_tokens}: 1 ≤ max_tokens ≥ min_tokens")
    total = num_prompt + params.max_tokens
    if total > facts.max_model_len:
        raise Invalid(
            f"the prompt has {num_prompt} tokens and max_tokens is {params.max_tokens}: together {total}, "
            f"and model {facts.name} takes {facts.max_model_len}"
        )
    num_blocks = -(-total // facts.block_size)
    if num_blocks > facts.num_blocks:
        raise Invalid(
            f"{num_prompt} prompt tokens and max_tokens {params.max_tokens} need {num_blocks} blocks of "
            f"{facts.block_size} tokens; the ranks' memory has {facts.num_blocks}"
        )


def _check_params(params: SamplingParams, facts: ModelFacts) -> None:
    num_bytes = len(encode(params))
    if num_bytes > MIN_PARAMS_BYTES:
        raise Invalid(
            f"the sampling parameters take {num_bytes} bytes, at most {MIN_PARAMS_BYTES}: shorten the grammar"
        )
    for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if asked is not None and asked > facts.max_logprobs:
            raise Invalid(f"{name} is {asked}; model {facts.name} gives {facts.max_logprobs} at most")
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        worst = max(ids, default=0)
        if worst >= facts.vocab_size:
            raise Invalid(f"{name} names token {worst}, outside the vocabulary of {facts.vocab_size}")
