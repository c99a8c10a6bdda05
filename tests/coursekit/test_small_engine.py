"""The small engine of the scheduling lessons: requests by letter, and answers that blocks do not change."""

from coursekit.small_engine import serve_lengths, serve_to_end, small_llm, small_mix
from minipaged.model.tiny import TINY


def test_requests_are_named_by_letters_and_get_their_lengths():
    timeline, answers = serve_lengths([(6, 3), (9, 5)])
    assert {name: len(said) for name, said in answers.items()} == {"A": 3, "B": 5}
    assert timeline.computed == 6 + 9 + 2 + 4


def test_a_shortage_of_blocks_preempts_and_changes_no_answer():
    lengths = [(6, 18), (9, 14), (20, 8)]
    short, answers = serve_lengths(lengths)
    ample, wanted = serve_lengths(lengths, num_blocks=64)
    assert short.preemptions > 0 == ample.preemptions and answers == wanted


def test_the_mix_has_only_words_of_the_tiny_model():
    words = [token for request in small_mix() for token in request.prompt_token_ids]
    assert len(small_mix()) == 48
    assert min(words) >= 0 and max(words) < TINY.vocab_size


def test_an_engine_serves_one_batch_after_another():
    llm, (first, second, *_) = small_llm(num_blocks=64), small_mix()
    for request in (first, second):
        (answer,) = serve_to_end(llm, [request]).values()
        assert len(answer) == request.max_tokens
