"""The codec: every message survives the trip, and garbage is an error of ours."""

from __future__ import annotations

import typing

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioprefill import errors
from aioprefill.errors import WireError
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.request import Timeouts
from aioprefill.sampling_params import SamplingParams
from aioprefill.wire import messages
from aioprefill.wire.failures import error_from, failed_from
from aioprefill.wire.messages import decode, encode, ids_of, pack_ids, unpack_ids

KINDS = typing.get_args(messages.Message)
FINITE = st.floats(allow_nan=False)
LEAVES = {
    int: st.integers(-(1 << 63), (1 << 63) - 1),
    float: FINITE,
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
    type(None): st.none(),
    GrammarSpec: st.builds(
        GrammarSpec, st.sampled_from(["json_schema", "regex", "grammar"]), st.text(max_size=20)
    ),
    Timeouts: st.builds(Timeouts, queue_s=FINITE, transfer_s=st.none()),
    SamplingParams: st.builds(SamplingParams, temperature=FINITE, top_k=st.integers(0, 99), seed=st.none()),
}


def values(annotation):
    """A strategy for a field's type."""
    if annotation in LEAVES:
        return LEAVES[annotation]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if origin is list:
        return st.lists(values(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    return st.one_of(*map(values, args))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_round_trip(kind):
    """Any values of any message type come back equal, as the same type."""
    hints = typing.get_type_hints(kind)

    @settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__}))
    def check(message):
        back = decode(encode(message))
        assert type(back) is kind
        assert back == message

    check()


def test_tags_are_distinct():
    """No two message types share a tag."""
    assert len({kind.__struct_config__.tag for kind in KINDS}) == len(KINDS)


@settings(max_examples=200, deadline=None, database=None)
@given(st.binary(max_size=60))
def test_random_bytes_are_a_message_or_a_wire_error(frame):
    """No other exception escapes from decode."""
    try:
        decode(frame)
    except WireError as err:
        assert "malformed" in str(err)


@pytest.mark.parametrize(
    "body",
    [
        {"type": "no such"},
        {"type": "abort"},
        {"type": "abort", "request_id": 3},
        {"type": "token", "request_id": "a", "index": "b", "token_id": 1},
        [],
        None,
    ],
)
def test_unknown_and_mistyped_messages_are_wire_errors(body):
    """The types of fields are checked at the border."""
    with pytest.raises(WireError, match="malformed"):
        decode(msgspec.msgpack.encode(body))


def test_too_large_messages_are_refused_on_both_sides(monkeypatch):
    """Neither sent nor decoded above the limit."""
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(WireError, match=r"Submit of 1,\d+ bytes exceeds 1,000"):
        encode(messages.Submit("a", b"x" * 1000))
    with pytest.raises(WireError, match="exceeds"):
        decode(b"x" * 1001)


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=50))
@settings(max_examples=50, deadline=None, database=None)
def test_packed_ids_come_back(ids):
    """As a read-only uint32 view of the bytes."""
    for given_as in (ids, np.asarray(ids, dtype=np.uint32), np.asarray(ids, dtype=np.int64)):
        back = unpack_ids(pack_ids(given_as))
        assert back.dtype == np.uint32
        assert back.tolist() == ids
        assert not back.flags.writeable


@pytest.mark.parametrize(
    "ids",
    [
        [-1],
        [1 << 32],
        [1 << 70],
        np.array([-1]),
        np.array([1 << 40]),
        [1.5],
        np.array([1.0]),
        ["a"],
        [[1, 2]],
        [True],
    ],
    ids=str,
)
def test_ids_that_are_no_uint32_are_refused_not_wrapped(ids):
    """Also those in numpy arrays, whose conversion would wrap around in silence."""
    with pytest.raises((OverflowError, TypeError, ValueError)):
        pack_ids(ids)


def test_unpack_refuses_a_cut_id():
    """A length that is no multiple of 4 is an error."""
    with pytest.raises(WireError, match="multiple of 4"):
        unpack_ids(b"12345")


SPECIAL = [
    errors.InvalidRequest("prompt", "empty"),
    errors.QueueFull("full", retry_after_s=2.5),
    errors.PeerError("tcp://x:1", "dead"),
    errors.DeviceError("cudaErrorAssert", "boom", sticky=False),
]
PLAIN = set(errors.AioprefillError.__subclasses__()) - set(map(type, SPECIAL))
ERRORS = [*SPECIAL, *(kind("text") for kind in sorted(PLAIN, key=lambda kind: kind.__name__))]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_keep_class_text_and_facts_on_the_wire(error):
    """A caller can tell them apart by class, exactly as in process."""
    back = error_from(decode(encode(failed_from(error, "r1"))))
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


def test_code_from_a_newer_server_is_the_base_class():
    """With its code in the text, so that nothing is lost."""
    unknown = error_from(messages.Failed("new_code", "text"))
    assert (type(unknown), str(unknown)) == (errors.AioprefillError, "new_code: text")


def test_a_refused_frame_still_tells_whose_it_is() -> None:
    """So that whoever waits for its answer gets one; garbage has no ids."""
    wrong = msgspec.msgpack.encode({"type": "submit", "request_id": "r", "priority": 1.5})
    assert ids_of(wrong) == ("r", None)
    for frame in (b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"request_id": 5})):
        assert ids_of(frame) == (None, None)
