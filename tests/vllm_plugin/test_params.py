"""What passes between router and servers: exact JSON, and refusals that say what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dualpath.base.errors import RequestError
from dualpath.vllm import KvPeer, PairParams, decode_params, encode_params, prefill_params


def test_the_wire_form() -> None:
    params = prefill_params("r", 2, KvPeer("de", 9000), hit_tokens=256, pe_tokens=128)
    assert params == {
        "dualpath": {
            "role": "prefill",
            "request": "r",
            "attempt": 2,
            "peer": {"host": "de", "port": 9000},
            "hit_tokens": 256,
            "pe_tokens": 128,
            "prompt_tokens": 0,
        }
    }
    assert decode_params(json.loads(json.dumps(params))) == PairParams(
        "prefill", "r", 2, KvPeer("de", 9000), 256, 128
    )


def test_others_params_are_not_ours() -> None:
    assert decode_params(None) is None
    assert decode_params({}) is None
    assert decode_params({"do_remote_prefill": True}) is None


def test_unknown_fields_are_ignored() -> None:
    params = encode_params(PairParams("decode", "r", 1, KvPeer("pe", 1)))
    params["dualpath"]["later"] = 1  # type: ignore[index]
    assert decode_params(params) == PairParams("decode", "r", 1, KvPeer("pe", 1))


def test_ranks_have_the_ports_behind_that_of_the_server() -> None:
    pair = PairParams("decode", "r", 1, KvPeer("pe", 65534))
    assert pair.of_rank(0) == pair
    assert pair.of_rank(1) == PairParams("decode", "r", 1, KvPeer("pe", 65535))
    assert pair.of_rank(2) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("role", "both"),
        ("request", ""),
        ("attempt", 0),
        ("attempt", "1"),
        ("peer", {"host": "", "port": 1}),
        ("peer", {"host": "a", "port": 70000}),
        ("pe_tokens", 5),
        ("prompt_tokens", -1),
    ],
)
def test_what_no_router_sends(field: str, value: object) -> None:
    params = prefill_params("r", 1, KvPeer("de", 9000), hit_tokens=4, pe_tokens=4)
    params["dualpath"][field] = value  # type: ignore[index]
    with pytest.raises(RequestError, match="kv_transfer_params"):
        decode_params(params)


def test_importing_the_package_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, dualpath.vllm; assert not {'vllm', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
