"""Two samples of one prompt agree when blocks are copied whole, and only then."""

import pytest
import torch

from coursekit.forked import samples_apart
from minipaged import KVSpec, KVStorage
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import random_llama

MODEL = random_llama()
LOADED = LoadedModel(MODEL, None, MODEL.config, "tiny")
IDS = [1 + n * 7 % 50 for n in range(100)]
SPEC = KVSpec.from_model(MODEL.config, torch.int8)


def without_scales(storage, copies):
    for copy in copies:
        storage.key[:, copy.dst] = storage.key[:, copy.src]
        storage.value[:, copy.dst] = storage.value[:, copy.src]


@pytest.mark.parametrize("length", [17, 20, 31, 32])
def test_samples_agree_when_blocks_are_copied_with_their_scales(length):
    assert samples_apart(LOADED, SPEC, IDS, length, KVStorage.copy_blocks) < 1e-4


def test_samples_differ_when_scales_stay_behind():
    assert samples_apart(LOADED, SPEC, IDS, 20, without_scales) > 1e-3
    assert samples_apart(LOADED, SPEC, IDS, 32, without_scales) < 1e-4  # nothing is copied


def test_too_few_tokens_are_refused():
    with pytest.raises(ValueError, match="90 tokens given, 96 are needed"):
        samples_apart(LOADED, SPEC, IDS[:90], 20, KVStorage.copy_blocks)
