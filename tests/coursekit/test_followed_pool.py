import pytest

from coursekit.followed_pool import FollowedPool, admit
from minipaged.cache import BlockPool


def test_a_request_adopts_the_blocks_of_one_that_began_alike_and_they_keep_their_label():
    followed = FollowedPool(4, 2)
    followed.run("A", [1, 2, 3]).free()
    followed.note("A has ended.")
    followed.run("B", [1, 2, 9])
    followed.note("B runs.")
    ended, runs = followed.history
    assert ended.blocks == [("cached", "A0"), ("blank", ""), ("blank", ""), ("blank", "")]
    assert sorted(runs.blocks) == [("blank", ""), ("blank", ""), ("held", "A0"), ("held", "B1")]


def test_asking_for_the_order_takes_nothing():
    followed = FollowedPool(4, 2)
    followed.run("A", [1, 2, 3]).free()
    followed.note("A has ended.")
    assert followed.pool.num_free == 4
    assert followed.pool.allocate(4) == followed.history[0].order
    assert followed.history[0].order[-1] == 0  # the cached one last


def test_a_request_that_does_not_fit_is_refused_with_the_numbers():
    pool = BlockPool(1)
    with pytest.raises(RuntimeError, match="5 tokens in blocks of 2 do not fit: 1 are free"):
        admit(pool, [1, 2, 3, 4, 5], 2)
    assert pool.num_free == 1
