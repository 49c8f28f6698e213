"""How many tokens a step gives with n-gram drafts, by Spec-Bench's categories, on a chat model.

    python -m bench.micro.speculation_categories --questions question.jsonl --model DIR [--prompts 10]

Questions are Spec-Bench's (Xia et al. 2024, github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl), the first
turn of each as chat, spread evenly over a category; its eight of MT-Bench are one here. Greedy, up to --tokens tokens.
Nothing is timed: what is counted does not depend on the machine. Writes a result file.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.micro.speculation import generate, load
from bench.report import RESULTS, Report, Row, new_report, table_lines, write
from ipc.types import SamplingParams
from rose.config import SpeculationConfig
from rose.model_runner import ModelRunner
from scheduler.llm.figures import Figures

CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
IN_FLIGHT = 4
MOST_PROMPT_TOKENS = 1800  # longer ones are passed over: what the model was trained for ends at 2048


class Counted:
    """Figures of all prompts of one category."""

    def __init__(self) -> None:
        self.num_prompts = self.num_tokens = self.num_drafts = self.num_draft_tokens = self.num_accepted = 0

    def add(self, num_prompts: int, figures: Figures) -> None:
        self.num_prompts += num_prompts
        self.num_tokens += figures.num_generated_tokens
        self.num_drafts += figures.num_drafts
        self.num_draft_tokens += figures.num_draft_tokens
        self.num_accepted += figures.num_accepted_tokens

    def figures(self) -> dict[str, float]:
        num_steps = self.num_tokens - self.num_accepted  # each gives one token more than it accepts
        return {
            "tokens_per_step": self.num_tokens / num_steps,
            "accepted_length": 1 + self.num_accepted / max(1, self.num_drafts),
            "steps_with_drafts": self.num_drafts / num_steps,
            "accepted_share": self.num_accepted / max(1, self.num_draft_tokens),
        }


def read_questions(path: Path) -> dict[str, list[str]]:
    """First turns, by category in the file's order."""
    found: dict[str, list[str]] = defaultdict(list)
    for text in path.read_text(encoding="utf-8").splitlines():
        question: dict[str, Any] = json.loads(text)
        category = "mt_bench" if question["category"] in MT_BENCH else question["category"]
        found[category].append(question["turns"][0])
    return dict(found)


def choose(prompts: list[list[int]], count: int) -> list[list[int]]:
    """Evenly over all that are short enough."""
    fitting = [prompt for prompt in prompts if len(prompt) <= MOST_PROMPT_TOKENS]
    return [fitting[index * len(fitting) // count] for index in range(min(count, len(fitting)))]


def count_category(runner: ModelRunner, prompts: list[list[int]], num_tokens: int) -> Counted:
    counted, params = Counted(), SamplingParams(temperature=0.0, max_tokens=num_tokens)
    for begin in range(0, len(prompts), IN_FLIGHT):
        group = prompts[begin : begin + IN_FLIGHT]
        counted.add(len(group), generate(runner, group, params)[0])
    return counted


def fill(report: Report, categories: dict[str, Counted]) -> None:
    report.rows = [
        Row(category, f"{counted.num_prompts} prompts, {counted.num_tokens} tokens", metric, round(value, 3))
        for category, counted in categories.items()
        for metric, value in counted.figures().items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="directory of a chat model of the ChatML form")
    parser.add_argument("--prompts", type=int, default=10, help="of each category")
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    drafts = SpeculationConfig(proposer="n_gram", num_draft_tokens=args.draft_tokens)
    runner, report = load(args.model, drafts, args.num_threads), new_report("speculation-n-gram", "cpu")
    report.notes = [
        f"Spec-Bench questions, first turn, greedy, up to {args.tokens} tokens, n-gram drafts of {args.draft_tokens}; "
        "tokens_per_step counts every step, accepted_length those with drafts",
    ]
    categories: dict[str, Counted] = {}
    for category, questions in read_questions(args.questions).items():
        prompts = [tokenizer.encode(CHAT.format(text)).ids for text in questions]
        categories[category] = count_category(runner, choose(prompts, args.prompts), args.tokens)
        fill(report, categories)
        path = write(report, args.results)
        print(category, {name: round(value, 3) for name, value in categories[category].figures().items()}, flush=True)
    runner.close()
    print("\n".join(table_lines(report.rows)))
    print(path)


if __name__ == "__main__":
    main()
