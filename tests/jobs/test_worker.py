"""The worker: an answer depends on its task alone, and so does an error."""

from itertools import count

import torch

from minipaged.checkpoints.loading import LoadedModel
from minipaged.engine.llm import LLM
from minipaged.jobs.lines import Task
from minipaged.jobs.worker import Worker
from minipaged.model.chat_template import check_messages
from minipaged.model.tiny import TINY, random_llama
from tests.engine.fake_chat import ChatTokenizer


class CheckedChat(ChatTokenizer):
    """Refuses what is no conversation, as the chat templates of models do."""

    def apply_chat_template(self, messages, add_generation_prompt=True) -> str:
        check_messages(messages)
        return super().apply_chat_template(messages, add_generation_prompt)


def task(line: int, prompt=None, **sampling) -> Task:
    prompt = prompt or {"prompt_token_ids": [line] * (3 + line)}
    sampling = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True, "seed": line} | sampling
    return Task(line, f"id{line}", f"key{line}", prompt, sampling)


def worker(**settings) -> Worker:
    settings = {"block_size": 4, "num_blocks": 100, "max_model_len": 40} | settings
    return Worker(LLM(LoadedModel(random_llama(seed=3), CheckedChat(), TINY, "tiny"), **settings))


def by_line(results):
    return sorted(results, key=lambda result: result["line"])


def test_the_same_answers_alone_together_in_any_order_and_in_a_small_pool():
    tasks = [task(n, temperature=n % 2, max_tokens=3 + n) for n in range(12)]
    alone = [result for each in tasks for result in worker().run([each])]
    assert by_line(worker().run(tasks)) == alone
    assert by_line(worker().run(reversed(tasks))) == alone
    tight = worker(num_blocks=12, max_num_seqs=5)
    assert by_line(tight.run(tasks)) == alone
    assert tight.llm.stats.num_preemptions > 0


def test_samples_of_one_task_are_all_in_its_result():
    (result,) = worker().run([task(1, n=3)])
    assert len(result["outputs"]) == 3
    assert len({tuple(output["token_ids"]) for output in result["outputs"]}) == 3


def test_messages_and_text_are_prompts_too():
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    chat, text = by_line(worker().run([task(1, messages), task(2, {"prompt": "user: hi\nassistant: "})]))
    assert chat["prompt_tokens"] == text["prompt_tokens"] == len("user: hi\nassistant: ")


def test_a_task_that_cannot_be_served_is_its_own_error():
    wrong = {
        2: ({"prompt_token_ids": [1] * 40}, "prompt has 40 tokens, max_model_len is 40"),
        3: ({"prompt_token_ids": [10**6]}, "outside the vocabulary"),
        4: ({"prompt_token_ids": "12"}, "a token id is a whole number"),
        5: ({"prompt": ["x"]}, "a prompt is text"),
        6: ({"messages": []}, "at least one message"),
        7: ({"messages": [{"role": "user"}]}, "message 0 has content None"),
        9: ({"prompt": ""}, "0 tokens"),
        10: ({"prompt": "x", "cache_salt": 3}, "a cache_salt is text"),
        11: ({"prompt": None}, "a prompt is text"),
    }
    results = by_line(
        worker().run([task(1), *(task(n, prompt) for n, (prompt, _) in wrong.items()), task(12)])
    )
    assert [result["line"] for result in results] == [1, *wrong, 12]
    assert "outputs" in results[0] and "outputs" in results[-1]
    for result in results[1:-1]:
        assert wrong[result["line"]][1] in result["error"]
        assert result["id"] == f"id{result['line']}"


def test_logits_that_break_are_one_task_s_error(monkeypatch):
    broken = worker()
    compute = broken.llm.engine.runner.sampled_logits

    def sampled_logits(plan, hidden):
        logits = compute(plan, hidden)
        for row, sequence in enumerate(plan.sampled):
            if sequence.request_id == "5" and len(sequence.output.token_ids) == 2:
                logits[row] = torch.nan
        return logits

    monkeypatch.setattr(broken.llm.engine.runner, "sampled_logits", sampled_logits)
    tasks = [task(n) for n in range(9)]
    results = by_line(broken.run(tasks))
    assert "not finite" in results.pop(5)["error"]
    expected = by_line(worker().run(tasks))
    expected.pop(5)
    assert results == expected


def test_a_run_that_is_closed_leaves_nothing_in_the_engine():
    served = worker()
    results = served.run(task(n) for n in range(50))
    next(results)
    results.close()
    assert not served.llm.engine.has_unfinished_requests()
    assert served.llm.engine.pool.num_free == 100


def test_tasks_are_taken_as_there_is_room():
    taken = []

    def endless():
        for n in count():
            taken.append(n)
            yield task(n, {"prompt_token_ids": [1, n % 300]}, max_tokens=2)

    results = worker(max_num_seqs=4).run(endless())
    for _ in range(30):
        next(results)
    assert len(taken) <= 30 + 2 * 4 + 1
