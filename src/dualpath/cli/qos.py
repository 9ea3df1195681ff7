"""`dualpath qos`: prints the configuration of a network for our traffic classes, or checks this host's.

`check` ends with 1 when something expected is wrong. Everything else only prints.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import cast

from dualpath.base.errors import ConfigError
from dualpath.base.traffic_class import DEFAULT_PLAN, LaneArbitration, QosPlan, TrafficClass
from dualpath.qos import (
    Check,
    EgressPlan,
    FabricConfig,
    check_host,
    compute_egress,
    ethernet_config,
    infiniband_config,
    parse_rate,
    roce_config,
    storage_egress,
)

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  dualpath qos infiniband >> /etc/opensm/opensm.conf
  dualpath qos roce --dev ens1f0np0 --rdma-dev mlx5_0
  dualpath qos ethernet --dev eth1 --rate 25gbit --batch | tc -batch -
  dualpath qos check --dev eth1 --rate 25gbit
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    fabrics = parser.add_subparsers(
        dest="fabric", metavar="{infiniband,roce,ethernet,check}", required=True
    )

    def add(name: str, help: str) -> argparse.ArgumentParser:
        sub = fabrics.add_parser(name, help=help, description=help + ".", allow_abbrev=False)
        _add_plan_arguments(sub)
        return sub

    lanes = LaneArbitration()
    infiniband = add("infiniband", "print OpenSM's configuration of virtual lanes")
    infiniband.add_argument(
        "--high-limit",
        type=int,
        default=lanes.high_limit,
        metavar="N",
        help="times 4 KiB from high lanes before a low packet goes (default: %(default)s)",
    )
    infiniband.add_argument(
        "--high-lane-weight",
        type=int,
        default=lanes.high_lane_weight,
        metavar="N",
        help="units of 64 bytes a turn (default: %(default)s)",
    )
    infiniband.add_argument(
        "--low-lane-weight",
        type=int,
        default=lanes.low_lane_weight,
        metavar="N",
        help="units of 64 bytes a turn (default: %(default)s)",
    )
    roce = add("roce", "print the configuration of a RoCE NIC, and of a switch as an example")
    roce.add_argument(
        "--dev", default="ens1f0np0", metavar="IFACE", help="the NIC (default: %(default)s)"
    )
    roce.add_argument(
        "--rdma-dev",
        default="mlx5_0",
        metavar="NAME",
        help="its RDMA device (default: %(default)s)",
    )
    ethernet = add("ethernet", "print tc commands for Linux interfaces")
    _add_interface_arguments(ethernet)
    ethernet.add_argument(
        "--batch", action="store_true", help="print input for tc -batch rather than a shell script"
    )
    check = add("check", "check what this host has and where marked packets go")
    _add_interface_arguments(check)
    check.add_argument(
        "--send",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="send a few marked packets out of --dev (UDP, link-local multicast; default: on)",
    )


def run(args: argparse.Namespace) -> int:
    plan = _plan(args)
    match args.fabric:
        case "infiniband":
            return _print(args, infiniband_config(plan))
        case "roce":
            return _print(args, roce_config(plan, args.dev, args.rdma_dev))
        case "ethernet":
            egresses = _egresses(args, plan)
            if not egresses:
                raise ConfigError("qos ethernet: expected --dev or --snic with the rate of each")
            return _print(args, ethernet_config(plan, egresses, batch=args.batch))
    result = check_host(plan, _egresses(args, plan), send=args.send)
    if args.json:
        print(result.to_json())
    else:
        _print_findings(result)
    return 0 if result.passed else 1


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument(
        "--low-weight",
        type=int,
        default=DEFAULT_PLAN.low_weight,
        metavar="PERCENT",
        help="share of the low classes when all is busy, for RoCE and Ethernet (default: %(default)s)",
    )
    parser.add_argument(
        "--dscp",
        action="append",
        default=[],
        metavar="CLASS=N",
        help="another code point for a class: " + ", ".join(TrafficClass) + "; repeatable",
    )


def _add_interface_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dev", metavar="IFACE", help="the compute NIC")
    parser.add_argument("--rate", metavar="RATE", help="of --dev, such as 3200mbit or 25gbit")
    parser.add_argument("--snic", metavar="IFACE", help="a storage NIC that is held at a rate")
    parser.add_argument("--snic-rate", metavar="RATE", help="of --snic")


def _plan(args: argparse.Namespace) -> QosPlan:
    dscp: dict[TrafficClass, int] = {}
    for text in cast(list[str], args.dscp):
        name, _, number = text.partition("=")
        if name not in set(TrafficClass) or not number.isdecimal():
            raise ConfigError(
                f"--dscp: expected CLASS=N with one of {', '.join(TrafficClass)}, got {text!r}"
            )
        dscp[TrafficClass(name)] = int(number)
    plan = replace(DEFAULT_PLAN, low_weight=args.low_weight)
    if args.fabric == "infiniband":
        lanes = LaneArbitration(args.high_limit, args.high_lane_weight, args.low_lane_weight)
        plan = replace(plan, lanes=lanes)
    return plan.with_dscp(dscp)


def _egresses(args: argparse.Namespace, plan: QosPlan) -> list[EgressPlan]:
    found = []
    for flag, device, rate in (
        ("--dev", args.dev, args.rate),
        ("--snic", args.snic, args.snic_rate),
    ):
        rate_flag = "--rate" if flag == "--dev" else "--snic-rate"
        if (device is None) != (rate is None):
            raise ConfigError(f"qos: {flag} and {rate_flag} belong together")
        if device is None:
            continue
        rate_bit_s = parse_rate(rate, rate_flag)
        found.append(
            compute_egress(plan, device, rate_bit_s)
            if flag == "--dev"
            else storage_egress(device, rate_bit_s)
        )
    return found


def _print(args: argparse.Namespace, config: FabricConfig) -> int:
    if args.json:
        print(config.to_json())
    else:
        sys.stdout.write(config.to_text())
    return 0


def _print_findings(result: Check) -> None:
    width = max(len(each.subject) for each in result.findings)
    for each in result.findings:
        print(f"{each.verdict:<12}  {each.subject:<{width}}  {each.detail}")
    print("passed" if result.passed else "failed: see the lines that begin with wrong")
