"""The examples of deployments: well formed, consistent, and with flags that exist. None is run."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dualpath.base.config_cli import add_config_arguments, config_from_args
from dualpath.router.config import RouterConfig
from dualpath.vllm.settings import ConnectorSettings, connector_settings

FOLDER = Path(__file__).parents[2] / "docs" / "examples"


def router_of(command: str) -> RouterConfig:
    """What the flags after `dualpath router` mean; each must exist."""
    words = shlex.split(command.split("dualpath router", 1)[1])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_config_arguments(parser, RouterConfig)
    return config_from_args(RouterConfig, parser.parse_args(words), {})


def connector_of(script: str, name: str) -> ConnectorSettings:
    """The settings in a shell script that starts vLLM, with the host's name put in; each must exist."""
    plain = script.replace('\\"', '"').replace("$$", "$")
    plain = re.sub(r"""'"\$\(hostname\)\.\$ROLE"'|\$\(hostname\)""", name, plain)
    start = plain.index("{", plain.index("--kv-transfer-config"))
    transfer, _ = json.JSONDecoder().raw_decode(plain[start:])
    assert transfer["kv_connector_module_path"] == "dualpath.vllm.connector"
    assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_both", "recompute")
    return connector_settings(transfer["kv_connector_extra_config"])


def urls_and_peers(router: RouterConfig) -> dict[str, str]:
    addresses = router.addresses("prefill", "decode")
    return {each.origin.url: str(each.kv) for each in addresses}


def test_compose() -> None:
    compose = yaml.safe_load((FOLDER / "vllm-compose.yaml").read_text())
    services: dict[str, Any] = compose["services"]
    router = router_of(services.pop("router")["command"][0])
    known = urls_and_peers(router)
    for name, service in services.items():
        assert service["hostname"] == name
        settings = connector_of(service["command"][0], name)
        assert known.pop(f"http://{name}:8000") == str(settings.peer())
        assert settings.kv_host == "0.0.0.0"
        assert "DUALPATH_KV_SECRET" in service["environment"]
        mounts = {each.split(":")[1] for each in service["volumes"]}
        assert settings.store in mounts
    assert known == {}
    devices = [
        service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"][0]
        for service in services.values()
    ]
    assert len(set(devices)) == len(devices)
    named = {each.split(":")[0] for service in services.values() for each in service["volumes"]}
    assert named == set(compose["volumes"])


def test_kubernetes() -> None:
    documents = list(yaml.safe_load_all((FOLDER / "vllm-kubernetes.yaml").read_text()))
    by_kind: dict[str, dict[str, Any]] = {}
    for each in documents:
        assert {"apiVersion", "kind", "metadata"} <= set(each)
        by_kind.setdefault(each["kind"], {})[each["metadata"]["name"]] = each
    script = by_kind["ConfigMap"]["dualpath-server"]["data"]["start.sh"]
    deployment = by_kind["Deployment"]["router"]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    known = urls_and_peers(router_of(container["command"][-1]))
    for name, stateful in by_kind["StatefulSet"].items():
        spec = stateful["spec"]
        assert (
            spec["serviceName"] == name and by_kind["Service"][name]["spec"]["clusterIP"] == "None"
        )
        pod = spec["template"]
        assert spec["selector"]["matchLabels"] == pod["metadata"]["labels"]
        (server,) = pod["spec"]["containers"]
        environment = {each["name"]: each for each in server["env"]}
        assert environment["ROLE"]["value"] == name
        assert {"MODEL", "DUALPATH_KV_SECRET"} <= set(environment)
        mounts = {each["mountPath"]: each["name"] for each in server["volumeMounts"]}
        assert set(mounts.values()) == {each["name"] for each in pod["spec"]["volumes"]}
        for number in range(spec["replicas"]):
            host = f"{name}-{number}.{name}"
            settings = connector_of(script, host)
            assert known.pop(f"http://{host}:8000") == str(settings.peer())
            assert settings.store in mounts
    assert known == {}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_examples_say_that_they_were_not_run(path: Path) -> None:
    assert "Not run by us" in path.read_text()
