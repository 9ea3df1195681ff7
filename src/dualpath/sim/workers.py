"""Runs independent tasks in worker processes. Results do not depend on how many there are, but their order
does.

Functions, tasks and results have to be picklable. Ctrl-C ends the workers at once, and so does the end of
this process, however it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

__all__ = ["each_in_workers"]

T = TypeVar("T")
R = TypeVar("R")


def each_in_workers(
    function: Callable[[T], R], tasks: Sequence[T], workers: int
) -> Iterator[tuple[T, R]]:
    """Each task with its result, as they end; started in their order. In this process when `workers` is 1.

    At an exception, of a task or thrown in where the result is used, workers are ended and nothing more is
    given.
    """
    if workers == 1:
        yield from ((task, function(task)) for task in tasks)
        return
    before = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        min(workers, max(1, len(tasks))),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
    )
    try:
        futures = {executor.submit(function, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        for each in set(multiprocessing.active_children()) - before:
            each.terminate()
        raise
    executor.shutdown()


def _begin() -> None:
    """In a worker. Ctrl-C goes to all processes of a terminal: the parent decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker holds both ends of its queue, and so would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
