"""When a peer is lost: connections are doubles that report their end on a thread of their own."""

from __future__ import annotations

import threading
import time

import pytest

from dualpath.base.errors import DeadlineExceeded, PeerLost
from dualpath.base.ids import EngineId
from dualpath.testing import wait_until
from dualpath.transfer import EndpointEvents
from dualpath.transfer.handshake import Life
from dualpath.transfer.relations import Relation, Relations

PEER = EngineId("peer")
OLD, NEW = Life(b"o" * 16, 0), Life(b"n" * 16, 0)


class Connection:
    """Ends when it is aborted, as a reading thread does; `ended_by` holds it back when asked."""

    def __init__(self, relations: Relations, relation: Relation, *, stuck: bool = False) -> None:
        self.peer = PEER
        self.aborted: str | None = None
        self._relations = relations
        self._stuck = stuck
        relations.add(relation, self)  # type: ignore[arg-type]

    def abort(self, reason: str) -> None:
        if self.aborted is None:
            self.aborted = reason
            if not self._stuck:
                threading.Thread(target=self.break_off, args=(reason,)).start()

    def break_off(self, reason: str) -> None:
        self._relations.ended(self, reason)  # type: ignore[arg-type]


class World:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.relations = Relations(
            EngineId("self"),
            EndpointEvents(
                lambda peer, message: self.events.append(message.decode()),
                lambda peer, reason: self.events.append(f"lost: {reason}"),
            ),
        )

    def enter(self, life: Life, epoch: int | None = None, wait_s: float = 10.0) -> Relation | None:
        if epoch is None:
            epoch = self.relations.epoch(PEER)
        return self.relations.enter(PEER, life, epoch, time.monotonic() + wait_s)

    def relation(self, life: Life) -> Relation:
        relation = self.enter(life)
        assert relation is not None
        return relation


@pytest.fixture
def world() -> World:
    return World()


def test_both_directions_are_one_relation_and_one_loss(world: World) -> None:
    relation = world.relation(OLD)
    first = Connection(world.relations, relation)
    assert world.enter(OLD) is relation
    second = Connection(world.relations, relation)
    first.break_off("reset")
    wait_until(lambda: second.aborted is not None, "the other direction goes on")
    second.break_off("reset")
    assert world.events == ["lost: reset"]


def test_no_message_follows_the_loss(world: World) -> None:
    relation = world.relation(OLD)
    connection = Connection(world.relations, relation)
    world.relations.deliver(relation, b"one")
    connection.break_off("reset")
    world.relations.deliver(relation, b"two")
    assert world.events == ["one", "lost: reset"]


def test_a_new_life_waits_until_the_old_one_was_reported(world: World) -> None:
    old = world.relation(OLD)
    Connection(world.relations, old)
    new = world.relation(NEW)
    assert new is not old
    assert world.events == ["lost: peer came back with a new life"]


def test_an_old_life_that_does_not_end_is_a_deadline(world: World) -> None:
    Connection(world.relations, world.relation(OLD), stuck=True)
    with pytest.raises(DeadlineExceeded):
        world.enter(NEW, wait_s=0.02)


def test_a_life_that_never_connected_makes_room_without_an_event(world: World) -> None:
    forgotten = world.relation(OLD)
    world.relation(NEW)
    late = Connection(world.relations, forgotten)
    assert late.aborted is not None
    assert world.events == []


def test_an_older_life_is_refused(world: World) -> None:
    Connection(world.relations, world.relation(Life(b"o" * 16, 5)))
    assert world.enter(Life(b"o" * 16, 4)) is None
    assert world.events == []


def test_after_giving_up_a_life_the_same_one_needs_a_new_epoch(world: World) -> None:
    """The peer's side of the old relation must end before it counts us again."""
    before = world.relations.epoch(PEER)
    Connection(world.relations, world.relation(OLD))
    world.relations.drop(PEER)
    assert world.enter(OLD, epoch=before) is None
    after = world.relations.epoch(PEER)
    assert after > before
    assert world.enter(OLD, epoch=after) is not None
    assert world.events == []


def test_the_end_of_an_old_life_does_not_outdate_a_greeting_of_the_new_one(world: World) -> None:
    announced = world.relations.epoch(PEER)
    Connection(world.relations, world.relation(OLD)).break_off("reset")
    relation = world.enter(NEW, epoch=announced)
    assert relation is not None
    assert world.relations.epoch(PEER) == announced == relation.epoch


def test_a_callback_that_fails_does_not_block_the_peer_for_ever() -> None:
    def fail(peer: EngineId, reason: str) -> None:
        raise RuntimeError("a bug above")

    relations = Relations(EngineId("self"), EndpointEvents(lambda peer, message: None, fail))
    relation = relations.enter(PEER, OLD, 0, time.monotonic() + 10)
    assert relation is not None
    with pytest.raises(RuntimeError):
        Connection(relations, relation).break_off("reset")
    assert relations.enter(PEER, NEW, 1, time.monotonic() + 10) is not None


def test_a_closed_endpoint_takes_nothing_and_says_nothing(world: World) -> None:
    relation = world.relation(OLD)
    connection = Connection(world.relations, relation)
    world.relations.close()
    wait_until(lambda: connection.aborted is not None, "the connection goes on")
    with pytest.raises(PeerLost):
        world.enter(OLD, epoch=0)
    with pytest.raises(PeerLost):
        world.relations.epoch(PEER)
    assert world.events == []
