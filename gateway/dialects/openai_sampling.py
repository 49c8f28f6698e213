"""What completions and chat have in common: the fields that say how tokens are picked, and how an answer ends."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from gateway.dialects.fields import TokenId
from gateway.dialects.openai_structure import StructureBody
from gateway.errors import InvalidRequest
from gateway.generation_defaults import WITH_DEFAULTS
from gateway.tasks import Usage
from ipc.types import SamplingParams

MAX_STOP_CHARS = 256
MAX_STOP_IDS = 112  # ranks mask 128 ends of a text until min_tokens are there, the model's own among them
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NotNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Label = Annotated[str, Meta(max_length=512)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class SamplingBody(StructureBody, kw_only=True):
    """None is the same as not given, everywhere."""

    model: str
    n: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: NotNegative | None = None
    max_tokens: NotNegative | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    # taken, and of no effect
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None  # false
    service_tier: str | None = None  # auto or default


def read_sampling(fields: SamplingBody, logprobs: int | None, prompt_logprobs: int | None = None) -> SamplingParams:
    """All but max_tokens, the grammar and the choices' own seeds. Raises InvalidRequest."""
    _check_effects(fields)
    top_k = fields.top_k or 0
    return SamplingParams(
        min_tokens=fields.min_tokens or 0,
        temperature=_or(fields.temperature, 1.0),
        top_p=_or(fields.top_p, 1.0),
        top_k=max(top_k, 0),
        min_p=fields.min_p or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        logit_bias=fields.logit_bias or {},
        seed=fields.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
    )


def _check_effects(fields: SamplingBody) -> None:
    """Raises InvalidRequest for a value that would have to have an effect, of a field that has none."""
    if fields.store:
        raise InvalidRequest("store may only be false: no answer is kept here", param="store", code="unsupported")
    if fields.service_tier not in (None, "auto", "default"):
        text = f"service_tier is {fields.service_tier[:50]!r}; it may be auto or default"
        raise InvalidRequest(text, param="service_tier")


def read_left_open(fields: SamplingBody) -> frozenset[str]:
    return frozenset(name for name in WITH_DEFAULTS if getattr(fields, name) is None)


def read_stop(fields: SamplingBody) -> list[str]:
    """Raises InvalidRequest."""
    if fields.stop is None:
        return []
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    for i, stop in enumerate(stops):
        name = "stop" if isinstance(fields.stop, str) else f"stop[{i}]"
        if not stop or len(stop) > MAX_STOP_CHARS:
            text = f"{name} has {len(stop)} characters; a stop string may have 1 to {MAX_STOP_CHARS}"
            raise InvalidRequest(text, param=name)
    return stops


def read_include_usage(fields: SamplingBody) -> bool:
    """Raises InvalidRequest for options of a stream where there is none."""
    if fields.stream_options is None:
        return False
    if not fields.stream:
        raise InvalidRequest("stream_options goes with stream only; leave it out", param="stream_options")
    return bool(fields.stream_options.include_usage)


def usage_object(usage: Usage) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
    if usage.num_draft_tokens:
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": usage.num_accepted_tokens,
            "rejected_prediction_tokens": usage.num_draft_tokens - usage.num_accepted_tokens,
        }
    return found


def _or(value: float | None, usual: float) -> float:
    return usual if value is None else value
