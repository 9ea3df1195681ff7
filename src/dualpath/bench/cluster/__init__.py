"""What benchmarks on a testbed share: model, trajectories, systems, counting of NICs, checks of tokens."""

__all__: list[str] = []
