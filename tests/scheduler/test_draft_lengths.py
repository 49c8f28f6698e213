"""How long drafts are, by the facts; what a plan says of them; what is counted."""

import numpy as np
import pytest
from msgspec.structs import replace

from ipc.types import SamplingParams
from scheduler.llm.draft_lengths import draft_length, keeps_draft
from scheduler.llm.figures import Figures
from tests.scheduler.generation_sim import FACTS, GenerationSim

TABLE = ((1, 3), (3, 1), (4, 0))


@pytest.mark.parametrize(("num_seqs", "length", "keeps"), [(1, 3, True), (2, 1, True), (4, 0, True), (5, 0, False)])
def test_by_number_of_sequences(num_seqs: int, length: int, keeps: bool) -> None:
    facts = replace(FACTS, draft_lengths=TABLE)
    assert (draft_length(facts, num_seqs), keeps_draft(facts, num_seqs)) == (length, keeps)
    assert draft_length(FACTS, num_seqs) == FACTS.max_draft_tokens
    assert keeps_draft(FACTS, num_seqs)


def test_plans_follow_the_table() -> None:
    """Sequences come one after the other; a step of all five keeps no draft."""
    sim = GenerationSim(facts=replace(FACTS, draft_lengths=TABLE), draft_length=None, acceptance=0.5)
    told = {}
    for _ in range(5):
        sim.add([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True, seed=1))
        for _ in range(4):
            sim.run_step()
        contents = sim.contents[-1]
        assert all(kind for kind, _ in contents.values())  # decode rows alone
        told[len(contents)] = sim.plans[-1].draft_length, sim.plans[-1].keep_draft
    assert told == {1: (3, True), 2: (1, True), 3: (1, True), 4: (0, True), 5: (0, False)}
    sim.drain()
    sim.check_answers()
    sim.close()


def test_what_is_counted_of_drafts() -> None:
    figures = Figures()
    assert not any("mean_accepted_length" in name for name in figures.samples("x_", 'replica="r"'))
    figures.count_drafts(np.array([3, 0, 2, 3]), np.array([3, 0, 1, 0]))
    figures.count_drafts(np.array([1, 2]), np.array([1, 2]))
    samples = figures.samples("x_", 'replica="r"')
    expected = {"drafts": 5, "draft_tokens": 11, "accepted_tokens": 7}
    assert {name: samples[f'x_{name}_total{{replica="r"}}'] for name in expected} == expected
    places = [samples[f'x_accepted_tokens_at_total{{replica="r",place="{place}"}}'] for place in range(3)]
    assert places == [4, 2, 1]
    assert samples['x_mean_accepted_length{replica="r"}'] == 1 + 7 / 5
