"""Random events in random order against the model cluster, with every invariant checked after each."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from policy_driver import BLOCK, Driver, request_name

from dualpath.base.ids import EngineId, Role, Side
from dualpath.policy import GroupFetched, PolicyConfig, ReadPlanKind, SchedulerKind
from dualpath.testing.model_cluster import ModelRequest

HBM, BUFFER = 1_300, 1_024
BETA = 500
pick = st.integers(0, 10**6)


class PolicyMachine(RuleBasedStateMachine):
    """Two groups of two engines a role; small enough that memory, beta and queues all bind."""

    @initialize(
        scheduler=st.sampled_from([SchedulerKind.DUALPATH] * 3 + list(SchedulerKind)),
        read_plan=st.sampled_from(list(ReadPlanKind)),
        alpha=st.sampled_from([0, 300, 10**6]),
        seed=st.integers(0, 100),
    )
    def start(
        self, scheduler: SchedulerKind, read_plan: ReadPlanKind, alpha: int, seed: int
    ) -> None:
        config = PolicyConfig(
            scheduler=scheduler,
            read_plan=read_plan,
            block_tokens=BLOCK,
            alpha_tokens=alpha,
            beta_tokens=BETA,
            seed=seed,
            max_attempts=1000,
        )
        self.driver = Driver(config)
        self.driver.join_all(2, 2, 2, hbm=HBM, buffer=BUFFER)
        self.arrived = 0
        self.lost: list[EngineId] = []
        self.held_fetches: list[GroupFetched] = []

    def one_of(self, phase: str, number: int) -> ModelRequest | None:
        candidates = self.driver.of_phase(phase)
        return candidates[number % len(candidates)] if candidates else None

    @rule(prompt=st.integers(1, 1_100), hit=st.floats(0, 1), new=st.integers(0, 300))
    def arrive(self, prompt: int, hit: float, new: int) -> None:
        hit_tokens = int(hit * (prompt - 1)) // BLOCK * BLOCK
        name = request_name(self.arrived)
        self.arrived += 1
        self.driver.play(self.driver.cluster.arrive(name, prompt, hit_tokens, new))

    @rule(number=pick)
    @precondition(lambda self: self.driver.cluster.groups)
    def fetch(self, number: int) -> None:
        groups = sorted(self.driver.cluster.groups)
        group = groups[number % len(groups)]
        if any(each.group == group for each in self.held_fetches):
            return  # A leader's fetches stay in order.
        self.driver.fetch(group)

    @rule(number=pick)
    @precondition(lambda self: self.driver.cluster.groups)
    def fetch_under_way(self, number: int) -> None:
        groups = sorted(self.driver.cluster.groups)
        group = groups[number % len(groups)]
        if all(each.group != group for each in self.held_fetches):
            self.held_fetches.append(self.driver.cluster.fetch(group))

    @rule()
    @precondition(lambda self: self.held_fetches)
    def fetch_arrives(self) -> None:
        self.driver.play(self.held_fetches.pop(0))

    @rule(number=pick)
    @precondition(lambda self: self.driver.cluster.engines)
    def deliver(self, number: int) -> None:
        engines = sorted(self.driver.cluster.engines)
        self.driver.cluster.deliver(engines[number % len(engines)])

    @rule(number=pick, part=st.floats(0, 1))
    def read(self, number: int, part: float) -> None:
        request = self.one_of("reading", number)
        if request is None:
            return
        side = max(Side, key=lambda each: (request.unread_tokens[each], each))
        tokens = max(1, int(part * request.unread_tokens[side]))
        self.driver.play(self.driver.cluster.read(request.id, side, tokens))

    @rule(number=pick)
    def read_all(self, number: int) -> None:
        request = self.one_of("reading", number)
        if request is not None:
            self.driver.finish_reads(request)

    @rule(number=pick)
    def prefill(self, number: int) -> None:
        request = self.one_of("prefilling", number)
        if request is not None:
            self.driver.play(self.driver.cluster.finish_prefill(request.id))

    @rule(number=pick)
    def finish(self, number: int) -> None:
        request = self.one_of("decoding", number)
        if request is not None:
            self.driver.play(self.driver.cluster.finish(request.id))

    @rule(number=pick)
    def abort(self, number: int) -> None:
        name = request_name(number % (self.arrived + 1))
        self.driver.play(self.driver.cluster.abort(name))
        self.driver.play(self.driver.cluster.abort(name))

    @rule(
        number=pick,
        phase=st.sampled_from(["reading", "prefilling", "decoding"]),
        part=st.floats(0, 1),
    )
    def fail(self, number: int, phase: str, part: float) -> None:
        request = self.one_of(phase, number)
        if request is not None:
            self._fail(request, part)

    @rule(number=pick, part=st.floats(0, 1))
    def answer_interrupted(self, number: int, part: float) -> None:
        request = self.one_of("interrupted", number)
        if request is not None:
            self._fail(request, part)

    def _fail(self, request: ModelRequest, part: float) -> None:
        generated = int(part * request.new_tokens) if request.prefilled else 0
        hit_tokens = int((1 - part) * request.hit_tokens) // BLOCK * BLOCK
        event = self.driver.cluster.fail(request.id, hit_tokens, generated)
        self.driver.play(event)
        self.driver.play(event)  # Said twice: the second is of an older attempt.

    @rule(number=pick)
    @precondition(lambda self: self.driver.cluster.engines)
    def lose(self, number: int) -> None:
        engines = sorted(self.driver.cluster.engines)
        engine = engines[number % len(engines)]
        group = self.driver.cluster.engines[engine].group
        self.lost.append(engine)
        self.driver.play(self.driver.cluster.lose(engine))
        self.held_fetches = [each for each in self.held_fetches if each.group != group]

    @rule(number=pick)
    @precondition(lambda self: self.lost)
    def rejoin(self, number: int) -> None:
        self._rejoin(self.lost.pop(number % len(self.lost)))

    def _rejoin(self, engine: EngineId) -> None:
        role = Role.PREFILL if engine.startswith("p") else Role.DECODE
        group, rank = engine[1:].split(".")
        self.driver.join(role, int(group), int(rank), hbm=HBM, buffer=BUFFER)

    @invariant()
    def valid(self) -> None:
        if hasattr(self, "driver"):
            self.driver.scheduler.validate()

    def teardown(self) -> None:
        """Whatever happened: with all engines back, every request ends and leaves nothing."""
        if not hasattr(self, "driver"):
            return
        for event in self.held_fetches:
            self.driver.play(event)
        while self.lost:
            self._rejoin(self.lost.pop())
        self.driver.settle()


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
