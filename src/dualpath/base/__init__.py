"""What every package may know: ids, sizes, errors, typed configuration. Import from its modules."""

__all__: list[str] = []
