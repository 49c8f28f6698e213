"""What drafts are worth at a given acceptance: time between tokens with a proposer and without, on random weights.

    python -m bench.micro.speculation_step PART --shape llama-8b [--size 2] --out DIR [--budget-s 60]

Parts: none (what the others are compared with), mtp, eagle (heads of one layer), leader (mtp, its head on the leader
alone), draft (llama-1b, for any shape but tiny), vocab and draft-vocab (mtp's and its drafts from the first DRAFT_VOCAB
tokens alone), head (the pass that closes a step, alone), http.
The model always says one token, drafts are right with a chance (bench.steered_drafts); planner and ranks are real, two
steps in flight, prompts of random ids, CONTEXT tokens known in the middle of what is timed. Writes
DIR/speculation_<shape>_<part>.json as it goes; bench.micro.speculation_results makes the result file.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from bench.decode_loop import NUM_WINDOWS, WARM_STEPS, DecodeLoop, random_prompts
from bench.micro import speculation_head, speculation_http
from bench.micro.draft_lengths import ACCEPTANCES
from bench.ranks import Ranks, RankSpec, ranks
from bench.stack import end_in_order_when_told
from rose.config import RankConfig, SpeculationConfig
from rose.kv_cache import BLOCK_SIZE, KVShape
from rose.models.config import read_config
from services.sources import resolve_source

SAYS = 100
CONTEXT = 512
PROMPTS = (512, 2048)  # tokens, of times to the first token
NUM_PROMPTS = 5
STEPS = {1: 50, 4: 30, 16: 24, 64: 16, 32: 16}  # of a window, by sequences
PARTS = ("none", "mtp", "leader", "draft", "draft-vocab", "vocab", "eagle", "head", "http")
LENGTHS = {"mtp": (1, 3, 2), "leader": (1, 3), "vocab": (3, 1), "eagle": (3,), "draft": (4, 2), "draft-vocab": (4,)}
DRAFT_VOCAB = 32_768
MOST_SEQS = max(STEPS)

Record = dict[str, Any]


class Options(Struct, frozen=True):
    shape: str
    part: str
    size: int
    out: Path
    cache: Path
    device: str
    quick: bool  # shows that all works; figures mean nothing


class Case(Struct, frozen=True):
    batch: int
    length: int
    acceptance: float
    num_in_flight: int = 2


def cases(part: str, *, quick: bool) -> list[Case]:
    """The most telling first. Without drafts nothing depends on the acceptance; with a proposer these steps say what it
    costs to keep its state."""
    batches, lengths = (1, 4) if quick else tuple(STEPS), LENGTHS.get(part, ())
    if not lengths:
        return [Case(batch, 0, 1.0) for batch in batches] + [Case(1, 0, 1.0, num_in_flight=1)]
    chance = ACCEPTANCES[0]
    found = [Case(batch, length, chance) for batch in batches for length in lengths]
    found += [Case(batch, 0, 1.0) for batch in batches]
    if part == "mtp":  # the host waits for each step before it plans the next
        waiting = batches[:1] if quick else (1, 16)
        found += [Case(batch, length, chance, num_in_flight=1) for batch in waiting for length in lengths]
    return found + [Case(1, lengths[0], other) for other in ACCEPTANCES[1:]]  # a step takes as long at any


def speculation(options: Options) -> SpeculationConfig:
    """Of the part. Files are written where they are missing."""
    head = f"random:{options.shape}?head=mtp&says={SAYS}"
    draft = f"random:{'tiny' if options.shape == 'tiny' else 'llama-1b'}?seed=1&says={SAYS}"
    sources = {
        "mtp": head,
        "leader": head,
        "vocab": head,
        "eagle": f"random:{options.shape}?head=eagle&says={SAYS}",
        "draft": draft,
        "draft-vocab": draft,
    }
    if options.part not in sources:
        return SpeculationConfig()
    return SpeculationConfig(
        proposer="draft_model" if sources[options.part] == draft else "mtp",
        num_draft_tokens=max(LENGTHS[options.part]),
        draft_lengths=[],
        model=str(resolve_source(sources[options.part], options.cache)),
        draft_vocab=(256 if options.shape == "tiny" else DRAFT_VOCAB) if options.part.endswith("vocab") else None,
        head_ranks="leader" if options.part == "leader" else "all",
    )


def rank_spec(options: Options) -> RankSpec:
    drafts = speculation(options)
    config = RankConfig(
        device=options.device,
        num_threads=1 if options.device == "cpu" else None,
        max_num_seqs=4 if options.quick else MOST_SEQS,
        max_model_len=max(PROMPTS) + CONTEXT,
        capture="lazy",
        speculation=drafts,
    )
    num_drafts = 0 if drafts.proposer == "none" else drafts.num_draft_tokens
    return RankSpec(target(options), config, SAYS, num_drafts, options.size)


def target(options: Options) -> Path:
    return resolve_source(f"random:{options.shape}?says={SAYS}", options.cache)


def measure(options: Options, save: Callable[[Record], None], left: Callable[[], float]) -> None:
    """Everything of one part that there is time for."""
    began = time.perf_counter()
    spec = rank_spec(options)
    with ranks(spec) as model:
        save({"what": "load", "seconds": time.perf_counter() - began, "num_blocks": model.facts.num_blocks})
        save({"what": "memory"} | kv_bytes(options, spec))
        for length in PROMPTS[:1] if options.quick else PROMPTS:
            save({"what": "first token", "prompt": length, "ttft_ms": first_token_ms(model, length)})
        for case in cases(options.part, quick=options.quick):
            if left() <= 0:
                save({"what": "left out", "case": str(case)})
                continue
            save({"what": "decode"} | decode(model, case, quick=options.quick))
        save({"what": "figures"} | model.figures())


def decode(model: Ranks, case: Case, *, quick: bool) -> Record:
    num_steps = 3 if quick else STEPS[case.batch]
    mixed = -(
        -case.batch * CONTEXT // model.facts.max_num_batched_tokens
    )  # steps with prompts; others decode meanwhile
    most = (WARM_STEPS + NUM_WINDOWS * num_steps + 4) * (case.length + 1) + 4 * mixed
    expected = sum(case.acceptance**place for place in range(case.length + 1))
    middle = (WARM_STEPS + NUM_WINDOWS * num_steps / 2) * expected
    prompts = random_prompts(case.batch, max(16, CONTEXT - int(middle)), model.facts.vocab_size, seed=case.batch)
    model.accept(case.acceptance)
    loop = DecodeLoop(
        model, prompts, max_tokens=most, draft_length=case.length, num_in_flight=case.num_in_flight
    )  # fmt: skip
    try:
        found = loop.decode(num_steps)
    finally:
        loop.close()
    record = {
        "batch": case.batch,
        "length": case.length,
        "acceptance": case.acceptance,
        "in_flight": case.num_in_flight,
    }
    return record | {name: getattr(found, name) for name in found.__struct_fields__} | {"expected_length": expected}


def first_token_ms(model: Ranks, length: int) -> float:
    """Median over prompts, one after another, from the planner's first plan to the token on the host."""
    times = []
    for seed in range(NUM_PROMPTS + 1):
        loop = DecodeLoop(model, random_prompts(1, length, model.facts.vocab_size, 1000 + seed), max_tokens=2)
        times.append(loop.first_token_ms())
        loop.close()
    return statistics.median(times[1:])


def kv_bytes(options: Options, spec: RankSpec) -> Record:
    """Of a token, on all ranks together, as the cache is laid out."""
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    found = {"kv_bytes": KVShape.of(read_config(spec.directory), dtype).block_bytes // BLOCK_SIZE}
    if spec.config.speculation.model is not None:
        draft = KVShape.of(read_config(Path(spec.config.speculation.model)), dtype)
        found["draft_kv_bytes"] = draft.block_bytes // BLOCK_SIZE
    return found


def saved(options: Options) -> Iterator[Record]:
    """Takes records by `send`, and writes the file anew after each."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"speculation_{options.shape}_{options.part}.json"
    document = {"shape": options.shape, "part": options.part, "size": options.size}
    records: list[Record] = []
    while True:
        record = yield {}
        records.append(record)
        path.write_text(json.dumps(document | {"records": records}, indent=1))
        print(line(options, record), flush=True)


def line(options: Options, record: Record) -> str:
    head = f"{options.shape} x{options.size} {options.part:5s} {record['what']:11s}"
    shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in record.items()}
    return f"{head} " + "  ".join(f"{name} {value}" for name, value in shown.items() if name != "what")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--size", type=int, default=1, help="ranks, each with a GPU of its own")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="where the models' files go; default: OUT/models")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget-s", type=float, default=120.0, help="what has not begun by then is left out")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    end_in_order_when_told()
    began = time.perf_counter()
    cache = args.cache or args.out / "models"
    options = Options(args.shape, args.part, args.size, args.out, cache, args.device, args.quick)
    keep = saved(options)
    next(keep)

    def left() -> float:
        return args.budget_s - (time.perf_counter() - began)

    if args.part == "http":
        speculation_http.measure(options, keep.send, left)
    elif args.part == "head":
        speculation_head.measure(options, keep.send, left)
    else:
        measure(options, keep.send, left)
    print(f"{args.part}: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
