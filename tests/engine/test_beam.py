"""Beam search: scores by output length, finished beams, ties, and the blocks that beams hold."""

import itertools

import pytest
import torch
from torch import Tensor

from minipaged.attention.backend import get_backend
from minipaged.attention.batch import AttentionBatch
from minipaged.cache import BlockPool, BlockTable, KVStorage
from minipaged.cache.accounting import blocks_saved
from minipaged.config import ModelConfig
from minipaged.core.sampler import BadLogitsError
from minipaged.engine.beam import BeamSearch, BeamSearchOutput, beam_score, beam_search
from minipaged.memory import KVSpec
from minipaged.model.tiny import random_llama
from minipaged.sampling_params import BeamSearchParams
from tests.engine.fake_tokenizers import ByteTokenizer

EOS = 0
PROMPT = [3, 1, 2, 2, 3]
SMALL = ModelConfig(
    vocab_size=4,
    hidden_size=16,
    intermediate_size=16,
    num_layers=2,
    num_query_heads=2,
    num_kv_heads=1,
    head_size=8,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)


class TableModel:
    """Logits read from a table [length, V, V] by position and last token; no attention. Watches the pool."""

    config = SMALL

    def __init__(self, table: Tensor, pool: BlockPool):
        self.table, self.pool = table, pool
        self.fails_at = -1
        self.steps: list[tuple[AttentionBatch, int]] = []

    def __call__(self, token_ids, batch, storage, backend) -> Tensor:
        self.steps.append((batch, self.pool.num_blocks - self.pool.num_free))
        if len(self.steps) == self.fails_at:
            raise RuntimeError("the model broke")
        return torch.stack([batch.positions, token_ids], dim=1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0] % len(self.table), hidden[:, 1]]


class Stage:
    """A pool, its storage and a model to search with."""

    def __init__(self, model=None, *, seed=0, num_blocks=64, block_size=2, config=SMALL, spread=2.0):
        self.pool = BlockPool(num_blocks)
        self.storage = KVStorage(KVSpec.from_model(config, torch.float32), num_blocks, block_size)
        self.backend = get_backend("torch")
        if model is None:
            generator = torch.Generator().manual_seed(seed)
            model = TableModel(torch.randn(16, 4, 4, generator=generator) * spread, self.pool)
        self.model = model

    def search(self, width, max_tokens=3, *, prompt=PROMPT, eos=(EOS,), max_model_len=64, **params):
        options = BeamSearchParams(width, max_tokens, **params)
        parts = (self.model, self.pool, self.storage, self.backend)
        try:
            return beam_search(*parts, prompt, options, eos_token_ids=eos, max_model_len=max_model_len)
        finally:
            self.pool.check_invariants([])
            assert self.pool.num_free == self.pool.num_blocks

    def next_logprobs(self, tokens: list[int]) -> list[float]:
        """Of the token after `tokens`, computed from nothing in a cache of its own."""
        table = BlockTable(BlockPool(64), 2)
        table.append(len(tokens))
        storage = KVStorage(self.storage.spec, 64, 2)
        batch = AttentionBatch.build([table.blocks], [len(tokens)], [len(tokens)], 2)
        hidden = self.model(torch.tensor(tokens), batch, storage, self.backend)
        return self.model.compute_logits(hidden[-1:]).double().log_softmax(dim=-1)[0].tolist()


def outputs(found: BeamSearchOutput) -> list[tuple[list[int], str]]:
    return [(sequence.output_token_ids, sequence.finish_reason) for sequence in found.sequences]


def brute_force(stage: Stage, max_tokens: int, length_penalty: float) -> list[tuple[float, list[int], str]]:
    """Every output there is, best first: those that end, and those that reach max_tokens."""
    found = []
    prefixes = [([], 0.0)]
    for _ in range(max_tokens):
        longer = []
        for output, total in prefixes:
            for token, logprob in enumerate(stage.next_logprobs(PROMPT + output)):
                if token == EOS:
                    found.append((output, total + logprob, "stop"))
                else:
                    longer.append(([*output, token], total + logprob))
        prefixes = longer
    found += [(output, total, "length") for output, total in prefixes]
    scored = [(total / max(len(out), 1) ** length_penalty, out, reason) for out, total, reason in found]
    return sorted(scored, key=lambda entry: -entry[0])


def test_the_prompt_does_not_count_in_the_length_penalty():
    assert beam_score(-3.0, 3, 1.0) == -1.0
    assert beam_score(-3.6, 6, 1.0) == pytest.approx(-0.6)
    assert beam_score(-3.6, 6, 0.0) == -3.6
    assert beam_score(-0.5, 0, 1.0) == -0.5  # nothing but its end


def test_a_long_prompt_changes_no_score():
    table = torch.randn(1, 4, 4) * 2
    stage = Stage(TableModel(table, BlockPool(1)), num_blocks=200)
    short, long = stage.search(3, 4, prompt=[2]), stage.search(3, 4, prompt=[1] * 49 + [2])
    assert outputs(short) == outputs(long)
    assert [s.score for s in short.sequences] == [s.score for s in long.sequences]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_beam_that_is_wide_enough_equals_brute_force(seed, length_penalty):
    stage = Stage(seed=seed, num_blocks=400)
    expected = brute_force(stage, 3, length_penalty)
    found = stage.search(64, length_penalty=length_penalty)
    assert len(found.sequences) == len(expected) == 1 + 3 + 9 + 27
    for sequence, (score, output, reason) in zip(found.sequences, expected, strict=True):
        assert (sequence.output_token_ids, sequence.finish_reason) == (output, reason)
        assert sequence.score == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_a_real_model_equals_brute_force_through_forks_and_copies(block_size):
    stage = Stage(random_llama(SMALL, seed=1), num_blocks=400, block_size=block_size)
    expected = brute_force(stage, 4, 1.0)
    found = stage.search(130, 4)
    assert len(found.sequences) == len(expected)
    for sequence, (score, output, _) in zip(found.sequences, expected, strict=True):
        assert sequence.output_token_ids == output
        assert sequence.score == pytest.approx(score, abs=1e-5)


def reference_beams(stage: Stage, width: int, max_tokens: int) -> list[tuple[list[int], str]]:
    """The documented rules on plain lists, without any cache."""
    live, finished = [([], 0.0)], []
    for _ in range(max_tokens):
        ranked = [
            (total + logprob, beam, token)
            for beam, (output, total) in enumerate(live)
            for token, logprob in enumerate(stage.next_logprobs(PROMPT + output))
        ]
        ranked.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
        finished += [(live[beam][0], total) for total, beam, token in ranked[:width] if token == EOS]
        going = [entry for entry in ranked if entry[2] != EOS]
        live = [([*live[beam][0], token], total) for total, beam, token in going[:width]]
        if len(finished) >= width:
            break
    found = [(total / max(len(output), 1), output, "stop") for output, total in finished]
    if len(finished) < width:
        found += [(total / len(output), output, "length") for output, total in live]
    found.sort(key=lambda entry: -entry[0])
    return [(output, reason) for _, output, reason in found[:width]]


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_narrow_beams_follow_the_documented_rules(width):
    for seed in range(12):
        stage = Stage(seed=seed)
        assert outputs(stage.search(width, 6)) == reference_beams(stage, width, 6)
    llama = Stage(random_llama(SMALL, seed=5), block_size=3)
    assert outputs(llama.search(width, 6)) == reference_beams(llama, width, 6)


def test_one_beam_is_greedy_decoding():
    ended = 0
    for seed in range(20):
        stage = Stage(seed=seed)
        greedy: list[int] = []
        for _ in range(6):
            logprobs = stage.next_logprobs(PROMPT + greedy)
            token = logprobs.index(max(logprobs))
            if token == EOS:
                ended += 1
                break
            greedy.append(token)
        assert [s.output_token_ids for s in stage.search(1, 6).sequences] == [greedy]
    assert 0 < ended < 20


def test_a_beam_wider_than_the_vocabulary_begins_with_all_of_it():
    stage = Stage(seed=3)
    found = outputs(stage.search(10, 1))
    assert sorted(output for output, _ in found) == [[], [1], [2], [3]]


def test_a_continuation_of_probability_zero_is_no_hypothesis():
    table = torch.full((1, 4, 4), -torch.inf)
    table[:, :, 2] = 0.0
    stage = Stage(TableModel(table, BlockPool(1)))
    assert outputs(stage.search(3, 3)) == [([2, 2, 2], "length")]


def test_ties_go_to_the_better_parent_and_the_lower_token():
    stage = Stage(TableModel(torch.zeros(1, 4, 4), BlockPool(1)))
    found = stage.search(2, 2, eos=())
    assert outputs(found) == [([0, 0], "length"), ([0, 1], "length")]


def test_nothing_follows_an_end_and_its_probability_counts():
    table = torch.zeros(1, 4, 4)
    table[0, :, EOS] = 2.0
    stage = Stage(TableModel(table, BlockPool(1)))
    (best, *_) = stage.search(2, 5).sequences
    assert (best.tokens, best.finish_reason) == (PROMPT, "stop")
    assert best.cum_logprob == pytest.approx(stage.next_logprobs(PROMPT)[EOS])


def test_ignore_eos_treats_the_end_as_a_token():
    table = torch.zeros(1, 4, 4)
    table[0, :, EOS] = 2.0
    stage = Stage(TableModel(table, BlockPool(1)))
    assert outputs(stage.search(1, 3, ignore_eos=True)) == [([EOS] * 3, "length")]


def test_every_one_of_several_ends_finishes():
    table = torch.randn(8, 4, 4)
    stage = Stage(TableModel(table, BlockPool(1)))
    for sequence in stage.search(3, 6, eos=(0, 2)).sequences:
        assert not {0, 2} & set(sequence.output_token_ids)


def test_temperature_flattens_what_is_summed():
    stage = Stage(seed=2)
    logits = stage.model.table[4, PROMPT[-1]].double()
    for temperature, divisor in ((2.0, 2.0), (0.0, 1.0), (1.0, 1.0)):
        (best,) = stage.search(1, 1, temperature=temperature).sequences
        assert best.cum_logprob == pytest.approx((logits / divisor).log_softmax(-1).max().item())


def test_only_live_hypotheses_hold_blocks_at_every_step():
    branched = 0
    for seed in range(8):
        stage = Stage(seed=seed)
        stage.search(3, 8)
        for batch, held in stage.model.steps:
            branched += batch.num_seqs > 1
            lengths = batch.context_lens.tolist()
            rows = [row[: -(-n // 2)] for row, n in zip(batch.block_tables.tolist(), lengths, strict=True)]
            assert len(set(itertools.chain(*rows))) == held
    assert branched > 20


def test_hypotheses_never_write_into_each_others_blocks():
    for seed in range(6):
        stage = Stage(seed=seed, block_size=4)
        stage.search(4, 9, eos=())
        for batch, _ in stage.model.steps[1:]:
            slots = batch.slot_mapping.tolist()
            assert len(set(slots)) == len(slots)
            written = {slot // 4 for slot in slots}
            lists = [set(row) for row in batch.block_tables.tolist()]
            assert all(sum(block in row for row in lists) == 1 for block in written)


def test_blocks_come_home_when_the_model_breaks():
    for step in (1, 2, 4):
        stage = Stage(seed=1)
        stage.model.fails_at = step
        with pytest.raises(RuntimeError, match="the model broke"):
            stage.search(3, 8)


def test_a_shortage_is_refused_with_both_numbers_and_leaves_nothing_behind():
    with pytest.raises(RuntimeError, match="needs 3 more blocks, 2 of 2 are free"):
        Stage(num_blocks=2).search(1)
    with pytest.raises(RuntimeError, match=r"needs \d+ more blocks, \d of 5 are free"):
        Stage(num_blocks=5).search(4, 10, eos=())


def test_nan_logits_are_an_error():
    table = torch.zeros(1, 4, 4)
    table[0, 3, 1] = torch.nan
    with pytest.raises(BadLogitsError, match="beam search"):
        Stage(TableModel(table, BlockPool(1))).search(2)


def test_prompts_that_leave_no_room_are_refused_and_growth_stops_at_the_limit():
    stage = Stage()
    for prompt in ([], [1] * 8, [1] * 9):
        with pytest.raises(ValueError, match=f"prompt has {len(prompt)} tokens, must be 1 to 7"):
            stage.search(2, prompt=prompt, max_model_len=8)
    found = stage.search(2, 50, eos=(), max_model_len=8)
    assert [len(sequence.tokens) for sequence in found.sequences] == [8, 8]


def test_a_long_prompt_is_computed_in_chunks(monkeypatch):
    stage = Stage(random_llama(SMALL, seed=2))
    whole = stage.search(3, 4)
    monkeypatch.setattr("minipaged.engine.beam.PROMPT_CHUNK", 2)
    assert outputs(stage.search(3, 4)) == outputs(whole)


def test_the_share_of_saved_blocks_is_counted_from_the_tables():
    pool = BlockPool(16)
    first = BlockTable(pool, 2)
    first.append(6)
    second = first.fork()
    assert blocks_saved([first]) == 0
    assert blocks_saved([first, second]) == 0.5
    second.append(2)
    assert blocks_saved([first, second]) == pytest.approx(3 / 7)
    references = sum(1 / pool.ref_count(block) for table in (first, second) for block in table.blocks)
    assert blocks_saved([first, second]) == pytest.approx(1 - references / 7)
    assert blocks_saved([]) == 0
    assert Stage().search(1).blocks_saved == 0
    assert 0.3 < Stage(seed=4).search(4, 6, eos=()).blocks_saved < 0.9


def test_a_search_can_be_watched_step_by_step():
    stage = Stage(seed=1)
    search = BeamSearch(
        stage.model, stage.pool, stage.storage, stage.backend, BeamSearchParams(2, 3), (), max_tokens=3
    )
    search.start(PROMPT)
    assert search.logits.shape == (1, 4)
    while not search.is_done:
        search.step()
        stage.pool.check_invariants([hypothesis.table for hypothesis in search.live])
    assert len(search.live) == 2
    assert search.live[0].sum_logprob >= search.live[1].sum_logprob
    search.close()
    assert stage.pool.num_free == stage.pool.num_blocks


def test_text_begins_with_the_prompt_as_in_vllm():
    tokenizer = ByteTokenizer()
    stage = Stage()
    parts = (stage.model, stage.pool, stage.storage, stage.backend)
    found = beam_search(
        *parts, PROMPT, BeamSearchParams(2, 2), eos_token_ids=(), max_model_len=64, tokenizer=tokenizer
    )
    for sequence in found.sequences:
        assert sequence.text == tokenizer.decode(sequence.tokens)
        assert sequence.tokens[: sequence.num_prompt_tokens] == PROMPT
