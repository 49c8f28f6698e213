"""A CPU needs no Triton, which only GPU installs have: in a process where it cannot be found, whatever runs on a CPU is
imported, and models load and take their first steps with every proposer."""

from pathlib import Path

import pytest

from tests.rose.speculation.heads_random import write_random_head
from tests.rose.tiny_lm import write_qwen3
from tests.test_house_style import modules, run_python

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "flashinfer"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""
IMPORT = """
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_every_process_can_be_imported() -> None:
    run_python(BLOCKED + IMPORT, *modules("ipc", "gateway", "scheduler", "services"), "rose.worker", "rose.offline")


def test_what_is_blocked_is_missed() -> None:
    with pytest.raises(AssertionError, match="No module named 'triton'"):
        run_python(BLOCKED + IMPORT, "rose.cuda_decoder")


def test_models_load_and_take_their_first_steps(tmp_path: Path) -> None:
    """With all that the warm-up has: prompts, decode and verify rows, a grammar; and pooled states of an encoder."""
    model = write_qwen3(tmp_path / "model", tokenizer=True)
    head = write_random_head(tmp_path / "head", model, "mtp")
    code = """
from pathlib import Path
from rose.config import RankConfig, SpeculationConfig
from rose.runners import make_runner
model, head = map(Path, sys.argv[1:])
limits = dict(device="cpu", num_threads=1, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
for proposer in (
    SpeculationConfig(),
    SpeculationConfig(proposer="n_gram", num_draft_tokens=2),
    SpeculationConfig(proposer="draft_model", num_layers=1, num_draft_tokens=2),
    SpeculationConfig(proposer="mtp", model=str(head), num_draft_tokens=2),
):
    config = RankConfig(kv_cache_bytes=1 << 20, speculation=proposer, task="generate", **limits)
    runner = make_runner("tiny", model, config)
    runner.load()
    runner.close()
    print(proposer.proposer)
runner = make_runner("tiny", model, RankConfig(task="embed", **limits))
print(runner.load().dimension)
runner.close()
assert "triton" not in sys.modules
"""
    assert run_python(BLOCKED + code, str(model), str(head)).split() == ["none", "n_gram", "draft_model", "mtp", "64"]
