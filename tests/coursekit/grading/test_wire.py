"""Values survive the way between grader and learner's process, and nonsense is noticed."""

import io
import json
import math
import struct
from collections import namedtuple

import numpy as np
import pytest
import torch

from coursekit.grading import wire


def there_and_back(value):
    objects = []

    def reference(item):
        objects.append(item)
        return len(objects) - 1

    return wire.decode(
        json.loads(json.dumps(wire.encode(value, reference))), lambda number, _: objects[number]
    )


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**70),
        1.5,
        "é😊",
        [1, [2, (3,)]],
        (),
        {1, 2},
        {(1, "a"): [None]},
        b"\x00\xff",
        math.inf,
    ],
    ids=repr,
)
def test_plain_values_come_back_as_they_are(value):
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_nan_comes_back():
    assert math.isnan(there_and_back(math.nan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (4, 1, 2)])
def test_tensors_come_back_with_shape_and_dtype(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    back = there_and_back(tensor)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_a_strided_tensor_comes_back_equal():
    tensor = torch.arange(12.0).reshape(3, 4).t()[1:]
    assert torch.equal(there_and_back(tensor), tensor)


def test_arrays_come_back_and_can_be_written():
    back = there_and_back(np.arange(6, dtype=np.int16).reshape(2, 3))
    back[0, 0] = 7
    assert back.dtype == np.int16
    assert back.tolist() == [[7, 1, 2], [3, 4, 5]]


def test_numpy_numbers_become_plain_numbers():
    assert type(there_and_back(np.int64(3))) is int


def test_a_named_tuple_is_a_tuple():
    assert there_and_back(namedtuple("Copy", "src dst")(1, 2)) == (1, 2)


def test_other_objects_stay_where_they_are():
    thing = object()
    assert there_and_back([thing]) == [thing]


@pytest.mark.parametrize(
    "value",
    [
        {"tensor": ["float32", [3], ""]},
        {"tensor": ["nonsense", [1], "AAAA"]},
        {"unknown": 1},
        {"a": 1, "b": 2},
        {"list": 3},
    ],
    ids=repr,
)
def test_values_that_make_no_sense_are_refused(value):
    with pytest.raises(wire.WireError):
        wire.decode(value, [].__getitem__)


def test_a_frame_comes_back():
    stream = io.BytesIO()
    wire.send(stream, {"op": "é"})
    stream.seek(0)
    assert wire.receive(stream) == {"op": "é"}
    with pytest.raises(EOFError):
        wire.receive(stream)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", EOFError),
        (b"\x01\x00", EOFError),
        (struct.pack("<Q", 9) + b"{}", EOFError),
        (struct.pack("<Q", 2**60), wire.WireError),
        (struct.pack("<Q", 3) + b"{]}", wire.WireError),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, wire.WireError),
    ],
)
def test_frames_that_are_none_are_noticed(data, error):
    with pytest.raises(error):
        wire.receive(io.BytesIO(data))
