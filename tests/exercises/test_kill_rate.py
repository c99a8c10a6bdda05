"""Every mistake that is planted is found for its reason, and every right answer in another style passes.

Slow: each is graded in a process of its own, and many interpret a kernel. What a grader says of the solution,
the stub and the first mistake is tested beside each exercise.
"""

import pytest

from tests.exercises.kill_rate import proofs

PROOFS = proofs()
pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.mark.parametrize(
    ("proof", "answer"),
    [
        pytest.param(proof, answer, id=f"{proof.task}-{number}")
        for proof in PROOFS
        for number, answer in enumerate(proof.right(), start=1)
    ],
)
def test_a_right_answer_in_another_style_passes(proof, answer):
    proof.check_right(answer)


@pytest.mark.parametrize(
    ("proof", "wrong"),
    [
        pytest.param(proof, wrong, id=f"{proof.task}-{wrong.name}")
        for proof in PROOFS
        for wrong in proof.all_wrong()[1:]
    ],
)
def test_a_planted_mistake_is_found_for_its_reason(proof, wrong):
    proof.check_wrong(wrong)
