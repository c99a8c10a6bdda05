import torch

from coursekit.given.layers import written_layer
from minipaged import KVSpec


def test_slots_of_the_sequences_are_written_and_all_others_are_nan():
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_size=4, dtype=torch.float32)
    layer = written_layer(spec, 5, 4, [[3, 1], [0]], [5, 2], torch.Generator().manual_seed(0))
    for cache in (layer.key, layer.value):
        used = ~cache.isnan().flatten(2).any(dim=-1)
        assert used.nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [3, 0], [3, 1], [3, 2], [3, 3]]
    assert not torch.equal(layer.key[0, 0], layer.value[0, 0])
