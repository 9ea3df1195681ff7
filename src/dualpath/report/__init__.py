"""Self-contained HTML pages with tables and charts: `chart` describes charts, `page` makes the one file."""

__all__: list[str] = []
