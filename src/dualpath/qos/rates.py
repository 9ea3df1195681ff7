"""Rates in bits a second, as `tc` writes them: 3200mbit."""

from __future__ import annotations

import re

from dualpath.base.errors import ConfigError

__all__ = ["format_rate", "parse_rate"]

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}


def parse_rate(text: str, origin: str = "rate") -> int:
    """Bits a second of `3200mbit`, `3.2gbit` or `400Mbit`; ConfigError, naming `origin`, for others."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]+)", text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{origin}: expected a rate such as 3200mbit or 400gbit, got {text!r}")
    rate_bit_s = round(float(match[1]) * _UNITS[match[2].lower()])
    if rate_bit_s < 1:
        raise ConfigError(f"{origin}: expected a rate above zero, got {text!r}")
    return rate_bit_s


def format_rate(rate_bit_s: int) -> str:
    """In the largest unit that divides it: 3200000000 -> 3200mbit, 400000000000 -> 400gbit."""
    for unit in ("gbit", "mbit", "kbit"):
        if rate_bit_s % _UNITS[unit] == 0 and rate_bit_s >= _UNITS[unit]:
            count = rate_bit_s // _UNITS[unit]
            # 3200mbit rather than 3.2gbit, but 3gbit only when it is at least ten: what operators write.
            if unit != "gbit" or count >= 10:
                return f"{count}{unit}"
    return f"{rate_bit_s}bit"
