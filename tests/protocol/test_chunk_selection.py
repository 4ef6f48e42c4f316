from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intellect_protocol.errors import WireError
from intellect_protocol.network.chunk_frames import (
    Have,
    Ticket,
    Want,
    decode_frame,
    encode_frame,
    pack_bits,
    unpack_bits,
)
from intellect_protocol.network.chunk_selection import (
    Selection,
    Source,
    indexes_of,
    mask_of,
    random_index,
)
from intellect_protocol.network.chunk_slots import Reveal, UploadSlots
from intellect_protocol.network.chunk_tickets import check_ticket, issue_ticket

A, B, C = b"a", b"b", b"c"
masks = st.integers(min_value=0, max_value=(1 << 60) - 1)


@given(mask=masks)
def test_masks_lists_and_bitfields_agree(mask: int) -> None:
    assert mask_of(indexes_of(mask)) == mask == unpack_bits(pack_bits(mask))


@given(mask=masks.filter(bool), seed=st.integers())
def test_a_random_index_is_a_member(mask: int, seed: int) -> None:
    assert mask >> random_index(mask, Random(seed)) & 1


def test_every_member_can_be_chosen() -> None:
    random = Random(1)
    assert {random_index(0b1011001, random) for _ in range(500)} == {0, 3, 4, 6}


@given(offers=st.lists(masks, min_size=1, max_size=6), wanted=masks, seed=st.integers())
def test_the_chunk_taken_is_wanted_offered_and_the_rarest(offers: list[int], wanted: int, seed: int) -> None:
    selection = Selection(60, wanted, Random(seed))
    for number, mask in enumerate(offers):
        selection.offer(bytes([number]), mask)

    def holders(index: int) -> int:
        return sum(mask >> index & 1 for mask in offers)

    free = wanted
    while (index := selection.take(bytes([0]), now=0.0, patience_s=1.0)) is not None:
        assert free & offers[0] & 1 << index
        assert holders(index) == min(holders(other) for other in indexes_of(free & offers[0]))
        free &= ~(1 << index)
    assert not free & offers[0]


def test_what_is_to_be_avoided_is_not_asked_for() -> None:
    selection = Selection(4, 0b1111, Random(1))
    selection.offer(A, 0b1111)
    assert selection.take(A, now=0.0, patience_s=1.0, avoid=0b0111) == 3
    assert selection.take(A, now=0.0, patience_s=1.0, avoid=0b0111) is None
    assert selection.take(A, now=0.0, patience_s=1.0) is not None


def test_a_source_with_a_late_request_does_not_count_as_delivering() -> None:
    source = Source(16384, 8)
    assert source.delivers(0.0, 1.0)
    source.asked(0.0)
    assert source.delivers(0.9, 1.0)
    assert not source.delivers(1.0, 1.0)
    source.answered(0.0)
    assert source.delivers(1.0, 1.0)
    source.failed(2.0)
    assert not source.delivers(2.1, 1.0)


def test_the_endgame_asks_a_late_chunk_of_one_more_peer_and_no_third() -> None:
    selection = Selection(1, 1, Random(1))
    for peer in (A, B, C):
        selection.offer(peer, 1)
    assert selection.take(A, now=0.0, patience_s=1.0) == 0
    assert selection.take(B, now=0.9, patience_s=1.0) is None
    assert selection.take(B, now=1.0, patience_s=1.0) == 0
    assert selection.take(C, now=9.0, patience_s=1.0) is None
    assert sorted(selection.verified(0)) == [A, B]
    assert selection.missing == 0


def test_what_a_lost_peer_was_asked_for_is_free_again() -> None:
    selection = Selection(3, 0b111, Random(1))
    selection.offer(A, 0b111)
    taken = selection.take(A, now=0.0, patience_s=1.0)
    selection.remove(A)
    selection.offer(B, 0b111)
    assert taken in {selection.take(B, now=0.0, patience_s=99.0) for _ in range(3)}


def test_two_bad_chunks_ban_and_failures_in_a_row_pause_ever_longer() -> None:
    source = Source(16384, 8)
    source.bad_chunks = 1
    assert not source.banned
    source.bad_chunks = 2
    assert source.banned
    assert source.room(0.0) == 0
    slow = Source(16384, 8)
    pauses = []
    for _ in range(3):
        slow.failed(100.0)
        pauses.append(slow.paused_until - 100.0)
    assert pauses == sorted(set(pauses))
    assert not slow.left
    slow.failed(100.0)
    assert slow.left


def test_a_fast_source_gets_more_requests_than_a_slow_one() -> None:
    fast, slow = Source(1 << 20, 8), Source(1 << 20, 8)
    for _ in range(8):
        fast.delivered(1 << 20, 0.01)
        slow.delivered(1 << 20, 5.0)
    assert fast.room(0.0) == 8
    assert slow.room(0.0) == 2


def test_slots_are_limited_renewable_and_go_to_those_who_gave() -> None:
    slots = UploadSlots(2, lease_s=10.0)
    assert slots.ask(A, {}, 0.0) == slots.ask(B, {}, 0.0) == 0.0
    assert slots.ask(C, {}, 1.0) > 0.0
    given = {A: 100, C: 50}
    assert slots.ask(B, given, 2.0) > 0.0, "B gave nothing and somebody waits who did"
    assert slots.ask(C, given, 3.0) == 0.0
    assert slots.ask(A, given, 4.0) == 0.0, "the best keeps its slot"
    assert [slots.holds(peer, 5.0) for peer in (A, B, C)] == [True, False, True]
    assert not slots.holds(A, 14.5)
    slots.release(A)
    assert slots.ask(B, given, 6.0) == 0.0


@given(seed=st.integers(), askers=st.integers(2, 9), count=st.integers(1, 4))
def test_nobody_waits_for_a_slot_for_ever(seed: int, askers: int, count: int) -> None:
    """Equal peers that ask whenever they are told to all get a slot within a bounded time."""
    random = Random(seed)
    slots = UploadSlots(count, lease_s=1.0)
    next_ask = {bytes([number]): random.random() for number in range(askers)}
    served: set[bytes] = set()
    for _ in range(3000):
        peer = min(next_ask, key=lambda one: next_ask[one])
        now = next_ask[peer]
        wait = slots.ask(peer, {}, now)
        if wait == 0.0:
            served.add(peer)
        assert sum(slots.holds(one, now) for one in next_ask) <= count
        next_ask[peer] = now + (wait or 0.5)
        if len(served) == askers:
            return
    raise AssertionError(f"{askers - len(served)} of {askers} never got a slot")


def always(peer: bytes) -> bool:
    return True


def reveal_of(count: int, seed: int = 1) -> Reveal:
    reveal = Reveal(count, 1.0, Random(seed))
    reveal.available = (1 << count) - 1
    return reveal


@given(count=st.integers(1, 70), peers=st.integers(2, 8), seed=st.integers())
def test_an_origin_shows_each_chunk_once_while_all_goes_well(count: int, peers: int, seed: int) -> None:
    reveal = reveal_of(count, seed)
    names = [bytes([number]) for number in range(peers)]
    has = dict.fromkeys(names, 0)
    shown: list[int] = []
    for name in names:
        reveal.update(name, 0, 0.0)
    for step in range(10 * count + 10):
        now = 0.01 * step
        news = reveal.advance(now, always)
        for peer, indexes in news.items():
            shown += indexes
            has[peer] |= mask_of(indexes)
        for name in names:
            # Each gets one chunk from the others between two steps.
            lacks = indexes_of(mask_of(shown) & ~has[name])
            has[name] |= mask_of(lacks[:1])
            reveal.update(name, has[name], now)
    assert sorted(shown) == list(range(count))


def test_a_chunk_that_does_not_turn_up_is_shown_to_another() -> None:
    reveal = reveal_of(1)
    reveal.update(A, 0, 0.0)
    assert reveal.advance(0.0, always) == {A: [0]}
    reveal.update(B, 0, 0.5)
    assert reveal.advance(0.5, always) == {}
    assert reveal.advance(1.1, always) == {B: [0]}


def test_a_peer_that_cannot_reach_the_others_gets_everything_from_the_origin() -> None:
    reveal = reveal_of(20)
    reveal.update(A, reveal.available, 0.0)
    reveal.update(B, 0, 0.0)
    now, has = 0.0, 0
    assert reveal.advance(now, always) == {}
    now = 1.1
    while has != reveal.available:
        now += 0.01
        assert now < 2.0, "it waits out more than one lease"
        for indexes in reveal.advance(now, always).values():
            has |= mask_of(indexes)
        reveal.update(B, has, now)


def test_nothing_is_shown_to_a_peer_without_a_slot_nor_what_the_origin_lacks() -> None:
    reveal = reveal_of(8)
    reveal.available = 0b11
    reveal.update(A, 0, 0.0)
    reveal.update(B, 0, 0.0)
    assert {peer: sorted(i) for peer, i in reveal.advance(0.0, lambda p: p == A).items()} == {A: [0, 1]}


def test_a_ticket_is_good_for_its_run_peer_and_time_alone() -> None:
    key, run_id, peer = b"k" * 32, b"r" * 32, b"p" * 38
    token = issue_ticket(key, run_id, peer, 1000)
    assert check_ticket(key, run_id, token, 999) == peer
    assert check_ticket(key, run_id, token, 1000) is None
    assert check_ticket(b"x" * 32, run_id, token, 999) is None
    assert check_ticket(key, b"s" * 32, token, 999) is None
    for at in range(len(token)):
        changed = token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :]
        assert check_ticket(key, run_id, changed, 999) is None


@given(token=st.text(max_size=600))
def test_no_text_passes_for_a_ticket(token: str) -> None:
    assert check_ticket(b"k" * 32, b"r" * 32, token, 0) is None


@given(data=st.binary(max_size=200))
def test_rubbish_is_no_frame(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_frame(data)


@pytest.mark.parametrize(
    "frame",
    [
        Want(b"short", b""),
        Want(b"c" * 32, bytes(40_000)),
        Have(b"c" * 32, [-1]),
        Have(b"c" * 32, [1 << 40]),
        Have(b"c" * 32, [0] * 5000),
        Ticket("example.org", 80, "t", 1.0),
        Ticket("127.0.0.1", 70_000, "t", 1.0),
        Ticket("127.0.0.1", 80, "t\r\nX: y", 1.0),
        Ticket("127.0.0.1", 80, "t", float("nan")),
    ],
)
def test_a_frame_out_of_its_limits_is_refused(frame: Have | Ticket | Want) -> None:
    with pytest.raises(WireError):
        decode_frame(encode_frame(frame))
