"""Threads that move KV, and their place behind the threads that compute.

Where the model computes on the CPU, both want the same cores, and each time bytes arrive the thread that
takes them would push a computing one off its core. A process that computes so calls `stand_behind_compute`
first: its KV threads take no core from a running thread when they wake up (SCHED_BATCH), and weigh little
among those that wait. In other processes they are threads like any other. No privilege is needed; where the
system has no such classes (they are Linux's), or refuses, nothing changes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["kv_executor", "kv_thread", "stand_behind_compute"]

log = logging.getLogger(__name__)

_NICE = 10
"""A tenth of a core's time for a KV thread that never rests beside a computing one: it goes on, slowly."""

_behind = threading.Event()


def stand_behind_compute() -> None:
    """From now on the KV threads that this process starts stand behind its others. There is no way back."""
    if hasattr(os, "SCHED_BATCH"):
        _behind.set()


def kv_thread(
    target: Callable[..., object], *, name: str, args: tuple[Any, ...] = ()
) -> threading.Thread:
    """A daemon thread, not started, that runs `target(*args)`."""

    def run() -> None:
        _take_place()
        target(*args)

    return threading.Thread(target=run, name=name, daemon=True)


def kv_executor(n_threads: int, *, name: str) -> ThreadPoolExecutor:
    """An executor whose threads move KV; the caller shuts it down."""
    return ThreadPoolExecutor(n_threads, thread_name_prefix=name, initializer=_take_place)


def _take_place() -> None:
    """Put the calling thread where it belongs."""
    if not _behind.is_set():
        return
    thread = threading.get_native_id()
    try:
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        # Who runs us may have put all of us further behind.
        if os.getpriority(os.PRIO_PROCESS, thread) < _NICE:
            os.setpriority(os.PRIO_PROCESS, thread, _NICE)
    except OSError as error:
        log.warning("KV threads run like all others here, the system refuses: %s", error)
        _behind.clear()
