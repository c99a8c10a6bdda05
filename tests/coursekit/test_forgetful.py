from coursekit.forgetful import engine_with_a_fault
from minipaged.cache import BlockPool, BlockTable


def fork_and_append():
    parent = BlockTable(BlockPool(4), 4)
    parent.append(6)
    child = parent.fork()
    return child.append(1), parent.blocks == child.blocks


def test_the_fault_lasts_as_long_as_the_block():
    with engine_with_a_fault():
        assert fork_and_append() == ([], True)
    copies, shared = fork_and_append()
    assert len(copies) == 1 and not shared
