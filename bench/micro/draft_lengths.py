"""How many drafts pay at which number of sequences, from measured steps; the table that is the default on a GPU.

    python -m bench.micro.draft_lengths RESULT.json [--acceptance 0.8] [--write]

prints, for the proposers of a result file of bench.micro.speculation_results, what to set as `draft_lengths` where so
many drafts are right, and with --write makes it the default (rose/speculation/length_table.py). A pair [most sequences,
drafts] for every number of sequences that was measured, neighbours with the same drafts as one; what makes less than
MARGIN of a gain is not drafted. The last pair's number bounds what keeps the proposer's state. Needs no GPU.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.report import read

MARGIN = 1.03
DRAFTING = ("mtp", "leader", "vocab", "eagle", "draft", "draft-vocab")  # parts of the benchmark
PROPOSERS = {"mtp": "mtp", "draft": "draft_model"}  # whose tables are defaults
TABLE = Path(__file__).parent.parent.parent / "rose" / "speculation" / "length_table.py"

ACCEPTANCES = (0.8, 0.6, 0.9)  # that are told; steps are timed at the first
Record = dict[str, Any]
Table = list[tuple[int, int]]


class Found:
    """The records of every part, by part."""

    def __init__(self, shape: str, size: int, records: dict[str, list[Record]]) -> None:
        self.shape, self.size, self.all = shape, size, records

    @classmethod
    def of_folder(cls, directory: Path, shape: str) -> "Found":
        """What bench.micro.speculation_step left there."""
        size, records = 1, {}
        for path in sorted(directory.glob(f"speculation_{shape}_*.json")):
            document = json.loads(path.read_text())
            size, records[document["part"]] = document["size"], document["records"]
        return cls(shape, size, records)

    @classmethod
    def of_report(cls, path: Path) -> "Found":
        """What a result file was made of."""
        return cls(**read(path).details)

    def records(self, part: str, what: str, **fields: Any) -> list[Record]:
        found = (record for record in self.all.get(part, []) if record["what"] == what)
        return [record for record in found if all(record[name] == value for name, value in fields.items())]

    def one(self, part: str, what: str, **fields: Any) -> Record | None:
        return next(iter(self.records(part, what, **fields)), None)

    def plain(self, batch: int, in_flight: int = 2) -> Record | None:
        """Decoding without a proposer."""
        return self.one("none", "decode", batch=batch, in_flight=in_flight)


def itl_ms(record: Record, acceptance: float | None = None) -> float:
    """By the step's time, which knows nothing of luck, and what such a step gives at an acceptance; None: its own."""
    chance = record["acceptance"] if acceptance is None else acceptance
    return record["step_ms"] / sum(chance**place for place in range(record["length"] + 1))


def lengths(found: Found, acceptance: float) -> dict[str, Table]:
    """Of each part that drafts."""
    plain = {record["batch"]: itl_ms(record) for record in found.records("none", "decode", in_flight=2)}
    tables = {}
    for part in DRAFTING:
        records = [record for record in found.records(part, "decode", in_flight=2) if record["length"]]
        times = {(record["batch"], record["length"]): itl_ms(record, acceptance) for record in reversed(records)}
        if times:
            tables[part] = best_lengths(plain, times)
    return tables


def best_lengths(plain: Mapping[int, float], times: Mapping[tuple[int, int], float]) -> Table:
    """`plain`: time between tokens without drafts by number of sequences; `times`: with them, by that and drafts."""
    table: Table = []
    for batch in sorted({batch for batch, _ in times} & plain.keys()):
        candidates = {length: time for (size, length), time in times.items() if size == batch}
        best = min(candidates, key=lambda length: candidates[length])
        length = best if candidates[best] * MARGIN <= plain[batch] else 0
        if table and table[-1][1] == length:
            table.pop()
        table.append((batch, length))
    return table


def table_module(tables: Mapping[str, Table], source: str) -> str:
    """The text of rose/speculation/length_table.py."""
    beginning, _, _ = TABLE.read_text(encoding="utf-8").partition("MEASURED:")
    lines = [
        f'    ("{PROPOSERS[part]}", "cuda"): {tuple(table)!r},\n' for part, table in tables.items() if part in PROPOSERS
    ]
    return f"{beginning}MEASURED: Tables = {{\n    # {source}\n{''.join(lines)}}}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    tables = lengths(Found.of_report(args.result), args.acceptance)
    for part, table in tables.items():
        print(f"{part}: draft_lengths = {[list(pair) for pair in table]}")
    if args.write:
        TABLE.write_text(table_module(tables, f"{args.result.stem}, acceptance {args.acceptance}"), encoding="utf-8")
        print(TABLE)


if __name__ == "__main__":
    main()
