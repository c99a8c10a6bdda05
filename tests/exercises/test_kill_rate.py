"""Every mistake that is planted is found for its reason, and a right answer in another style passes.

Slow: each is graded in a process of its own, and many interpret a kernel. What a grader says of the solution,
the stub and the first mistake is tested beside each exercise.
"""

import pytest

from tests.exercises.kill_rate import proofs

PROOFS = proofs()
pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.task)
def test_a_right_answer_in_another_style_passes(proof):
    proof.check_second()


@pytest.mark.parametrize(
    ("proof", "wrong"),
    [
        pytest.param(proof, wrong, id=f"{proof.task}-{wrong.name}")
        for proof in PROOFS
        for wrong in proof.wrong[1:]
    ],
)
def test_a_planted_mistake_is_found_for_its_reason(proof, wrong):
    proof.check_wrong(wrong)
