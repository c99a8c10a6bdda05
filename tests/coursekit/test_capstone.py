"""A learner's parts do the engine's work when plugged in; a tiny model here, the real one in the exercise."""

import pytest
import torch

from coursekit.capstone import plug_in_attention, plug_in_memory
from minipaged import LLM, SamplingParams
from minipaged.attention.reference import ReferenceBackend
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama
from tests.exercises.test_04_block_table import ALLOCATOR, BLOCK_TABLE

PROMPTS = [[5, 6, 7], [8] * 9, [9, 10]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def make(num_blocks=16, **settings):
    model = LoadedModel(random_llama(), None, TINY, "tiny")
    settings = {"enable_prefix_caching": False, "device": "cpu", "max_model_len": 64} | settings
    return LLM(model, num_blocks=num_blocks, block_size=4, attention_backend="torch", **settings)


def tokens_of(llm):
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def mine():
    space = {}
    exec(ALLOCATOR.second, space)
    exec(BLOCK_TABLE.second, space)
    return space


@pytest.mark.parametrize("num_blocks", [16, 6])
def test_plugged_memory_serves_the_same_tokens_and_gets_everything_back(mine, num_blocks):
    llm = make(num_blocks)
    pool = plug_in_memory(llm, mine["MyBlockPool"], mine["MyBlockTable"])
    assert tokens_of(llm) == tokens_of(make())
    assert pool.mine.num_free == num_blocks
    assert (llm.stats.num_preemptions > 0) == (num_blocks == 6)


def test_an_engine_that_shares_blocks_is_refused(mine):
    with pytest.raises(ValueError, match="enable_prefix_caching=False"):
        plug_in_memory(make(enable_prefix_caching=True), mine["MyBlockPool"], mine["MyBlockTable"])


def test_plugged_attention_is_asked_for_single_queries_only():
    seen = []

    def attend(query, key_cache, value_cache, block_tables, context_lens, scale):
        seen.append(tuple(query.shape))
        keys = [
            key_cache[t.long()].flatten(0, 1)[:n] for t, n in zip(block_tables, context_lens, strict=True)
        ]
        values = [
            value_cache[t.long()].flatten(0, 1)[:n] for t, n in zip(block_tables, context_lens, strict=True)
        ]
        rows = []
        for q, k, v in zip(query, keys, values, strict=True):
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            rows.append(
                torch.einsum("hn,nhd->hd", torch.softmax(torch.einsum("hd,nhd->hn", q, k) * scale, 1), v)
            )
        return torch.stack(rows)

    llm = make()
    backend = plug_in_attention(llm, attend)
    assert tokens_of(llm) == tokens_of(make())
    assert backend.num_calls == len(seen) == 11 * TINY.num_layers
    assert set(seen) == {(len(PROMPTS), TINY.num_query_heads, TINY.head_size)}


def test_the_rest_of_attention_is_left_to_the_backend_that_was_there():
    llm = make()
    llm.engine.runner.backend = ReferenceBackend()
    assert plug_in_attention(llm, lambda *args: None).name == "plugged into reference"
