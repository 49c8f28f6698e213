"""What drafts are worth: generated tokens a second with a proposer and without, planner and rank in one process.

    python -m bench.micro.speculation --model DIR [--proposer n_gram] [--draft-tokens 2 3 4] [--in-flight 1 8]

Prompts are passages behind the request to repeat them in short, as chat: outputs that take up their prompt's words, the
case that n-grams are for. Greedy; settings take turns, figures are medians over the repeats. Prints a table.
"""

import argparse
import random
import select
import statistics
import time
from collections import deque
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bench.token_inputs import read_passages
from ipc.step import StepPlan, StepResult
from ipc.step_ring import generate_layout, local_slots
from ipc.submit import Submit
from ipc.types import SamplingParams
from rose.config import RankConfig, SpeculationConfig
from rose.decoder_loader import DecoderLoader
from rose.model_runner import ModelRunner
from rose.runner import LazyTensor
from scheduler.config import SchedulerConfig
from scheduler.llm.figures import Figures
from scheduler.llm.planner import GeneratePlanner
from scheduler.quarantine import Quarantine
from scheduler.request import Request
from scheduler.stats import Stats

CHAT = "<|im_start|>user\nSummarise in the words of the text:\n{}<|im_end|>\n<|im_start|>assistant\n"
Measured = tuple[float, float]  # tokens/s, mean accepted length


def load(directory: Path, speculation: SpeculationConfig, num_threads: int | None) -> ModelRunner:
    runner = ModelRunner(
        DecoderLoader("bench", directory, RankConfig(num_threads=num_threads, speculation=speculation))
    )
    runner.load()
    return runner


def make_prompts(directory: Path, count: int, length: int) -> list[list[int]]:
    """Each with `length` tokens of the passages, one after another."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(random.Random(1).sample(read_passages(None), 400))).ids
    texts = [tokenizer.decode(ids[begin : begin + length]) for begin in range(0, count * length, length)]
    return [tokenizer.encode(CHAT.format(text)).ids for text in texts]


def run(runner: ModelRunner, prompts: list[list[int]], num_tokens: int) -> Measured:
    """All at once, from the first step to the last; nothing is in the prefix cache before."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    figures, took = generate(runner, prompts, params)
    length = 1 + figures.num_accepted_tokens / figures.num_drafts if figures.num_drafts else 1.0
    return figures.num_generated_tokens / took, length


def generate(runner: ModelRunner, prompts: list[list[int]], params: SamplingParams) -> tuple[Figures, float]:
    """The scheduler's figures of these prompts alone, and seconds from the first step to the last."""
    runner.attach(None)
    stats = Stats("bench/0")
    planner = GeneratePlanner(runner.facts, SchedulerConfig(), stats, Quarantine(1000))
    slots = local_slots(generate_layout(runner.facts))
    free, flying = deque(range(len(slots))), deque[tuple[StepPlan, LazyTensor]]()
    for chunk_id, prompt in enumerate(prompts):
        submit = Submit(1, 1, chunk_id, [len(prompt)], 10**9, sampling=params)
        planner.add(Request.from_submit(submit, np.asarray(prompt, np.int32).tobytes(), 1.0), 1.0)
    began = time.perf_counter()
    while flying or stats.pending_requests:
        while (plan := planner.plan(1.0, free[0], slots[free[0]])[0]) is not None:
            flying.append((plan, runner.step(plan, slots[free.popleft()])))
        plan, lazy = flying.popleft()
        while not lazy.ready():
            select.select([lazy.fileno()], [], [], 1.0)
        planner.apply(StepResult(0, plan.step), slots[plan.slot], 1.0)
        free.append(plan.slot)
    took = time.perf_counter() - began
    assert stats.generation is not None
    return stats.generation, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of a chat model")
    parser.add_argument("--proposer", default="n_gram", choices=["n_gram", "draft_model", "mtp"])
    parser.add_argument("--draft-model", help="directory, for those that have one")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-threads", type=int)
    given = parser.parse_args()
    settings = {"none": SpeculationConfig()} | {
        f"{given.proposer} {k}": SpeculationConfig(proposer=given.proposer, num_draft_tokens=k, model=given.draft_model)
        for k in given.draft_tokens
    }
    runners = {name: load(given.model, each, given.num_threads) for name, each in settings.items()}
    print("in flight  drafts           tokens/s  accepted length  of none")
    for in_flight in given.in_flight:
        found: dict[str, list[Measured]] = {name: [] for name in runners}
        for _ in range(given.repeats):
            for name, runner in runners.items():
                for prompt in batches(make_prompts(given.model, max(in_flight, 4), given.prompt_tokens), in_flight):
                    found[name].append(run(runner, prompt, given.tokens))
        medians = {
            name: [statistics.median(column) for column in zip(*each, strict=True)] for name, each in found.items()
        }
        for name, (speed, length) in medians.items():
            print(f"{in_flight:9}  {name:15}  {speed:8.1f}  {length:15.2f}  {speed / medians['none'][0]:7.2f}")
    for runner in runners.values():
        runner.close()


def batches(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    return [prompts[begin : begin + size] for begin in range(0, len(prompts), size)]


if __name__ == "__main__":
    main()
