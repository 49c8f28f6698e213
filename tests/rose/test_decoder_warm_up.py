"""What a decoder runs before it is ready."""

from pathlib import Path

from ipc.step import GEN_KIND, GEN_NUM_TOKENS, KIND_DECODE, KIND_PREFILL, KIND_VERIFY, StepPlan
from ipc.step_ring import Arrays
from rose.config import SpeculationConfig
from rose.decoder_warm_up import warm_up
from rose.runner import LazyTensor
from tests.rose.decoder_driving import Driver
from tests.rose.tiny_lm import write_llama


class Recorder:
    """A loaded runner, and the rows that it was given."""

    def __init__(self, driver: Driver) -> None:
        self.facts = driver.facts
        self.steps: list[list[list[int]]] = []
        self._runner = driver.runner

    def step(self, plan: StepPlan, arrays: Arrays) -> LazyTensor:
        self.steps.append(arrays["rows"][: plan.num_seqs, [GEN_KIND, GEN_NUM_TOKENS]].tolist())
        return self._runner.step(plan, arrays)

    def drain(self) -> None:
        self._runner.drain()


def test_prompts_that_fill_a_step_then_a_token_more_then_a_grammar(tmp_path: Path) -> None:
    driver = Driver(write_llama(tmp_path, tokenizer=True), max_model_len=50, max_num_batched_tokens=64)
    recorder = Recorder(driver)
    warm_up(recorder)
    prompts = [[KIND_PREFILL, 49], [KIND_PREFILL, 15]]
    assert recorder.steps == [prompts, [[KIND_DECODE, 1], [KIND_DECODE, 1]], []]
    driver.close()


def test_drafts_behind_a_sequence_that_is_as_long_as_any(tmp_path: Path) -> None:
    """As many as a step has room for; a draft model computes them, too."""
    draft = SpeculationConfig(proposer="draft_model", num_layers=1, num_draft_tokens=4)
    for limits, most in (({"max_num_batched_tokens": 64}, 5), ({"max_num_batched_tokens": 3, "max_num_seqs": 1}, 3)):
        driver = Driver(write_llama(tmp_path, tokenizer=True), max_model_len=50, speculation=draft, **limits)
        recorder = Recorder(driver)
        driver.runner.attach(None)
        warm_up(recorder)
        assert recorder.steps[2:] == [[[KIND_VERIFY, most]], []]
        driver.close()
