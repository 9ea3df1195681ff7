"""What an agent counts. It only grows; `taken` gives what was added since the last time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

__all__ = ["AgentStats"]


@dataclass(slots=True)
class AgentStats:
    """Blocks, unless said. Written by the agent's thread, read by any."""

    read_blocks: int = 0
    read_for_peer_blocks: int = 0
    pulled_blocks: int = 0
    saved_blocks: int = 0
    written_blocks: int = 0
    dropped_saves: int = 0
    failed_reads: int = 0
    failed_pulls: int = 0
    failed_writes: int = 0
    expired_prompts: int = 0
    _seen: dict[str, int] = field(default_factory=dict)

    def taken(self) -> dict[str, int]:
        """The counts since the last call, without those that are zero."""
        now = {name: value for name, value in asdict(self).items() if name != "_seen"}
        added = {name: now[name] - self._seen.get(name, 0) for name in now}
        self._seen = now
        return {name: value for name, value in added.items() if value}
