"""Prompts share exactly what the trace says; they are the same on every machine."""

from __future__ import annotations

import itertools
import json

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.base.errors import ConfigError, InvariantViolation
from dualpath.bench.replay.conversation import Conversation, PromptBody, TokenSource
from dualpath.bench.replay.tokens import Form, RunKind
from dualpath.bench.replay.words import WORDS
from dualpath.traces import (
    AppendPrompt,
    BlockPrompt,
    Session,
    TextPrompt,
    Turn,
    open_trace,
)

SOURCE = TokenSource(7, 1000, 30_000)
BYTES = TokenSource(7, 0, 256)


Numbers = list[int] | npt.NDArray[np.int64]


def common(a: Numbers, b: Numbers) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    different = np.flatnonzero(np.asarray(a[:length]) != np.asarray(b[:length]))
    return int(different[0]) if len(different) else length


def ids(body: PromptBody) -> list[int]:
    tokens = json.loads(body.json)
    assert len(tokens) == body.tokens
    return tokens


def prompts(session: Session, source: TokenSource = SOURCE) -> list[list[int]]:
    talk = Conversation(session, source)
    found = []
    for index in range(len(talk.turns)):
        found.append(ids(talk.prompt(index)))
        talk.take_answer(index, None)
    return found


def blocks(*runs: tuple[int, int], tokens: int, scope: str = "s", size: int = 4) -> BlockPrompt:
    return BlockPrompt(scope, size, runs, tokens)


def session(*given_prompts: object, name: str = "s", **fields: int) -> Session:
    turns = tuple(Turn(each, 3) for each in given_prompts)  # type: ignore[arg-type]
    return Session(name, turns, **fields)


def test_tokens_are_the_same_on_every_machine_and_in_every_version() -> None:
    assert SOURCE.token_ids(RunKind.BLOCK, "trace", [0, 1, 12_345], 6) == GOLDEN_BLOCKS
    assert BYTES.token_ids(RunKind.TURN, "0 a", [3], 8) == GOLDEN_BYTES
    assert TokenSource.words(7).encode(RunKind.FIRST_ROUND, "a", [1], 4) == GOLDEN_WORDS


def test_what_is_encoded_are_the_tokens() -> None:
    for source in (SOURCE, BYTES):
        cells = source.encode(RunKind.BLOCK, "k", range(5), 7)
        tokens = source.token_ids(RunKind.BLOCK, "k", range(5), 7)
        assert len(cells) == 35 * source.width
        assert json.loads(b"[" + cells[:-1] + b"]") == tokens
        assert all(source.first <= token < source.end for token in tokens)


def test_tokens_use_the_whole_range_evenly() -> None:
    runs = np.asarray(BYTES.token_ids(RunKind.BLOCK, "k", range(1000), 256)).reshape(1000, 256)
    counts = np.bincount(runs[:, BYTES.lead_tokens :].reshape(-1), minlength=256)
    # About 980 each, within five standard deviations.
    assert len(counts) == 256 and counts.min() > 820 and counts.max() < 1140


def test_seed_key_number_and_kind_each_make_other_tokens() -> None:
    runs = [
        TokenSource(seed, 1000, 30_000).encode(kind, key, [number], 16)
        for seed in (1, 2)
        for kind in RunKind
        for key in ("a", "b")
        for number in (0, 1)
    ]
    assert len(set(runs)) == len(runs)


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=40, unique=True),
    st.sampled_from([SOURCE, BYTES]),
)
def test_runs_of_other_numbers_differ_within_their_lead(
    numbers: list[int], source: TokenSource
) -> None:
    size = source.lead_tokens
    flat = source.token_ids(RunKind.BLOCK, "k", numbers, size)
    leads = [tuple(flat[i : i + size]) for i in range(0, len(flat), size)]
    assert len(set(leads)) == len(leads)
    for (a, lead), (b, other) in itertools.combinations(zip(numbers, leads, strict=True), 2):
        assert (lead[0] == other[0]) == (a % source.lead_base == b % source.lead_base)


def test_kinds_never_agree_in_a_first_token() -> None:
    for source in (SOURCE, BYTES):
        firsts = [
            set(source.token_ids(kind, key, range(2000), 1)) for kind in RunKind for key in "ab"
        ]
        for a, b in itertools.combinations(range(6), 2):
            if a // 2 != b // 2:
                assert not firsts[a] & firsts[b]


@pytest.mark.parametrize(("first", "end"), [(-1, 500), (10, 50), (5, 5)])
def test_a_range_that_is_too_small_is_refused(first: int, end: int) -> None:
    with pytest.raises(ConfigError, match="--vocab-size"):
        TokenSource(0, first, end)


def check_pairs(given_prompts: list[BlockPrompt], made: list[list[int]]) -> int:
    """Every pair has in common what its ids say, token for token. Blocks in common, over all pairs."""
    ids_of = [np.fromiter(each.block_ids(), dtype=np.int64) for each in given_prompts]
    tokens_of = [np.asarray(each) for each in made]
    size = given_prompts[0].block_tokens
    total = 0
    for i, j in itertools.combinations(range(len(made)), 2):
        shared = common(ids_of[i], ids_of[j])
        expected = min(shared * size, len(made[i]), len(made[j]))
        assert common(tokens_of[i], tokens_of[j]) == expected
        total += shared
    return total


def test_coding_agent_sessions_share_token_for_token_what_their_block_ids_say() -> None:
    # Neither the shortest nor the longest; all pairs of their turns.
    by_turns = sorted(open_trace("coding-agent").sessions, key=lambda each: len(each.turns))
    shared_blocks = 0
    for each in by_turns[20:26]:
        turns = each.turns[:40]
        made_of = [turn.prompt for turn in turns if isinstance(turn.prompt, BlockPrompt)]
        assert len(made_of) == len(turns) > 1
        shared_blocks += check_pairs(made_of, prompts(Session(each.id, turns)))
    assert shared_blocks > 10_000


def test_mooncake_prompts_of_different_sessions_share_what_their_ids_say() -> None:
    chosen = open_trace("mooncake-conversation").sessions[:150]
    made_of = [each.turns[0].prompt for each in chosen]
    assert all(isinstance(each, BlockPrompt) for each in made_of)
    made = [prompts(each)[0] for each in chosen]
    assert check_pairs(made_of, made) > 0  # type: ignore[arg-type]


_RUNS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 6)), max_size=4).map(tuple)


@given(
    st.lists(st.tuples(_RUNS, st.integers(1, 80)), min_size=2, max_size=5),
    st.sampled_from([SOURCE, BYTES]),
    st.sampled_from([0, 5]),
)
def test_any_prompts_of_a_session_share_exactly_their_ids(
    given_runs: list[tuple[tuple[tuple[int, int], ...], int]], source: TokenSource, first_round: int
) -> None:
    size = 8
    made_of = [blocks(*runs, tokens=tokens, size=size) for runs, tokens in given_runs]
    whole = session(*made_of, first_round_tokens=first_round)
    made = prompts(whole, source)[bool(first_round) :]
    for (p, x), (q, y) in itertools.combinations(zip(made_of, made, strict=True), 2):
        a = list(p.block_ids())[: -(-p.tokens // size)]
        b = list(q.block_ids())[: -(-q.tokens // size)]
        expected = min(first_round + common(a, b) * size, len(x), len(y))
        if source is SOURCE:
            assert common(x, y) == expected
        else:
            # Ids 85 apart begin alike, with a vocabulary of 256: in blocks it is exact all the same.
            assert expected <= common(x, y) < expected + source.lead_tokens


def test_a_prompt_does_not_depend_on_the_ones_before() -> None:
    made_of = [
        blocks((0, 9), tokens=40),
        blocks((0, 12), tokens=48),
        blocks((0, 5), (70, 3), tokens=31),
        blocks(tokens=6),
        blocks((0, 12), tokens=50),
    ]
    together = prompts(session(*made_of))
    for index, prompt in enumerate(made_of):
        padding = [blocks(tokens=1)] * index
        assert prompts(session(*padding, prompt))[index] == together[index]


def test_a_cut_block_and_a_rest_of_the_turns_own() -> None:
    short, exact, long = prompts(
        session(blocks((0, 2), tokens=6), blocks((0, 2), tokens=8), blocks((0, 2), tokens=11))
    )
    assert short == exact[:6]
    assert long[:8] == exact
    other = prompts(session(*[blocks((0, 2), tokens=11)] * 3, name="other"))
    assert common(other[0], other[1]) == common(other[1], other[2]) == 8
    assert common(long, other[2]) == 8


def test_an_id_means_the_same_in_its_scope_only() -> None:
    (a,), (b,), (c,) = (
        prompts(session(blocks((5, 2), tokens=8, scope=scope), name=name))
        for scope, name in (("", "a"), ("", "b"), ("c", "c"))
    )
    assert a == b
    assert common(a, c) == 0


def test_copies_have_a_first_round_of_their_own() -> None:
    prompt = blocks((0, 2), tokens=8)
    plain = prompts(session(prompt))
    copies = [
        prompts(session(prompt, prompt, first_round_tokens=5, copy=copy)) for copy in range(1, 4)
    ]
    for made in copies:
        assert [len(each) for each in made] == [5, 13, 13]
        assert made[1] == made[2] == made[0] + plain[0]
    for a, b in itertools.combinations([plain[0], *(made[0] for made in copies)], 2):
        assert common(a, b) == 0


def test_the_first_round_generates_one_token_and_is_followed_at_once() -> None:
    whole = Session("s", (Turn(AppendPrompt(4), 3, delay_s=9.0),) * 2, first_round_tokens=5)
    first, second, third = Conversation(whole, SOURCE).turns
    assert (first.output_tokens, first.delay_s) == (1, 0.0)
    assert (second.output_tokens, second.delay_s) == (3, 0.0)
    assert (third.output_tokens, third.delay_s) == (3, 9.0)


def test_appended_prompts_go_on_with_what_was_generated() -> None:
    talk = Conversation(session(*[AppendPrompt(4)] * 3, first_round_tokens=5), SOURCE)
    context: list[int] = []
    for index, answer in enumerate(([1], [70_000, 2, 3], None, [4])):
        body = talk.prompt(index)
        made = ids(body)
        assert made[: len(context)] == context
        assert len(made) == len(context) + (5 if index == 0 else 4)
        assert body.wants_answer_ids == (index < 3)
        talk.take_answer(index, answer)
        context = made + (answer if answer is not None else [])
        if answer is None:
            stand_ins = ids(talk.prompt(index + 1))[len(made) : len(made) + 3]
            talk = Conversation(session(*[AppendPrompt(4)] * 3, first_round_tokens=5), SOURCE)
            for again, given_answer in enumerate(([1], [70_000, 2, 3], None)):
                talk.prompt(again)
                talk.take_answer(again, given_answer)
            context = made + stand_ins


def test_tokens_may_be_appended_to_blocks_and_blocks_may_follow() -> None:
    talk = Conversation(
        session(blocks((0, 2), tokens=8), AppendPrompt(2), blocks((0, 3), tokens=12)), SOURCE
    )
    first = ids(talk.prompt(0))
    talk.take_answer(0, [9, 8])
    second = ids(talk.prompt(1))
    assert second[:10] == [*first, 9, 8] and len(second) == 12
    talk.take_answer(1, [7])
    third = ids(talk.prompt(2))
    assert third[:8] == first and third == prompts(session(blocks((0, 3), tokens=12)))[0]


def test_an_answer_that_was_not_taken_is_a_bug() -> None:
    talk = Conversation(session(AppendPrompt(2), AppendPrompt(2)), SOURCE)
    talk.prompt(0)
    with pytest.raises(InvariantViolation, match="turn 1"):
        talk.prompt(1)


def test_recorded_text_is_sent_as_it_is() -> None:
    text = 'He said "naïve"\n\u2028\x00'
    for source in (SOURCE, TokenSource.words(7)):
        body = Conversation(session(TextPrompt(text)), source).prompt(0)
        assert json.loads(body.json) == text
        assert (body.tokens, body.wants_answer_ids) == (0, False)


def test_copies_of_recorded_text_start_with_words() -> None:
    starts = set()
    for copy in (1, 2):
        whole = session(TextPrompt("abc"), first_round_tokens=20, copy=copy)
        talk = Conversation(whole, SOURCE)
        first, second = json.loads(talk.prompt(0).json), json.loads(talk.prompt(1).json)
        assert second == f"{first} abc"
        assert len(first.split()) == 20 and set(first.split()) <= set(WORDS)
        starts.add(first)
    assert len(starts) == 2


def test_text_and_tokens_do_not_mix() -> None:
    with pytest.raises(ConfigError, match="'s' mixes"):
        Conversation(session(TextPrompt("a"), AppendPrompt(2)), SOURCE)


def test_words_share_what_block_ids_say() -> None:
    words = TokenSource.words(7)
    assert words.form is Form.TEXT
    talk = Conversation(
        session(blocks((0, 3), tokens=12), blocks((0, 2), (9, 1), tokens=12)), words
    )
    a, b = (json.loads(talk.prompt(index).json).split(" ") for index in range(2))
    assert len(a) == len(b) == 12 and set(a) <= set(WORDS)
    assert a[:8] == b[:8] and a[8] != b[8]


def test_words_stand_for_an_answer_of_words() -> None:
    talk = Conversation(session(AppendPrompt(2), AppendPrompt(2)), TokenSource.words(7))
    first = json.loads(talk.prompt(0).json)
    talk.take_answer(0, [1, 2, 3])
    second = json.loads(talk.prompt(1).json)
    assert second.startswith(f"{first} ") and len(second.split(" ")) == 7


def test_the_word_list_is_as_it_says() -> None:
    assert len(set(WORDS)) == len(WORDS) == 300
    assert {len(word) for word in WORDS} == {4}
    assert all(word.isascii() and word.islower() for word in WORDS)


GOLDEN_BLOCKS = [
    8510,
    4494,
    7445,
    5468,
    12096,
    26392,
    8511,
    4494,
    7445,
    15659,
    17138,
    5698,
    1523,
    4495,
    7445,
    4572,
    1575,
    18653,
]
GOLDEN_BYTES = [118, 138, 98, 154, 126, 164, 232, 114]
GOLDEN_WORDS = b"told blue thin dial "
