"""The contract of endpoints and channels as tests: subclass `ChannelContractSuite`.

    class TestMyChannel(ChannelContractSuite):
        @pytest.fixture
        def channel_factory(self):
            return MyFactory()

Importing this module needs pytest. Tests that a factory cannot support are skipped and say so.
"""

from __future__ import annotations

import random
import threading
import time

import pytest

from dualpath.base.errors import DeadlineExceeded, LeaseLost, PeerLost, TransferError
from dualpath.base.ids import EngineId, MiB
from dualpath.testing.channel_kit import (
    DEADLINE_S,
    NAME,
    SLOT_BYTES,
    SLOTS,
    ChannelSuiteFixtures,
    OpenEngine,
    Received,
    buffers,
    pull_spans,
    whole,
)
from dualpath.testing.channel_peer import (
    REMOTE_SLOT_BYTES,
    REMOTE_SLOTS,
    ChannelFactory,
    RemotePeer,
    pattern,
)
from dualpath.testing.results import wait_until
from dualpath.transfer import Channel, RemoteSpan

__all__ = ["ChannelContractSuite"]

_SHORT_S = 0.2


class _PullTests(ChannelSuiteFixtures):
    @pytest.mark.parametrize("seed", range(8))
    def test_any_spans_arrive_exactly(self, engine: OpenEngine, seed: int) -> None:
        rng = random.Random(seed)
        owner, puller = engine("owner"), engine("puller")
        lease = owner.lease(SLOTS, seed=10)
        channel = puller.connect(owner)
        spans: list[RemoteSpan] = []
        for _ in range(rng.choice((1, 2, 50, 700))):
            offset = rng.randrange(SLOT_BYTES)
            length = rng.randrange(min(SLOT_BYTES - offset, rng.choice((1, 300, SLOT_BYTES))) + 1)
            spans.append(RemoteSpan(rng.choice(lease.slots), offset, length))
        into = buffers(spans)
        moved = pull_spans(channel, lease.stamp, spans, into).result(DEADLINE_S)
        assert moved == sum(span.length for span in spans)
        for span, target in zip(spans, into, strict=True):
            content = pattern(10 + lease.slots.index(span.slot), SLOT_BYTES)
            assert target == content[span.offset : span.offset + span.length]

    def test_destinations_may_be_parts_of_a_pool(self, engine: OpenEngine) -> None:
        owner, puller = engine("owner"), engine("puller")
        source, target = owner.lease(3, seed=20), puller.lease(3, seed=30)
        channel = puller.connect(owner)
        spans = [RemoteSpan(slot, 100, 5000) for slot in source.slots]
        into = [target.view(index)[7 : 7 + 5000] for index in range(3)]
        channel.pull(NAME, source.stamp, spans, into, deadline_s=DEADLINE_S).result(DEADLINE_S)
        for index in range(3):
            expected = bytearray(pattern(30 + index, SLOT_BYTES))
            expected[7 : 7 + 5000] = pattern(20 + index, SLOT_BYTES)[100:5100]
            assert target.view(index) == expected

    def test_no_spans_are_no_bytes(self, engine: OpenEngine) -> None:
        owner, puller = engine("owner"), engine("puller")
        assert pull_spans(puller.connect(owner), 1, [], []).result(DEADLINE_S) == 0

    def test_a_lease_that_is_gone_is_lease_lost(self, engine: OpenEngine) -> None:
        owner, puller = engine("owner"), engine("puller")
        channel = puller.connect(owner)
        first, second = owner.lease(1, seed=1), owner.lease(1, seed=2)
        spans = whole(first.slots, SLOT_BYTES)
        stamp = first.stamp
        wrong_slot = pull_spans(channel, second.stamp, spans, buffers(spans))
        assert isinstance(wrong_slot.exception(DEADLINE_S), LeaseLost)
        never_was = pull_spans(channel, stamp + 1000, spans, buffers(spans))
        assert isinstance(never_was.exception(DEADLINE_S), LeaseLost)
        first.release()
        released = pull_spans(channel, stamp, spans, buffers(spans))
        assert isinstance(released.exception(DEADLINE_S), LeaseLost)
        again = owner.lease(1, seed=3)
        assert again.slots == first.slots
        leased_anew = pull_spans(channel, stamp, spans, buffers(spans))
        assert isinstance(leased_anew.exception(DEADLINE_S), LeaseLost)
        into = buffers(spans)
        assert pull_spans(channel, again.stamp, spans, into).result(DEADLINE_S) == SLOT_BYTES
        assert into[0] == pattern(3, SLOT_BYTES)

    @pytest.mark.parametrize(
        "span",
        [
            RemoteSpan(SLOTS, 0, 1),
            RemoteSpan(-1, 0, 1),
            RemoteSpan(0, SLOT_BYTES, 1),
            RemoteSpan(0, 1, SLOT_BYTES),
            RemoteSpan(0, -1, 1),
        ],
    )
    def test_a_span_outside_its_slot_is_a_value_error(
        self, engine: OpenEngine, span: RemoteSpan
    ) -> None:
        owner, puller = engine("owner"), engine("puller")
        lease = owner.lease(SLOTS, seed=1)
        channel = puller.connect(owner)
        with pytest.raises(ValueError):
            pull_spans(channel, lease.stamp, [span], [bytearray(span.length)])

    def test_destinations_that_do_not_fit_are_a_value_error(self, engine: OpenEngine) -> None:
        owner, puller = engine("owner"), engine("puller")
        lease = owner.lease(1, seed=1)
        channel = puller.connect(owner)
        spans = [RemoteSpan(lease.slots[0], 0, 10)]
        for into in ([bytearray(9)], [bytearray(11)], [], [bytearray(10), bytearray(10)]):
            with pytest.raises(ValueError):
                pull_spans(channel, lease.stamp, spans, into)
        with pytest.raises(ValueError):
            channel.pull(NAME, lease.stamp, spans, [memoryview(bytes(10))], deadline_s=1.0)

    def test_a_pull_without_time_fails_by_deadline(self, engine: OpenEngine) -> None:
        owner, puller = engine("owner"), engine("puller")
        lease = owner.lease(1, seed=1)
        spans = whole(lease.slots, SLOT_BYTES)
        late = pull_spans(puller.connect(owner), lease.stamp, spans, buffers(spans), deadline_s=0.0)
        assert isinstance(late.exception(DEADLINE_S), DeadlineExceeded)

    def test_a_release_during_pulls_never_gives_wrong_bytes(self, engine: OpenEngine) -> None:
        owner, puller = engine("owner"), engine("puller")
        channel = puller.connect(owner)
        for round_ in range(40):
            lease = owner.lease(SLOTS, seed=100)
            spans = whole(lease.slots, SLOT_BYTES) * 4
            into = buffers(spans)
            pull = pull_spans(channel, lease.stamp, spans, into)
            if round_ % 4:
                time.sleep(round_ * 2e-5)  # Spreads the release over the pull; decides nothing.
            lease.release()
            reused = owner.pool.try_lease("next", SLOTS)
            if reused is not None:
                for index in range(SLOTS):
                    reused.view(index)[:] = bytes(SLOT_BYTES)
            error = pull.exception(DEADLINE_S)
            assert error is None or isinstance(error, LeaseLost)
            if error is None:
                for index, target in enumerate(into):
                    assert target == pattern(100 + index % SLOTS, SLOT_BYTES)
            if reused is not None:
                reused.release()
            wait_until(lambda: owner.pool.n_free == SLOTS, "slots do not come back")

    def test_many_threads_pull_in_both_directions(self, engine: OpenEngine) -> None:
        one, two = engine("one"), engine("two")
        leases = {one.name: one.lease(SLOTS, seed=200), two.name: two.lease(SLOTS, seed=300)}
        channels = [one.connect(two), two.connect(one)]
        seeds = {one.name: 200, two.name: 300}
        wrong: list[str] = []

        def pull_some(channel: Channel, number: int) -> None:
            rng = random.Random(number)
            lease = leases[channel.peer]
            for _ in range(30):
                chosen = [rng.randrange(SLOTS) for _ in range(rng.randrange(1, 6))]
                spans = [RemoteSpan(lease.slots[i], number, 9000) for i in chosen]
                into = buffers(spans)
                pull_spans(channel, lease.stamp, spans, into).result(DEADLINE_S)
                for index, target in zip(chosen, into, strict=True):
                    content = pattern(seeds[channel.peer] + index, SLOT_BYTES)
                    if target != content[number : number + 9000]:
                        wrong.append(f"{channel.peer} slot {index}")

        threads = [
            threading.Thread(target=pull_some, args=(channels[number % 2], number))
            for number in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert wrong == []
        assert one.endpoint.stats()[two.name].pulls == 4 * 30
        assert two.endpoint.stats()[one.name].pulled_bytes > 0

    def test_hundreds_of_pulls_wait_their_turn(self, engine: OpenEngine) -> None:
        owner, puller = engine("owner"), engine("puller")
        lease = owner.lease(1, seed=1)
        channel = puller.connect(owner)
        spans = [RemoteSpan(lease.slots[0], 5, 3000)]
        targets = [buffers(spans) for _ in range(500)]
        pulls = [pull_spans(channel, lease.stamp, spans, into) for into in targets]
        assert [pull.result(DEADLINE_S) for pull in pulls] == [3000] * 500
        assert all(into[0] == pattern(1, SLOT_BYTES)[5:3005] for into in targets)


class _MessageTests(ChannelSuiteFixtures):
    def test_messages_arrive_in_order(self, engine: OpenEngine) -> None:
        sender, receiver = engine("sender"), engine("receiver")
        channel = sender.connect(receiver)
        bodies = [b"", b"x" * MiB, *(str(number).encode() for number in range(500))]
        for body in bodies:
            channel.notify(body)
        received = receiver.messages.wait(len(bodies))
        assert received == [Received(sender.name, body) for body in bodies]
        with pytest.raises(ValueError):
            channel.notify(b"x" * (MiB + 1))
        assert sender.endpoint.stats()[receiver.name].notifies_sent == len(bodies)
        assert receiver.endpoint.stats()[sender.name].notifies_received == len(bodies)

    def test_messages_of_many_threads_are_all_whole(self, engine: OpenEngine) -> None:
        sender, receiver = engine("sender"), engine("receiver")
        channel = sender.connect(receiver)

        def send(number: int) -> None:
            for turn in range(50):
                channel.notify(f"{number} {turn} ".encode() + b"." * 20_000)

        threads = [threading.Thread(target=send, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        bodies = [item.body for item in receiver.messages.wait(300)]
        for number in range(6):
            own = [body for body in bodies if isinstance(body, bytes) and body[0] == 48 + number]
            assert own == [f"{number} {t} ".encode() + b"." * 20_000 for t in range(50)]

    def test_a_message_can_be_sent_while_one_is_handled(self, engine: OpenEngine) -> None:
        """Two engines that answer each other from their events do not wait for each other."""
        handled = threading.Event()
        one = engine("one")
        two = engine("two", on_message=handled.set)
        one.connect(two).notify(b"ask")
        assert handled.wait(DEADLINE_S)
        two.connect(one).notify(b"answer")
        assert one.messages.wait(1) == [Received(two.name, b"answer")]


class _ConnectionTests(ChannelSuiteFixtures):
    def test_a_peer_has_one_channel(self, engine: OpenEngine) -> None:
        one, two = engine("one"), engine("two")
        channel = one.connect(two)
        assert one.connect(two) is channel
        assert channel.peer == two.name

    def test_connecting_to_nobody_is_peer_lost(self, engine: OpenEngine) -> None:
        one, two = engine("one"), engine("two")
        with pytest.raises(PeerLost):
            one.endpoint.connect(two.endpoint.address, EngineId("three"), deadline_s=DEADLINE_S)
        with pytest.raises(PeerLost):
            one.endpoint.connect("nonsense", two.name, deadline_s=DEADLINE_S)
        two.endpoint.close()
        with pytest.raises(PeerLost):
            one.connect(two)
        assert one.losses.items == []

    def test_another_secret_is_refused(
        self, engine: OpenEngine, channel_factory: ChannelFactory
    ) -> None:
        if not channel_factory.authenticated:
            pytest.skip("these endpoints know no secrets")
        owner, stranger = engine("owner"), engine("stranger", secret=b"another" * 4)
        with pytest.raises(PeerLost):
            stranger.connect(owner)
        with pytest.raises(PeerLost):
            owner.connect(stranger)
        friend = engine("friend")
        friend.connect(owner).notify(b"hello")
        assert owner.messages.wait(1) == [Received(friend.name, b"hello")]

    def test_a_peer_that_closes_is_lost_once(self, engine: OpenEngine) -> None:
        one, two = engine("one"), engine("two")
        channel = one.connect(two)
        two.connect(one)  # Both directions: still one loss.
        lease = two.lease(1, seed=1)
        two.endpoint.close()
        assert [loss.peer for loss in one.losses.wait(1)] == [two.name]
        assert two.losses.items == []
        spans = whole(lease.slots, SLOT_BYTES)
        pull = pull_spans(channel, lease.stamp, spans, buffers(spans))
        assert isinstance(pull.exception(DEADLINE_S), PeerLost)
        with pytest.raises(PeerLost):
            channel.notify(b"anyone?")
        one.endpoint.close()
        assert len(one.losses.items) == 1

    def test_a_restarted_peer_is_connected_again(self, engine: OpenEngine) -> None:
        one, two = engine("one"), engine("two")
        one.connect(two)
        two.endpoint.close()
        one.losses.wait(1)
        again = engine("two")
        lease = again.lease(1, seed=7)
        spans = whole(lease.slots, SLOT_BYTES)
        into = buffers(spans)
        channel = one.connect(again)
        assert pull_spans(channel, lease.stamp, spans, into).result(DEADLINE_S) == SLOT_BYTES
        assert into[0] == pattern(7, SLOT_BYTES)
        again.connect(one).notify(b"back")
        assert one.messages.wait(1) == [Received(again.name, b"back")]
        assert len(one.losses.items) == 1

    def test_disconnecting_is_silent_here_and_a_loss_there(self, engine: OpenEngine) -> None:
        one, two = engine("one"), engine("two")
        channel = one.connect(two)
        two.connect(one)
        lease = two.lease(1, seed=5)
        spans = whole(lease.slots, SLOT_BYTES)
        one.endpoint.disconnect(two.name)
        one.endpoint.disconnect(two.name)
        late = pull_spans(channel, lease.stamp, spans, buffers(spans))
        assert isinstance(late.exception(DEADLINE_S), PeerLost)
        assert [loss.peer for loss in two.losses.wait(1)] == [one.name]
        into = buffers(spans)
        again = one.connect(two)
        assert pull_spans(again, lease.stamp, spans, into).result(DEADLINE_S) == SLOT_BYTES
        assert into[0] == pattern(5, SLOT_BYTES)
        assert one.losses.items == []
        assert len(two.losses.items) == 1

    def test_a_reconnect_right_after_a_disconnect_survives(self, engine: OpenEngine) -> None:
        """The peer may not have noticed the end of the old connection when the new one comes."""
        one, two = engine("one"), engine("two")
        lease = two.lease(1, seed=5)
        spans = whole(lease.slots, SLOT_BYTES)
        for turn in range(1, 11):
            channel = one.connect(two)
            into = buffers(spans)
            assert pull_spans(channel, lease.stamp, spans, into).result(DEADLINE_S) == SLOT_BYTES
            one.endpoint.disconnect(two.name)
            one.connect(two).notify(b"%d" % turn)
            one.endpoint.disconnect(two.name)
        assert one.losses.items == []
        # A connection that was given up before the peer counted it is no loss to the peer.
        wait_until(lambda: len(two.losses.items) >= 10, "losses are missing")
        assert len(two.losses.items) <= 20

    def test_statistics_count_what_passed(self, engine: OpenEngine) -> None:
        owner, puller = engine("owner"), engine("puller")
        lease = owner.lease(2, seed=1)
        channel = puller.connect(owner)
        spans = whole(lease.slots, SLOT_BYTES)
        pull_spans(channel, lease.stamp, spans, buffers(spans)).result(DEADLINE_S)
        failed = pull_spans(channel, lease.stamp + 1000, spans, buffers(spans))
        assert isinstance(failed.exception(DEADLINE_S), TransferError)
        stats = puller.endpoint.stats()[owner.name]
        assert (stats.pulls, stats.pull_failures) == (2, 1)
        assert stats.pulled_bytes == 2 * SLOT_BYTES
        assert stats.pull_s > 0


class _RemoteTests(ChannelSuiteFixtures):
    def test_a_peer_in_another_process_is_pulled_from(
        self, engine: OpenEngine, remote: RemotePeer
    ) -> None:
        puller = engine("puller")
        channel = puller.endpoint.connect(remote.address, remote.engine, deadline_s=DEADLINE_S)
        spans = whole(remote.slots, REMOTE_SLOT_BYTES)
        into = buffers(spans)
        moved = pull_spans(channel, remote.stamp, spans, into).result(DEADLINE_S)
        assert moved == REMOTE_SLOTS * REMOTE_SLOT_BYTES
        assert all(into[i] == pattern(900 + i, REMOTE_SLOT_BYTES) for i in range(REMOTE_SLOTS))
        remote.release()
        lost = pull_spans(channel, remote.stamp, spans, into)
        assert isinstance(lost.exception(DEADLINE_S), LeaseLost)

    def test_a_peer_that_hangs_is_a_deadline_and_spoils_nothing(
        self, engine: OpenEngine, remote: RemotePeer
    ) -> None:
        puller = engine("puller")
        channel = puller.endpoint.connect(remote.address, remote.engine, deadline_s=DEADLINE_S)
        spans = whole(remote.slots, REMOTE_SLOT_BYTES)
        remote.stop()
        into = buffers(spans)
        error = pull_spans(channel, remote.stamp, spans, into, deadline_s=_SHORT_S).exception(
            DEADLINE_S
        )
        assert error is None or isinstance(error, DeadlineExceeded)
        if error is None:  # One-sided: the owner takes no part.
            assert into[0] == pattern(900, REMOTE_SLOT_BYTES)
        else:
            into = [bytearray(b"\xee" * REMOTE_SLOT_BYTES) for _ in spans]
        expected = [bytes(target) for target in into]
        remote.resume()
        # The late bytes of the first pull come before those of the second, and go nowhere.
        second = buffers(spans)
        pull_spans(channel, remote.stamp, spans, second).result(DEADLINE_S)
        assert second[-1] == pattern(900 + REMOTE_SLOTS - 1, REMOTE_SLOT_BYTES)
        assert into == expected
        assert puller.losses.items == []

    def test_a_peer_that_takes_no_messages_is_lost(
        self, engine: OpenEngine, remote: RemotePeer
    ) -> None:
        puller = engine("puller")
        channel = puller.endpoint.connect(remote.address, remote.engine, deadline_s=DEADLINE_S)
        remote.stop()

        def flood() -> None:
            for _ in range(200):  # Far more than any socket buffer holds.
                channel.notify(b"x" * MiB)

        with pytest.raises(PeerLost):
            flood()
        assert [loss.peer for loss in puller.losses.wait(1)] == [remote.engine]

    @pytest.mark.parametrize("after", [0, 2])
    def test_a_peer_killed_during_pulls_is_lost_once(
        self, engine: OpenEngine, remote: RemotePeer, after: int
    ) -> None:
        puller = engine("puller")
        channel = puller.endpoint.connect(remote.address, remote.engine, deadline_s=DEADLINE_S)
        spans = whole(remote.slots, REMOTE_SLOT_BYTES)
        targets = [buffers(spans) for _ in range(6)]
        pulls = [pull_spans(channel, remote.stamp, spans, into) for into in targets]
        for pull in pulls[:after]:
            pull.result(DEADLINE_S)
        remote.kill()
        errors = [pull.exception(DEADLINE_S) for pull in pulls]
        for error, into in zip(errors, targets, strict=True):
            assert error is None or isinstance(error, PeerLost)
            if error is None:
                assert into[0] == pattern(900, REMOTE_SLOT_BYTES)
        assert [loss.peer for loss in puller.losses.wait(1)] == [remote.engine]
        after_loss = pull_spans(channel, remote.stamp, spans, targets[0])
        assert isinstance(after_loss.exception(DEADLINE_S), PeerLost)
        assert len(puller.losses.items) == 1


class ChannelContractSuite(_PullTests, _MessageTests, _ConnectionTests, _RemoteTests):
    """Every promise of `dualpath.transfer.contract`. Checks after each test that nothing leaked."""
