"""Samples that came apart, joined to a batch."""

import numpy as np

from orchestrator.experience.experience import Collected, Finished
from tests.unit import experiences
from tests.unit.experiences import Experience
from tests.unit.fakes import make_prompts, respond


def test_a_response_waits_for_the_last_one_to_its_prompt() -> None:
    """Two groups of two are complete at 1 and 3, and at 3 and 4 seconds: they wait 2, 0, 1 and 0."""
    rows = []
    for index, prompt in enumerate(make_prompts(4)):
        sample = respond(index, prompt.prompt_ids, 1)
        ref_logprobs = values = np.zeros(len(sample.response_ids), np.float32)
        rows.append(Experience(index, prompt, sample, 0.5, ref_logprobs, values))
    for each, waited in ((2, 0.75), (1, None)):
        whole = experiences.collected(rows, each=each)
        parts = [
            Finished(whole.columns.take(members), [whole.prompts[row] for row in members], 0.0, 0.5, complete)
            for members, complete in (([0], 1.0), ([1, 2], 3.0), ([3], 4.0))
        ]
        batch = Collected.of([(part, index) for part in parts for index in range(len(part.columns))], 0)
        assert batch.group_s == waited
        assert batch.columns.pack() == whole.columns.pack()
