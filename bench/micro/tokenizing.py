"""What encoding a text costs a gateway: by part, and by the library against known words, in a thread and on its loop.

    python -m bench.micro.tokenizing --tokenizer tokenizer.json --passages passages.jsonl.gz

Texts of 512 tokens from real passages, in several languages. Parts are processor time of one thread, from copies of
the tokenizer that do less and less; ways are time that passes, on a loop such as the gateway's, each text taken by
every way in random order. Writes a result file; its path is the last line.
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from tokenizers import Tokenizer

from bench import report
from bench.load import median
from bench.report import Row, compare
from bench.token_inputs import TokenInputs, read_passages
from gateway.tokenize import TextTokenizer

LENGTH = 512
PAUSE_S = 0.001  # before each text: threads sleep, as they do between requests
CROWD = 8
WARM_TEXTS = 1000
BEFORE, NOW = "library, thread", "known words, loop"
Way = Callable[[str], Awaitable[list[int]]]

WORDS = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
LESS: tuple[tuple[str, dict[str, Any]], ...] = (  # what goes, and what stands in its place
    ("BPE", {"model": WORDS, "added_tokens": []}),
    ("words by pattern, bytes as letters", {"pre_tokenizer": None}),
    ("NFC", {"normalizer": None}),
)


def parts_us(path: Path, texts: list[str]) -> dict[str, float]:
    """Microseconds a text by part, median; the last is what the library needs in any case."""
    content = json.loads(path.read_text())
    copies = {"all": Tokenizer.from_file(str(path))}
    for name, change in LESS:
        content |= change
        copies[name] = Tokenizer.from_str(json.dumps(content))
    found: dict[str, list[float]] = {name: [] for name in (*copies, "ids as a list")}
    for text in texts:
        for name in random.sample(list(copies), len(copies)):
            start = time.thread_time()
            (encoding,) = copies[name].encode_batch_fast([text], add_special_tokens=False)
            found[name].append((time.thread_time() - start) * 1e6)
            if name == "all":
                start = time.thread_time()
                _ = encoding.ids
                found["ids as a list"].append((time.thread_time() - start) * 1e6)
    took = {name: median(values) for name, values in found.items()}
    result = {later: took[earlier] - took[later] for earlier, later in pairwise(copies)}
    return result | {"the rest": took[LESS[-1][0]], "ids as a list": took["ids as a list"]}


async def ways_ms(ways: dict[str, Way], texts: list[str]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in ways}
    for text in texts:
        for name in random.sample(list(ways), len(ways)):
            await asyncio.sleep(PAUSE_S)
            start = time.perf_counter()
            await ways[name](text)
            found[name].append((time.perf_counter() - start) * 1000)
    return found


async def crowd(way: Way, texts: list[str]) -> tuple[float, float]:
    """Texts a second with CROWD of them asked for at any time; microseconds of processor time for each, all threads."""
    waiting = iter(texts)

    async def client() -> None:
        for text in waiting:
            await way(text)

    start, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client() for _ in range(CROWD)))
    return len(texts) / (time.perf_counter() - start), (time.process_time() - cpu) / len(texts) * 1e6


class Measured(NamedTuple):
    alone_ms: list[dict[str, float]]  # each repeat's median by way
    crowd_per_s: list[dict[str, float]]
    crowd_cpu_us: list[dict[str, float]]


async def measure(path: Path, warm: list[str], texts: list[list[str]], threads: int) -> Measured:
    """Every repeat has `texts` of its own; `warm` went before."""
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(threads)
    library, in_thread, on_loop = (TextTokenizer.from_file(path) for _ in range(3))
    library._known_words = None
    for text in warm:
        assert in_thread.encode([text]) == on_loop.encode([text]) == library.encode([text]), f"{text[:100]!r}"

    async def library_thread(text: str) -> list[int]:
        return (await loop.run_in_executor(pool, library.encode, [text]))[0]

    async def known_thread(text: str) -> list[int]:
        return (await loop.run_in_executor(pool, in_thread.encode, [text]))[0]

    async def known_loop(text: str) -> list[int]:
        return on_loop.encode([text])[0]

    ways: dict[str, Way] = {BEFORE: library_thread, "known words, thread": known_thread, NOW: known_loop}
    found = Measured([], [], [])
    for part in texts:
        taken = await ways_ms(ways, part[: len(part) // 2])
        found.alone_ms.append({name: median(values) for name, values in taken.items()})
        crowds = {name: await crowd(way, part[len(part) // 2 :]) for name, way in ways.items()}
        found.crowd_per_s.append({name: rate for name, (rate, _) in crowds.items()})
        found.crowd_cpu_us.append({name: cpu for name, (_, cpu) in crowds.items()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.micro.tokenizing", description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--passages", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2, help="gateway.num_tokenizer_threads")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hardware", default="cpu", help="short name of the machine, part of the file's name")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="where the files go")
    parser.add_argument("--note", action="append", default=[])
    args = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(args.threads)  # as the gateways have it
    random.seed(0)
    into = report.new_report("tokenizing", args.hardware)
    inputs = TokenInputs(Tokenizer.from_file(str(args.tokenizer)), read_passages(args.passages))
    warm = inputs.take_texts(LENGTH, WARM_TEXTS)
    texts = [inputs.take_texts(LENGTH, args.texts) for _ in range(args.repeats)]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parts = parts_us(args.tokenizer, texts[0])
    into.rows = [Row("one thread's processor time", name, "us", round(took, 1)) for name, took in parts.items()]
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    found = uvloop.run(measure(args.tokenizer, warm, texts, args.threads))
    for table, metric, runs in (
        ("alone", "p50_ms", found.alone_ms),
        (f"{CROWD} at once", "texts_per_s", found.crowd_per_s),
        (f"{CROWD} at once", "cpu_us", found.crowd_cpu_us),
    ):
        middle = {name: median([run[name] for run in runs]) for name in runs[0]}
        into.rows += [
            compare(table, way, metric, middle[way], middle[BEFORE], BEFORE) for way in middle if way != BEFORE
        ]
        into.details[metric] = {name: [round(run[name], 4) for run in runs] for name in middle}
    into.notes.append(
        f"texts of {LENGTH} tokens, {sum(map(len, texts[0])) / args.texts:,.0f} characters, none seen before; "
        f"{WARM_TEXTS} others were, and gave the same ids by every way; {args.threads} threads; medians over texts, "
        "then over repeats"
    )
    into.notes += args.note
    path = report.write(into, args.results)
    print("\n".join(report.table_lines(into.rows)))
    print(path)


if __name__ == "__main__":
    main()
