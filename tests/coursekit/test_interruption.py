from coursekit.interruption import serve_and_interrupt
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama


def test_the_long_prompt_arrives_when_it_is_told_to_and_everybody_is_answered():
    loaded = LoadedModel(random_llama(), None, TINY, "tiny")
    chats, long_prompt = [[5, 6, 7], [8, 9]], list(range(3, 43))
    answers, steps = serve_and_interrupt(
        loaded, chats, long_prompt, after=3, tokens=5, max_num_batched_tokens=64
    )
    assert set(answers) == {"chat 0", "chat 1", "long"}
    assert all(len(answer) == 5 for answer in answers.values())
    assert [step.prefill_tokens for step in steps[:4]] == [5, 0, 0, 40]
