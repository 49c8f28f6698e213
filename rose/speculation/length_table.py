"""Drafts by the number of sequences in a step, as measured: a table a proposer and kind of device.

Written by `python -m bench.micro.draft_lengths RESULT.json --write`. Each pair: most sequences of the step, drafts.
"""

from collections.abc import Mapping

Tables = Mapping[tuple[str, str], tuple[tuple[int, int], ...]]

MEASURED: Tables = {
    # 2026-11-30_h200_speculation, acceptance 0.8
    ("mtp", "cuda"): ((64, 3),),
    ("draft_model", "cuda"): ((16, 4), (64, 2)),
}
