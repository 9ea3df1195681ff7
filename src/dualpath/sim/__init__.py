"""The simulator: what a cluster would do, by the same policy and by times computed from specifications."""

__all__: list[str] = []
