"""Chooses the demo's passages from a larger passages file; the same input gives the same bytes.

python bench/demo_data/select.py PASSAGES.jsonl.gz passages.jsonl.gz
"""

import gzip
import json
import re
import sys
from pathlib import Path

NUM_PASSAGES = 1000
MIN_WORDS, MAX_WORDS = 50, 160
# exercises addressed to the reader, and security advisories, which all resemble each other
UNWANTED = re.compile(
    r"situation|test the ability|asked me to|could you please|the answer to the question|background"
    r"|question:|article:|paragraph:|hypothetical|vulnerab|CVE-|attack|exploit|malicious|affected versions"
    r"|TensorFlow is an|before version|before \d+\.\d",
    re.IGNORECASE,
)


def wanted(row: dict[str, str]) -> bool:
    """English prose of the right length; the source is already shuffled, so the first that pass are a sample."""
    is_passage = row["id"].startswith("p-en-")
    return is_passage and MIN_WORDS <= len(row["text"].split()) <= MAX_WORDS and not UNWANTED.search(row["text"])


def main(source: str, target: str) -> None:
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if wanted(row)][:NUM_PASSAGES]
    if len(rows) < NUM_PASSAGES:
        sys.exit(f"{source} holds only {len(rows)} passages that qualify, {NUM_PASSAGES} are needed")
    text = "".join(json.dumps({"id": row["id"], "text": row["text"]}, ensure_ascii=False) + "\n" for row in rows)
    Path(target).write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
