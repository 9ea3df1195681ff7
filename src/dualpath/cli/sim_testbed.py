"""`dualpath sim testbed`: predicts what `dualpath bench pooling` measured, and says how far it is off."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.bench.cluster.workload import Shape, paper_shape
from dualpath.bench.harness import BenchResult, Figure, stderr_progress
from dualpath.sim.testbed import ComputeRates, TestbedRun, predict
from dualpath.testbed.bed import TCP_SHARE
from dualpath.testbed.config import TestbedConfig
from dualpath.testbed.topology import Topology

__all__ = ["add_arguments", "run"]

_RANDOM = "random"
_RATES_ROUNDS = 3
_EPILOG = """\
example:
  dualpath sim testbed --results docs/results/pooling.json
      Predicts the job completion time of each system and topology in it, from the rates recorded in it.

More in docs/simulator.md.
"""


class _Setup(msgspec.Struct):
    model: str
    kv_bytes_token: int
    cnic: str
    snic_goodput_bytes_s: float
    threads: int
    block_tokens: int
    agents: int
    turns: int
    context_tokens: int


class _Figures(msgspec.Struct):
    jct_s: dict[str, dict[str, float]]
    alone_s: dict[str, float]
    compute_rates: ComputeRates | None = None


class _Result(msgspec.Struct):
    """What is needed of a result of `dualpath bench pooling`."""

    bench: str
    figures: _Figures
    setup: _Setup


class _Compared(msgspec.Struct):
    """By topology and system; `error`: of the prediction, by what was measured."""

    testbed_error: float
    jct_predicted_s: dict[str, dict[str, float]]
    jct_measured_s: dict[str, dict[str, float]]
    error: dict[str, dict[str, float]]
    request_s: float
    compute_rates: ComputeRates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument(
        "--results",
        required=True,
        type=Path,
        metavar="FILE",
        help="A result of `dualpath bench pooling --json`.",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="Measure compute rates now, on this machine, instead of taking those recorded in the result.",
    )
    parser.add_argument(
        "--json", action="store_true", help="Print the result as one line of JSON, nothing else."
    )


def run(args: argparse.Namespace) -> int:
    measured = _read(args.results)
    setup = measured.setup
    shape = paper_shape(setup.context_tokens, setup.turns)
    if args.measure:
        with redirect_stdout(sys.stderr):
            rates = _measure(setup, shape, _engines(measured))
    elif measured.figures.compute_rates is None:
        raise ConfigError(f"--results: {args.results} has no compute rates; use --measure")
    else:
        rates = measured.figures.compute_rates
    compared = _compare(measured, _testbed_run(measured, shape, rates), rates)
    if args.json:
        source = "measured now" if args.measure else "recorded in the result"
        described: dict[str, Figure] = {**msgspec.to_builtins(setup), "rates": source}
        print(BenchResult("sim-testbed", msgspec.to_builtins(compared), described).to_json())
    else:
        _print_table(compared)
    return 0


def _read(path: Path) -> _Result:
    try:
        result = msgspec.json.decode(path.read_bytes(), type=_Result)
    except OSError as error:
        raise ConfigError(f"--results: cannot read {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"--results: expected a result of `dualpath bench pooling --json` in {path}: {error}"
        ) from None
    if result.bench != "pooling" or result.setup.model != _RANDOM:
        raise ConfigError(
            f"--results: expected `dualpath bench pooling` with --model {_RANDOM}, got a result of "
            f"{result.bench!r} with {result.setup.model!r}"
        )
    if "oracle" not in result.figures.alone_s:
        raise ConfigError(
            f"--results: {path} has no single requests of oracle, which tell what a request costs "
            "outside of engines; measure with oracle among --systems and 1P1D among --topologies"
        )
    return result


def _measure(setup: _Setup, shape: Shape, engines: int) -> ComputeRates:
    # Imported here: needs torch, which predicting does not.
    from dualpath.bench.cluster.model import random_model
    from dualpath.bench.cluster.rates import (
        MeasuredShapes,
        fit_rates,
        measure_round,
        model_spec,
    )

    spec = model_spec(str(random_model()), threads=setup.threads, block_tokens=setup.block_tokens)
    shapes = MeasuredShapes.of(shape, setup.agents)
    rounds = [
        measure_round(spec, shapes, engines=engines, progress=stderr_progress)
        for _ in range(_RATES_ROUNDS)
    ]
    return fit_rates(shapes, rounds)


def _engines(measured: _Result) -> int:
    """Of the largest testbed; a node has one."""
    return max(len(Topology.parse(each).nodes) for each in measured.figures.jct_s)


def _testbed_run(measured: _Result, shape: Shape, rates: ComputeRates) -> TestbedRun:
    setup = measured.setup
    computing_s = rates.request_s(shape.context_tokens, shape.append_tokens, shape.output_tokens)
    return TestbedRun(
        agents=setup.agents,
        turns=setup.turns,
        context_tokens=shape.context_tokens,
        append_tokens=shape.append_tokens,
        output_tokens=shape.output_tokens,
        kv_bytes_token=setup.kv_bytes_token,
        block_tokens=setup.block_tokens,
        snic_bytes_s=setup.snic_goodput_bytes_s,
        cnic_bytes_s=TestbedConfig(cnic=setup.cnic).cnic_bits_s / 8 * TCP_SHARE,
        # The oracle reads and transfers nothing, so the rest is clients, frontend and messages.
        request_s=max(0.0, measured.figures.alone_s["oracle"] - computing_s),
    )


def _compare(measured: _Result, run: TestbedRun, rates: ComputeRates) -> _Compared:
    predicted: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float]] = {}
    for topology, by_system in measured.figures.jct_s.items():
        nodes = Topology.parse(topology)
        predicted[topology] = {
            system: predict(
                run, rates, system=system, prefill=nodes.prefill, decode=nodes.decode
            ).jct_s
            for system in by_system
        }
        errors[topology] = {
            system: jct_s / by_system[system] - 1 for system, jct_s in predicted[topology].items()
        }
    return _Compared(
        testbed_error=max(abs(error) for each in errors.values() for error in each.values()),
        jct_predicted_s=predicted,
        jct_measured_s=measured.figures.jct_s,
        error=errors,
        request_s=run.request_s,
        compute_rates=rates,
    )


def _print_table(compared: _Compared) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Seconds until all agents have ended", title_justify="left")
    table.add_column("testbed")
    table.add_column("system")
    for name in ("measured", "predicted", "error"):
        table.add_column(name, justify="right")
    for topology, by_system in compared.error.items():
        for system, error in by_system.items():
            measured_s = compared.jct_measured_s[topology][system]
            predicted_s = compared.jct_predicted_s[topology][system]
            row = f"{measured_s:.2f}", f"{predicted_s:.2f}", f"{error:+.1%}"
            table.add_row(topology, system, *row)
    Console().print(table)
    print(f"worst error {compared.testbed_error:.1%}")
