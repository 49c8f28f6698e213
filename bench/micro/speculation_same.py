"""Greedy tokens with each proposer against those without, on random weights of a whole model; near ties are told apart.

    python -m bench.micro.speculation_same --shape llama-8b [--dtype float32] [--size 1] [--only CASE] --out DIR

Sequences of several lengths decode side by side, by the real planner and ranks (bench.decode_loop), two steps in
flight, each a graph. Where a sequence differs, the margin between its two likeliest tokens says
whether that was a tie: rounding differs with the number of rows that a product has. Writes
DIR/speculation_same_<shape>_<dtype>.json. Exit code: 0 if all that differs are near ties.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from bench.decode_loop import DecodeLoop, random_prompts
from bench.ranks import RankSpec, ranks
from bench.stack import end_in_order_when_told
from rose.config import RankConfig, SpeculationConfig
from rose.models.config import read_config
from services.sources import resolve_source

# What rounding can turn, of logits that are some units apart; bfloat16's lie 0.125 apart between 16 and 32.
NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.26}
LENGTHS = (3, 17, 130, 200, 64, 5, 33, 90)  # of prompts
NUM_TOKENS = 64
MAX_MODEL_LEN = 512


class Said(Struct, frozen=True):
    """One sequence's tokens, and how much likelier each was than the next likeliest."""

    tokens: list[int]
    margins: list[float]


def proposers(shape: str, cache: Path) -> list[tuple[str, SpeculationConfig]]:
    def source(name: str) -> str:
        return str(resolve_source(f"random:{name}", cache))

    def drafts(proposer: str, length: int, **more: Any) -> SpeculationConfig:
        return SpeculationConfig(proposer=proposer, num_draft_tokens=length, draft_lengths=[], **more)  # type: ignore[arg-type]

    num_layers = read_config(Path(source(shape))).num_hidden_layers
    return [
        ("n_gram k=3", drafts("n_gram", 3)),
        ("first layers k=4", drafts("draft_model", 4, num_layers=num_layers - 1)),
        ("mtp k=1", drafts("mtp", 1, model=source(f"{shape}?head=mtp"))),
        ("mtp k=3", drafts("mtp", 3, model=source(f"{shape}?head=mtp"))),
        ("eagle k=2", drafts("mtp", 2, model=source(f"{shape}?head=eagle"))),
        ("another model k=4", drafts("draft_model", 4, model=source("tiny" if shape == "tiny" else "llama-1b"))),
    ]


def say(spec: RankSpec, length: int) -> tuple[list[Said], float]:
    """Of every sequence, and how many tokens a step with drafts gave."""
    _free()
    with ranks(spec) as model:
        prompts = [random_prompts(1, n, model.facts.vocab_size, n)[0] for n in LENGTHS]
        prompts[2][65:] = prompts[2][:65]  # something to look up
        loop = DecodeLoop(model, prompts, max_tokens=NUM_TOKENS, draft_length=length, num_logprobs=2)
        loop.to_end()
        loop.close()
    found = []
    for deltas in (loop.said[index] for index in range(len(prompts))):
        tops = [sorted((value for _, value in top), reverse=True)[:2] for delta in deltas for top in delta.top_logprobs]
        found.append(Said([t for delta in deltas for t in delta.tokens], [first - second for first, second in tops]))
    drafted, accepted = loop.drafts()
    return found, 1 + accepted / drafted if drafted else 1.0


def _free() -> None:
    """The memory of the model before: parts of it refer to each other, and two do not fit."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def differences(expected: list[Said], found: list[Said]) -> list[float]:
    """The margin where a sequence first differs, of each that does."""
    margins = []
    for ours, theirs in zip(found, expected, strict=True):
        pairs = zip(ours.tokens, theirs.tokens, strict=True)
        first = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            margins.append(theirs.margins[first])
    return margins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=sorted(NEAR_TIE))
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="where the models' files go; default: OUT/models")
    parser.add_argument("--budget-s", type=float, default=120.0, help="what has not begun by then is left out")
    args = parser.parse_args()
    end_in_order_when_told()
    began = time.perf_counter()
    cache, records, bad = args.cache or args.out / "models", [], 0
    args.out.mkdir(parents=True, exist_ok=True)
    directory = resolve_source(f"random:{args.shape}", cache)
    base = RankConfig(
        device=args.device, dtype=args.dtype, max_num_seqs=len(LENGTHS), max_model_len=MAX_MODEL_LEN, capture="lazy"
    )

    def spec(drafts: SpeculationConfig) -> RankSpec:
        return RankSpec(directory, replace(base, speculation=drafts), size=args.size)

    expected, _ = say(spec(SpeculationConfig()), 0)
    for name, drafts in (found for found in proposers(args.shape, cache) if args.only in found[0]):
        if time.perf_counter() - began > args.budget_s:
            print(f"{name}: left out, no time")
            continue
        found, length = say(spec(drafts), drafts.num_draft_tokens)
        margins = differences(expected, found)
        ties = sum(margin < NEAR_TIE[args.dtype] for margin in margins)
        bad += len(margins) - ties
        record = {"case": name, "sequences": len(found), "differ": len(margins), "near_ties": ties}
        records.append(record | {"margins": margins, "accepted_length": length})
        print(f"{args.dtype} {line(records[-1])}", flush=True)
        path = args.out / f"speculation_same_{args.shape}_{args.dtype}.json"
        path.write_text(json.dumps({"shape": args.shape, "dtype": args.dtype, "records": records}, indent=1))
    sys.exit(1 if bad else 0)


def line(record: dict[str, Any]) -> str:
    others = record["differ"] - record["near_ties"]
    return (
        f"{record['case']:18s} {record['sequences'] - record['differ']} of {record['sequences']} sequences of "
        f"{NUM_TOKENS} tokens equal, {record['near_ties']} differ at near ties, {others} otherwise; "
        f"{record['accepted_length']:.2f} tokens a step; margins {[round(margin, 6) for margin in record['margins']]}"
    )


if __name__ == "__main__":
    main()
