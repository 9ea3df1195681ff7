from __future__ import annotations

import io

from rich.console import Console

from dualpath.sim.progress import shown_watch


def test_a_line_a_run_where_there_is_no_terminal():
    file = io.StringIO()
    with shown_watch(Console(file=file)) as watch:
        watch.expect(2)
        watch.ended("1P2D dual: 10 s")
        watch.expect(1)
        watch.ended("1P2D split: 9 s [of 20]")
    assert file.getvalue().splitlines() == [
        "[1/2] 1P2D dual: 10 s",
        "[2/3] 1P2D split: 9 s [of 20]",
    ]


def test_a_bar_on_a_terminal():
    file = io.StringIO()
    with shown_watch(Console(file=file, force_terminal=True, width=100)) as watch:
        watch.expect(1)
        watch.ended("1P2D dual: 10 s")
    assert "1/1" in file.getvalue()
