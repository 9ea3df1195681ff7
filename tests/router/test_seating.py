"""The router's driver of the policy: joins, reports, seats, reads, losses; nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from router_kit import run

from dualpath.base.errors import RequestError
from dualpath.base.ids import RequestId, Role
from dualpath.monitor.metrics import Metrics
from dualpath.policy import PolicyConfig, ReadPlanKind
from dualpath.router.address import ServerAddress
from dualpath.router.seating import Seating
from dualpath.router.service import ROUTER_METRICS
from dualpath.router.upstream import Upstream

Clock = Callable[[], float]


def make(**settings: Any) -> Seating:
    config = PolicyConfig(reject_without_engines=True, **settings)
    return Seating(config, Metrics(only=ROUTER_METRICS), asyncio.get_running_loop().time)


def server(name: str, role: Role | None) -> Upstream:
    address = ServerAddress.of(f"http://{name}", flag="--server", kv_port=9000)
    upstream = Upstream(address, role, connect_timeout_s=1)
    upstream.up = True
    return upstream


def joined(seating: Seating, *names: str) -> dict[str, Upstream]:
    """`p...` are prefill servers, `d...` decode servers, others both; a host each."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    found = {name: server(name, roles.get(name[0])) for name in names}
    seating.watch(found.values())
    seating.changed()
    for each in found.values():
        seating.joined(each)
    return found


def test_seats_are_a_pair_and_a_plan() -> None:
    async def work() -> None:
        seating = make()
        servers = joined(seating, "p0", "d0")
        with seating.ticket(RequestId("r"), 1000, 990) as ticket:
            seats = await ticket.wait()
            assert (seats.prefill, seats.decode) == (servers["p0"], servers["d0"])
            # 990 tokens are 15 whole blocks of 64; equal queues: half each.
            assert seats.hit_tokens == 960
            assert {seats.pe_tokens, seats.de_tokens} == {448, 512}
            seating.prefilled(ticket)
            seating.prefilled(ticket)
            ticket.finished = True
        seating.check_idle()

    run(work())


def test_reads_under_way_move_the_next_ones_to_the_other_side() -> None:
    async def work() -> None:
        seating = make(read_plan=ReadPlanKind.SHORTER)
        joined(seating, "p0", "d0")
        with seating.ticket(RequestId("a"), 10_000, 9_000) as first:
            one = await first.wait()
            with seating.ticket(RequestId("b"), 10_000, 9_000) as second:
                two = await second.wait()
                assert sorted([one.pe_tokens, two.pe_tokens]) == [0, 8960]
                seating.observe()
        seating.check_idle()

    run(work())


def test_servers_that_do_both_need_no_prefill_server() -> None:
    async def work() -> None:
        seating = make(beta_tokens=2**62)
        servers = joined(seating, "s0", "s1")
        tickets, contexts = [], []
        for number in range(6):
            context = seating.ticket(RequestId(str(number)), 100_000, 0)
            contexts.append(context)
            tickets.append(context.__enter__())
        seats = [await each.wait() for each in tickets]
        assert all(each.prefill is None for each in seats)
        assert [sum(each.decode is s for each in seats) for s in servers.values()] == [3, 3]
        for context in contexts:
            context.__exit__(None, None, None)
        seating.check_idle()

    run(work())


def test_a_burst_beyond_the_threshold_passes_the_stand_in() -> None:
    async def work() -> None:
        seating = make(beta_tokens=1000)
        joined(seating, "d0")
        contexts = [seating.ticket(RequestId(str(n)), 900, 0) for n in range(20)]
        tickets = [each.__enter__() for each in contexts]
        for each in tickets:
            assert (await each.wait()).prefill is None
        for context in contexts:
            context.__exit__(None, None, None)
        seating.check_idle()

    run(work())


def test_beyond_the_threshold_requests_wait_in_the_router_in_order() -> None:
    async def work() -> None:
        seating = make(beta_tokens=1000)
        joined(seating, "p0", "d0")
        contexts = [seating.ticket(RequestId(str(n)), 900, 0) for n in range(4)]
        tickets = [each.__enter__() for each in contexts]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [each.seats is not None for each in tickets] == [True, True, False, False]
        assert seating.waiting == 2
        seating.prefilled(tickets[0])
        await tickets[2].wait()
        assert tickets[3].seats is None
        for context in contexts:
            context.__exit__(None, None, None)
        seating.check_idle()

    run(work())


def test_what_decode_servers_cannot_hold_waits() -> None:
    async def work() -> None:
        seating = make()
        servers = joined(seating, "p0", "d0", "d1")
        servers["d0"].kv_capacity_tokens = servers["d1"].kv_capacity_tokens = 1000
        contexts = [seating.ticket(RequestId(str(n)), 600, 0) for n in range(3)]
        tickets = [each.__enter__() for each in contexts]
        seats = [await each.wait() for each in tickets[:2]]
        assert {each.decode for each in seats} == {servers["d0"], servers["d1"]}
        await asyncio.sleep(0)
        assert tickets[2].seats is None and seating.waiting == 1
        contexts[1].__exit__(None, None, None)
        assert (await tickets[2].wait()).decode is seats[1].decode
        for context in (contexts[0], contexts[2]):
            context.__exit__(None, None, None)
        seating.check_idle()

    run(work())


def test_a_prompt_that_seems_too_long_goes_to_a_server_that_has_none() -> None:
    async def work() -> None:
        seating = make()
        servers = joined(seating, "p0", "d0")
        servers["d0"].kv_capacity_tokens = 1000
        contexts = [seating.ticket(RequestId(str(n)), 5000 + n, 0) for n in range(3)]
        tickets = [each.__enter__() for each in contexts]
        for number in range(3):
            await tickets[number].wait()
            await asyncio.sleep(0)
            assert seating.waiting == 2 - number
            contexts[number].__exit__(None, None, None)
        seating.check_idle()

    run(work())


def test_a_request_of_a_lost_server_is_cut_and_seated_anew() -> None:
    async def work() -> None:
        seating = make()
        servers = joined(seating, "p0", "d0", "d1")
        with seating.ticket(RequestId("r"), 100, 0) as ticket:
            first = await ticket.wait()
            cuts = []
            ticket.cut_with(lambda: cuts.append(1))
            seating.lost(first.decode)
            seating.lost(first.decode)
            assert cuts == [1] and ticket.interrupted
            seating.failed(ticket, "engine_lost", hit_tokens=0)
            second = await ticket.wait()
            assert {first.decode, second.decode} == {servers["d0"], servers["d1"]}
            assert ticket.attempt == 1
        seating.check_idle()

    run(work())


def test_the_loss_of_a_prefill_server_that_is_done_disturbs_nobody() -> None:
    async def work() -> None:
        seating = make()
        servers = joined(seating, "p0", "d0")
        with seating.ticket(RequestId("r"), 100, 64) as ticket:
            await ticket.wait()
            seating.prefilled(ticket)
            seating.lost(servers["p0"])
            assert not ticket.interrupted
            ticket.finished = True
        seating.check_idle()

    run(work())


def test_attempts_have_an_end() -> None:
    async def work() -> None:
        seating = make(max_attempts=2)
        joined(seating, "p0", "d0")
        with seating.ticket(RequestId("r"), 100, 0) as ticket:
            await ticket.wait()
            seating.failed(ticket, "http 500", hit_tokens=0)
            await ticket.wait()
            seating.failed(ticket, "http 500", hit_tokens=0)
            with pytest.raises(RequestError, match="every attempt failed"):
                await ticket.wait()
        seating.check_idle()

    run(work())


def test_without_decode_servers_requests_are_refused_with_the_reason() -> None:
    async def work() -> None:
        seating = make()
        servers = joined(seating, "p0", "d0")
        servers["d0"].detail = "it burns"
        with seating.ticket(RequestId("r"), 100, 0) as ticket:
            await ticket.wait()
            seating.lost(servers["d0"])
            seating.failed(ticket, "engine_lost", hit_tokens=0)
            with pytest.raises(RequestError, match="d0:80: it burns"):
                await ticket.wait()
        with (
            pytest.raises(RequestError, match="no server can take requests"),
            seating.ticket(RequestId("s"), 100, 0),
        ):
            pass
        seating.check_idle()

    run(work())


@pytest.mark.parametrize("scheduler", ["dualpath", "round-robin", "random", "basic"])
@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_events_leaves_nothing_behind(seed: int, scheduler: str) -> None:
    numbers = random.Random(seed)

    async def one(seating: Seating, number: int) -> None:
        hit_tokens = numbers.choice([0, 64, 5000])
        try:
            with seating.ticket(RequestId(str(number)), numbers.randint(1, 9000), hit_tokens) as t:
                for _ in range(3):
                    await t.wait()
                    await asyncio.sleep(numbers.random() / 500)
                    if numbers.random() < 0.7:
                        seating.prefilled(t)
                    await asyncio.sleep(numbers.random() / 500)
                    if numbers.random() < 0.6:
                        t.finished = numbers.random() < 0.8
                        return
                    seating.failed(t, "test", hit_tokens=hit_tokens)
        except RequestError:
            pass

    async def disturb(seating: Seating, servers: dict[str, Upstream]) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(60):
            each = numbers.choice(list(servers.values()))
            match numbers.randint(0, 3):
                case 0:
                    each.draining = not each.draining
                case 1:
                    each.failed(loop.time())
                case 2:
                    each.succeeded()
                case _:
                    each.up = not each.up
                    (seating.joined if each.up else seating.lost)(each)
            seating.changed()
            await asyncio.sleep(0.001)
        for each in servers.values():
            each.draining = False
            each.succeeded()
            if not each.up:
                each.up = True
                seating.joined(each)
        seating.changed()

    async def work() -> None:
        seating = make(scheduler=scheduler, beta_tokens=20_000)
        servers = joined(seating, "p0", "p1", "d0", "d1", "d2")
        tasks: list[Coroutine[Any, Any, None]] = [one(seating, n) for n in range(150)]
        await asyncio.gather(disturb(seating, servers), *tasks)
        assert seating.waiting == 0
        seating.check_idle()

    run(work())
