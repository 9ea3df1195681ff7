"""Other people's load generators beside ours: the same server and load, and how far the figures differ.

    agreement = measure_agreement(progress, AgreementOptions(aiperf=Path("aiperf")))

`tools` runs them and finds or installs them, `figures` reads what they wrote, `agreement` compares.
"""

from dualpath.bench.peers.agreement import Agreement, AgreementOptions, measure_agreement
from dualpath.bench.peers.figures import LoadFigures, read_aiperf, read_vllm
from dualpath.bench.peers.tools import Aiperf, PeerFailed, PeerTool, VllmBench

__all__ = [
    "Agreement",
    "AgreementOptions",
    "Aiperf",
    "LoadFigures",
    "PeerFailed",
    "PeerTool",
    "VllmBench",
    "measure_agreement",
    "read_aiperf",
    "read_vllm",
]
