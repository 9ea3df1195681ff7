"""Benchmarks, one a module, found by `dualpath bench`; `harness` has what they share."""

__all__: list[str] = []
