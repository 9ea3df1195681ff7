"""The `dualpath` command: one module a subcommand, imported only when it is used."""

__all__: list[str] = []
