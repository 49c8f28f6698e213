"""The result file of drafts on random weights, from what bench.micro.speculation_step left in a folder. Needs no GPU.

    python -m bench.micro.speculation_results DIR --shape llama-8b --hardware h200 [--commit C] [--note TEXT …]

Prints the rows of one acceptance and, of each proposer, the drafts that pay by batch size, as bench.micro.draft_lengths
finds them. What is missing in the folder is left out.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.micro.draft_lengths import ACCEPTANCES, DRAFTING, Found, itl_ms, lengths
from bench.report import RESULTS, Report, Row, compare, new_report, table_lines, write
from services.random_shapes import SHAPES

BYTES_PER_S = 4.3e12  # what an H200 reads
CONTEXT = 512
GOALS = {  # (shape, part, drafts): at one sequence and an acceptance of 0.8
    ("llama-8b", "mtp", 1): ">= 1.55x",
    ("llama-8b", "mtp", 3): ">= 2.05x",
    ("llama-8b", "draft", 4): ">= 1.8x",
    ("llama-70b", "mtp", 1): ">= 1.55x",
    ("llama-70b", "draft", 4): ">= 2.3x",
}
FLOOR_GOAL = ">= 0.74x"


def rows(found: Found) -> Iterator[Row]:
    yield from floors(found)
    yield from tokens(found)
    yield from keeping(found)
    yield from closing(found)
    yield from first_tokens(found)
    yield from memory(found)
    yield from over_http(found)


def floors(found: Found) -> Iterator[Row]:
    """A step without drafts against the time that reading weights, keys and values takes."""
    for record in found.records("none", "decode", in_flight=2):
        row = compare("step without drafts", f"{record['batch']} sequences", "step_ms", record["step_ms"],
                      floor_ms(found.shape, found.size, record["batch"]), "floor")  # fmt: skip
        has_goal = (found.shape, record["batch"]) == ("llama-70b", 1)
        yield msgspec.structs.replace(row, goal=FLOOR_GOAL) if has_goal else row


def tokens(found: Found) -> Iterator[Row]:
    """At every acceptance, from the time of a step at one: it takes as long at any."""
    for part in DRAFTING:
        for record in found.records(part, "decode", in_flight=2, acceptance=ACCEPTANCES[0]):
            plain = found.plain(record["batch"])
            if plain is None or not record["length"]:
                continue
            for acceptance in ACCEPTANCES:
                case = f"{record['batch']} x {part} k={record['length']} at {acceptance}"
                ours = itl_ms(record, acceptance)
                row = compare("time between tokens", case, "itl_ms", ours, itl_ms(plain), "none")
                telling = (record["batch"], acceptance) == (1, 0.8)
                goal = GOALS.get((found.shape, part, record["length"])) if telling else None
                yield msgspec.structs.replace(row, goal=goal)


def keeping(found: Found) -> Iterator[Row]:
    """Steps that draft nothing and keep the proposer's state, by a pass for keys and values alone."""
    for part in DRAFTING:
        for record in found.records(part, "decode", length=0, in_flight=2):
            if (plain := found.plain(record["batch"])) is not None:
                case = f"{record['batch']} x {part}"
                yield compare("state kept, no drafts", case, "step_ms", record["step_ms"], plain["step_ms"], "none")


def closing(found: Found) -> Iterator[Row]:
    """The head over all tokens of a step against over one a sequence, with what waiting for these costs where known."""
    for record in found.records("head", "head"):
        fields = {"batch": record["batch"], "length": record["length"], "acceptance": 0.8}
        waits = found.one("mtp", "decode", in_flight=1, **fields), found.one("mtp", "decode", in_flight=2, **fields)
        case, name, peer_us = f"{record['batch']} x k={record['length']}", "accepted alone, no wait", record["one_us"]
        if waits[0] is not None and waits[1] is not None:
            peer_us += (waits[0]["step_ms"] - waits[1]["step_ms"]) * 1e3
            name = "accepted alone, waiting"
        yield compare("pass that closes a step", case, "closing_us", record["all_us"], peer_us, name)


def first_tokens(found: Found) -> Iterator[Row]:
    for part in DRAFTING:
        for record in found.records(part, "first token"):
            plain = found.one("none", "first token", prompt=record["prompt"])
            if plain is not None:
                case = f"{record['prompt']} tokens, {part}"
                yield compare("time to first token", case, "ttft_ms", record["ttft_ms"], plain["ttft_ms"], "none")


def memory(found: Found) -> Iterator[Row]:
    """Keys and values of a token: the draft's, beside the model's own."""
    for part in DRAFTING:
        if (record := found.one(part, "memory")) is not None:
            own, its = float(record["kv_bytes"]), float(record["draft_kv_bytes"])
            yield Row("memory of a token", part, "kv_bytes", its, own, "the model's own", round(own / its, 3))


def over_http(found: Found) -> Iterator[Row]:
    for record in found.records("http", "http"):
        plain = found.one("http", "http", proposer="none", batch=record["batch"])
        if record["length"] and plain is not None:
            case = f"{record['batch']} x {record['proposer']} k={record['length']} at 1.0"
            yield compare("over HTTP", case, "itl_ms", record["itl_ms"], plain["itl_ms"], "none")
            yield compare("over HTTP", case, "ttft_ms", record["ttft_ms"], plain["ttft_ms"], "none")


def floor_ms(shape: str, size: int, batch: int) -> float:
    """Of one rank's weights but the embedding, and its keys and values behind CONTEXT tokens, bfloat16."""
    config = SHAPES[shape]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    layer = hidden * (2 * q + 2 * kv + 3 * inner)
    weights = config["num_hidden_layers"] * layer + config["vocab_size"] * hidden
    keys = batch * CONTEXT * 2 * kv * config["num_hidden_layers"]
    return 2 * (weights + keys) / size / BYTES_PER_S * 1e3


def report_of(found: Found, hardware: str, *, commit: str | None, date: str | None, notes: list[str]) -> Report:
    suffix = "" if found.size == 1 else f"-{found.size}gpus"
    report = new_report(f"speculation-{found.shape}{suffix}", hardware)
    report.commit, report.date = commit or report.commit, date or report.date
    report.command = f"python -m bench.micro.speculation_step PART --shape {found.shape} --size {found.size}"
    report.rows, tables = list(rows(found)), lengths(found, 0.8)
    report.notes = [
        "random weights that always say one token, greedy; drafts right with the chance behind `at`, by a table that "
        "replaces what a real proposer drafted at its own cost; two steps in flight; itl_ms: median time of a step by "
        "the tokens it gives at this acceptance ((1 - a^(k+1)) / (1 - a)); details have what was drawn and timed",
        *(f"draft_lengths of {part} at 0.8: {[list(pair) for pair in table]}" for part, table in tables.items()),
        *notes,
    ]
    report.details = {"shape": found.shape, "size": found.size, "records": found.all}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--commit")
    parser.add_argument("--date")
    parser.add_argument("--note", action="append", default=[])
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = Found.of_folder(args.directory, args.shape)
    report = report_of(found, args.hardware, commit=args.commit, date=args.date, notes=args.note)
    short = [row for row in report.rows if row.table != "time between tokens" or row.case.endswith("at 0.8")]
    print("\n".join(table_lines(short)) if short else "nothing was measured")
    print("\n".join(note for note in report.notes if note.startswith("draft_lengths")))
    print(write(report, args.results))


if __name__ == "__main__":
    main()
