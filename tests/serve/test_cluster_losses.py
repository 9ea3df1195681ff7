"""Engines killed or stopped in every phase of a request, and clients that go away in every phase."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster_kit import BLOCK_TOKENS, Answer, Reference, Served, prompt_of

from dualpath.base.ids import EngineId, Role
from dualpath.engine.sampling import SamplingParams
from dualpath.serve import processes
from dualpath.serve.messages import (
    BlockPersisted,
    Decode,
    Prefill,
    PrefillReleased,
    ReadProgress,
    StartAttempt,
    Tokens,
)

TOKENS = 40 * BLOCK_TOKENS + 5
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def served(plain: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """2P2D; an engine may die more often than it could in production in so short a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_MOST_FAILURES", 100)
        patch.setattr(processes, "_LONGEST_RETRY_S", 0.5)
        served = Served(
            plain,
            store=str(tmp_path_factory.mktemp("losses") / "store"),
            prefill=2,
            decode=2,
            engine_timeout_s=5.0,
            pe_buffer=8 * 2**20,
            de_buffer=8 * 2**20,
        )
        served.start()
        yield served
        assert served.close() == 0


@pytest.fixture(autouse=True)
def all_released(served: Served) -> Iterator[None]:
    yield
    served.run(served.released())
    served.wire.sent.clear()
    served.wire.received.clear()


PHASES: dict[str, type] = {
    "reading": ReadProgress,
    "prefill": StartAttempt,
    "hand-over": Tokens,
}


def on_first(served: Served, kind: type, act: Callable[[], object]) -> None:
    """Call `act` when the first such message passes, whichever way it goes."""

    def listen(_: EngineId, message: Any) -> None:
        if isinstance(message, kind):
            served.wire.sent.remove(listen)
            served.wire.received.remove(listen)
            act()

    served.wire.sent.append(listen)
    served.wire.received.append(listen)


def assigned(served: Served, role: Role) -> list[EngineId]:
    """Filled with the engine of this role that the next request goes to."""
    found: list[EngineId] = []
    kind = Prefill if role is Role.PREFILL else Decode

    def listen(engine: EngineId, message: Any) -> None:
        if isinstance(message, kind):
            found.append(engine)

    served.wire.sent.append(listen)
    return found


@pytest.mark.parametrize(
    ("role", "phase"),
    [
        (Role.PREFILL, "prefill"),
        (Role.PREFILL, "hand-over"),
        (Role.DECODE, "reading"),
        (Role.DECODE, "hand-over"),
    ],
    ids=str,
)
def test_killed_engine_changes_no_token(served: Served, role: Role, phase: str) -> None:
    prompt = prompt_of(10 * list(PHASES).index(phase) + list(Role).index(role), TOKENS)

    async def check() -> None:
        await served.store_prompt(prompt)
        lost = served.metric("engine_restarts_total", role=role.value)
        victims = assigned(served, role)
        on_first(served, PHASES[phase], lambda: served.kill(victims[0]))
        streamed: list[int] = []
        answer = await served.ask_right(
            prompt, NEW_TOKENS, on_update=lambda answer: streamed.append(len(answer.tokens))
        )
        assert answer.cached_tokens is not None
        # Every token came once, one after the other.
        assert [n for n in streamed if n] == list(range(1, NEW_TOKENS + 1))
        await served.until(lambda: served.metric("engine_restarts_total", role=role.value) > lost)

    served.run(check())


def test_killed_engine_changes_no_sampled_token(served: Served) -> None:
    """A draw depends on seed and position only, so another engine goes on with the same text."""
    prompt = prompt_of(500, TOKENS)
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True)

    async def check() -> None:
        undisturbed = await served.ask(prompt, sampling=sampling)
        victims = assigned(served, Role.DECODE)

        def kill_in_the_middle(answer: Answer) -> None:
            if len(answer.tokens) == NEW_TOKENS // 2:
                served.kill(victims[0])

        answer = await served.ask(prompt, sampling=sampling, on_update=kill_in_the_middle)
        assert answer.error is None
        assert answer.tokens == undisturbed.tokens

    served.run(check())


def test_losing_every_engine_at_once_loses_no_request(served: Served) -> None:
    async def check() -> None:
        await served.ready()
        prompts = [prompt_of(600 + i, 100 + 37 * i) for i in range(8)]
        on_first(
            served, StartAttempt, lambda: [served.kill(each) for each in served.cluster.engine_pids]
        )
        await asyncio.gather(*(served.ask_right(prompt, NEW_TOKENS) for prompt in prompts))

    served.run(check())


def test_prefill_loss_does_not_disturb_decoding(served: Served) -> None:
    """Once the decode engine has the prompt, its prefill engine may die."""
    prompt = prompt_of(700, TOKENS)

    async def check() -> None:
        await served.ready()
        retries = served.retries()
        victims = assigned(served, Role.PREFILL)
        on_first(served, PrefillReleased, lambda: served.kill(victims[0]))
        await served.ask_right(prompt, NEW_TOKENS)
        assert served.retries() == retries

    served.run(check())


def test_stopped_engine_goes_on(served: Served) -> None:
    """A pause shorter than the engine timeout is nothing."""
    prompt = prompt_of(800, TOKENS)

    async def check() -> None:
        await served.ready()
        victims = assigned(served, Role.DECODE)
        loop = asyncio.get_running_loop()

        def pause() -> None:
            served.signal(victims[0], signal.SIGSTOP)
            loop.call_later(0.5, served.signal, victims[0], signal.SIGCONT)

        on_first(served, StartAttempt, pause)
        retries = served.retries()
        await served.ask_right(prompt, NEW_TOKENS)
        assert served.retries() == retries

    served.run(check())


def test_hung_engine_is_killed_and_gets_nothing_meanwhile(served: Served) -> None:
    async def check() -> None:
        await served.ready()
        victims = assigned(served, Role.DECODE)
        on_first(served, StartAttempt, lambda: served.signal(victims[0], signal.SIGSTOP))
        attempts = served.metric("request_attempts_total")
        prompts = [prompt_of(900 + i, TOKENS) for i in range(4)]
        await asyncio.gather(*(served.ask_right(prompt, NEW_TOKENS) for prompt in prompts))
        # Those on the hung engine are attempted once more, not again and again.
        assert served.metric("request_attempts_total") - attempts <= 2 * len(prompts)
        await served.until(lambda: victims[0] not in served.cluster.driver.roster.engines)

    served.run(check())


@pytest.mark.parametrize("seed", range(3))
def test_clients_that_go_away_leave_nothing_held(served: Served, seed: int) -> None:
    """After a random number of tokens, or at a random message: reading, prefill, hand-over, decode."""
    dice = random.Random(seed)
    kinds = (Prefill, Decode, ReadProgress, StartAttempt, Tokens, PrefillReleased, BlockPersisted)

    async def leaving(prompt: list[int]) -> None:
        if dice.random() < 0.4:
            n = dice.randrange(NEW_TOKENS)
            await served.ask(prompt, NEW_TOKENS, leave=lambda answer: len(answer.tokens) >= n)
            return
        asking = asyncio.ensure_future(served.ask(prompt, NEW_TOKENS))
        left = dice.randrange(1, 8)
        kind = dice.choice(kinds)

        def listen(_: EngineId, message: Any) -> None:
            nonlocal left
            left -= isinstance(message, kind)
            if left == 0:
                asking.cancel()

        served.wire.sent.append(listen)
        served.wire.received.append(listen)
        await asyncio.wait([asking])

    async def check() -> None:
        await served.ready()
        prompts = [
            prompt_of(1000 + dice.randrange(8), dice.randrange(20, TOKENS)) for _ in range(40)
        ]
        await asyncio.gather(
            *(
                leaving(prompt) if i % 4 else served.ask_right(prompt, NEW_TOKENS)
                for i, prompt in enumerate(prompts)
            )
        )
        await served.released()

    served.run(check())


def test_last_words_of_a_dead_engine_do_not_revive_it(served: Served) -> None:
    """Its process is known to be gone before its first message is read."""
    driver = served.cluster.driver

    async def check() -> None:
        await served.ready()
        engine = driver.roster.engines[-1]
        hello = driver.roster.hello(engine)
        served.kill(engine)
        await served.until(lambda: engine not in driver.roster.engines)
        served.cluster._take(engine, hello)
        assert engine not in driver.roster.engines
        await served.ask_right(prompt_of(1100, 100))

    served.run(check())
