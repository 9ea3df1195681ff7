"""The bookkeeping of vLLM's scheduler side: calls in, exact orders out."""

from __future__ import annotations

import pytest

from dualpath.vllm.orders import LoadOrder, SaveOrder, Staged, StageOrder, StepOrders, WorkerReport
from dualpath.vllm.params import KvPeer, PairParams, decode_params
from dualpath.vllm.request_book import Ending, RequestBook, ScheduledPart

SIZE = 4
PE, DE = KvPeer("pe", 1), KvPeer("de", 2)
PREFILL = PairParams("prefill", "r", 1, DE, hit_tokens=8, pe_tokens=8)
DECODE = PairParams("decode", "r", 1, PE, hit_tokens=8, pe_tokens=8, prompt_tokens=18)


def tokens_of(n_tokens: int) -> list[int]:
    return list(range(100, 100 + n_tokens))


def report(*staged: Staged) -> WorkerReport:
    return WorkerReport(staged)


def book_with(
    tokens: list[int], *, staged: int, pair: PairParams | None = None, stored: int | None = None
) -> RequestBook:
    """A book whose request `a` is staged up to `staged`, the orders of it taken."""
    book = RequestBook(SIZE, own=PE)
    book.arrived("a", tokens, pair=pair)
    assert book.matched("a", 0) is None
    book.step([])
    book.reported(report(Staged("a", 1, staged, staged, staged if stored is None else stored)))
    return book


def test_a_request_is_staged_once_and_then_matched() -> None:
    book = RequestBook(SIZE)
    book.arrived("a", tokens_of(18), salt="s")
    assert [book.matched("a", 0), book.matched("a", 0)] == [None, None]
    orders = book.step([])
    assert orders == StepOrders(stages=(StageOrder("a", 1, tuple(tokens_of(18)), 0, "s", None),))
    assert book.matched("a", 0) is None
    book.reported(report(Staged("a", 1, 8)))
    assert [book.matched("a", 0), book.matched("a", 0), book.matched("a", 4)] == [8, 8, 4]
    assert book.matched("a", 12) == 0


def test_what_the_device_has_is_not_staged() -> None:
    book = RequestBook(SIZE)
    book.arrived("a", tokens_of(18))
    assert book.matched("a", 16) == 0
    book.arrived("b", tokens_of(18))
    assert book.matched("b", 8) is None
    (stage,) = book.step([]).stages
    assert stage.first_token == 8


def test_a_short_prompt_needs_no_staging() -> None:
    book = RequestBook(SIZE)
    book.arrived("a", tokens_of(4))
    assert book.matched("a", 0) == 0
    assert book.step([]) == StepOrders()


def test_an_unknown_request_has_no_match() -> None:
    assert RequestBook(SIZE).matched("a", 0) == 0


def test_the_shortest_rank_counts() -> None:
    book = RequestBook(SIZE, ranks=2)
    book.arrived("a", tokens_of(18))
    book.matched("a", 0)
    book.reported(report(Staged("a", 1, 12)))
    assert book.matched("a", 0) is None
    book.reported(report(Staged("a", 1, 4)))
    assert book.matched("a", 0) == 4


def test_load_and_saves() -> None:
    """Loaded is what was matched; saved is each block once, when its tokens are all computed."""
    tokens = tokens_of(18)
    book = book_with(tokens, staged=8)
    assert book.matched("a", 4) == 4
    ids = [10, 11, 12, 13, 14]
    book.allocated("a", ids, 4)
    orders = book.step([ScheduledPart("a", 8, 6, ids)])
    assert orders.loads == (LoadOrder("a", 1, 4, 8, (11,)),)
    assert orders.saves == (SaveOrder("a", 2, (12,), 18, (), "", 12, True, None),)
    assert book.step([ScheduledPart("a", 14, 4, ids)]).saves == (
        SaveOrder("a", 3, (13,), 18, (), "", 16, True, None),
    )
    tokens += [7, 8]
    assert book.step([ScheduledPart("a", 18, 1, ids)]).saves == ()
    assert book.step([ScheduledPart("a", 19, 1, ids)]).saves == (
        SaveOrder("a", 4, (14,), 18, (7, 8), "", 20, True, None),
    )
    assert book.ended("a", ids, 20, aborted=False) == Ending()
    assert book.step([]).ended == ("a",)
    assert len(book) == 0


def test_a_block_with_a_token_that_is_not_sampled_yet_is_saved_later() -> None:
    """Asynchronous scheduling runs ahead of the tokens; drafts may be rejected."""
    tokens = tokens_of(7)
    book = book_with(tokens, staged=0)
    book.matched("a", 0)
    book.allocated("a", [1, 2], 0)
    assert len(book.step([ScheduledPart("a", 0, 7, [1, 2])]).saves) == 1
    assert book.step([ScheduledPart("a", 7, 1, [1, 2])]).saves == ()
    tokens.append(9)
    ending = book.ended("a", [1, 2], 8, aborted=False)
    assert ending == Ending(keep_blocks=True)
    assert book.step([]).saves == (SaveOrder("a", 1, (2,), 7, (9,), "", 8, True, None, late=True),)


def test_a_staging_that_is_not_used_is_released() -> None:
    book = book_with(tokens_of(18), staged=4)
    assert book.matched("a", 12) == 0
    book.allocated("a", [1, 2, 3, 4, 5], 0)
    assert book.step([]).releases == ("a",)


def test_a_preempted_request_is_staged_again() -> None:
    tokens = tokens_of(18)
    book = book_with(tokens, staged=8)
    book.matched("a", 0)
    book.allocated("a", [1, 2, 3, 4, 5], 8)
    book.step([ScheduledPart("a", 8, 10, [1, 2, 3, 4, 5])])
    tokens += [7, 8, 9]
    assert book.matched("a", 0) is None
    orders = book.step([])
    assert orders.stages == (StageOrder("a", 2, tuple(tokens), 0, "", None),)
    assert orders.releases == ("a",)
    book.reported(report(Staged("a", 1, 20)))
    assert book.matched("a", 0) is None, "that was the staging before"
    book.reported(report(Staged("a", 2, 20)))
    assert book.matched("a", 0) == 20


def test_blocks_that_the_device_lost_meanwhile() -> None:
    book = RequestBook(SIZE)
    book.arrived("a", tokens_of(18))
    book.matched("a", 8)
    book.step([])
    book.reported(report(Staged("a", 1, 16)))
    assert book.matched("a", 4) is None
    orders = book.step([])
    assert orders.stages[0].first_token == 4
    assert orders.releases == ("a",)


def test_an_abort_frees_at_once() -> None:
    book = book_with(tokens_of(18), staged=8)
    assert book.ended("a", [], 0, aborted=True) == Ending()
    assert book.step([]) == StepOrders(aborted=("a",))


def test_without_a_store_nothing_is_staged_or_saved() -> None:
    book = RequestBook(SIZE, has_store=False)
    book.arrived("a", tokens_of(18))
    assert book.matched("a", 0) == 0
    book.allocated("a", [1, 2, 3, 4, 5], 0)
    assert book.step([ScheduledPart("a", 0, 18, [1, 2, 3, 4, 5])]) == StepOrders()


@pytest.mark.parametrize("local", [0, 4, 12])
def test_a_prefill_hands_over_all_of_its_prompt(local: int) -> None:
    """What is in DRAM already stays; the rest is copied out, also the block that is not full."""
    book = RequestBook(SIZE, own=PE)
    book.arrived("a", tokens_of(18), pair=PREFILL)
    book.matched("a", local)
    book.step([])
    book.reported(report(Staged("a", 1, max(8, local), 8, 8)))
    external = book.matched("a", local)
    ids = [1, 2, 3, 4, 5]
    assert external is not None
    book.allocated("a", ids, external)
    computed = local + external
    saves = book.step([ScheduledPart("a", computed, 18 - computed, ids)]).saves
    copied = sorted(block for save in saves for block in save.block_ids)
    staged = set(range(1 + local // SIZE, 3)) if external else set()
    assert copied == sorted(set(ids) - staged)
    assert all(save.pair == PREFILL for save in saves)
    assert [save.persist for save in saves] == ([False, True] if local else [True])
    answer = decode_params(book.ended("a", ids, 18, aborted=False).answer)
    hit = max(8, local)
    assert answer == PairParams("decode", "r", 1, PE, hit, min(8, hit), 18)


def test_a_prompt_of_full_blocks_that_is_stored_whole() -> None:
    """One token is computed; its block is stored, and in DRAM for the peer, already."""
    book = book_with(tokens_of(16), staged=15, stored=16, pair=PREFILL)
    assert book.matched("a", 0) == 15
    ids = [1, 2, 3, 4]
    book.allocated("a", ids, 15)
    orders = book.step([ScheduledPart("a", 15, 1, ids)])
    assert orders.loads == (LoadOrder("a", 1, 0, 15, (1, 2, 3, 4)),)
    assert orders.saves == ()
    answer = decode_params(book.ended("a", ids, 16, aborted=False).answer)
    assert answer == PairParams("decode", "r", 1, PE, 15, 15, 16)
    assert book.step([]).saves == ()


def test_a_decode_computes_one_token() -> None:
    tokens = tokens_of(18)
    book = book_with(tokens, staged=17, pair=DECODE, stored=16)
    assert book.matched("a", 0) == 17
    ids = [1, 2, 3, 4, 5]
    book.allocated("a", ids, 17)
    orders = book.step([ScheduledPart("a", 17, 1, ids)])
    assert orders.loads == (LoadOrder("a", 1, 0, 17, (1, 2, 3, 4, 5)),)
    assert orders.saves == (), "the PE stored the prompt"
    tokens += [7, 8]
    book.step([ScheduledPart("a", 18, 1, ids)])
    assert [s.first_block for s in book.step([ScheduledPart("a", 19, 1, ids)]).saves] == [4]
    assert book.ended("a", ids, 20, aborted=False).answer is None


def test_a_server_without_an_endpoint_knows_no_peers() -> None:
    book = RequestBook(SIZE)
    book.arrived("a", tokens_of(18), pair=PREFILL)
    book.matched("a", 0)
    assert book.step([]).stages[0].pair is None
    assert book.ended("a", [], 0, aborted=False).answer is None
