"""The files under deploy/ fit the flows: what they name exists, and what they say can be read."""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_every_deployment_names_a_flow_with_its_parameters() -> None:
    deployments = yaml.safe_load((DEPLOY / "prefect.yaml").read_text())["deployments"]
    names = set()
    for one in deployments:
        module, _, function = one["entrypoint"].rpartition(".")
        flow = getattr(importlib.import_module(module), function)
        names.add(f"{flow.name}/{one['name']}")
        assert set(one["parameters"]) <= set(inspect.signature(flow.fn).parameters)
    assert names == {"gristmill/cpu", "gristmill-stage/gpu", "gristmill-sweep/gpu"}
    assert deployments[0]["parameters"]["training_deployment"] in names


def test_kubernetes_jobs_are_not_repeated_and_have_time_for_a_checkpoint() -> None:
    for name, resource in (("cpu-pool.json", "requests"), ("gpu-pool.json", "limits")):
        template = json.loads((DEPLOY / "kubernetes" / name).read_text())
        spec = template["job_configuration"]["job_manifest"]["spec"]
        assert spec["backoffLimit"] == 0
        assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 40
        assert resource in spec["template"]["spec"]["containers"][0]["resources"]
    kinds = [one["kind"] for one in yaml.safe_load_all((DEPLOY / "kubernetes" / "worker.yaml").read_text())]
    assert kinds == ["Namespace", "ServiceAccount", "Role", "RoleBinding", "Deployment", "Deployment"]


def test_compose_starts_a_server_on_postgresql_and_a_worker_per_pool() -> None:
    services = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]
    assert set(services) == {"database", "server", "deployments", "cpu-worker", "gpu-worker"}
    assert services["server"]["environment"]["PREFECT_API_DATABASE_CONNECTION_URL"].startswith("postgresql+asyncpg://")
    assert services["server"]["ports"] == ["127.0.0.1:4200:4200"]
    password = services["server"]["environment"]["PREFECT_SERVER_API_AUTH_STRING"]
    assert password.startswith("${PREFECT_AUTH:?")  # Compose refuses to start without one
    clients = {name: one["environment"].get("PREFECT_API_AUTH_STRING") for name, one in services.items()
               if "PREFECT_API_URL" in one["environment"]}
    assert clients == dict.fromkeys(["deployments", "cpu-worker", "gpu-worker"], password)


@pytest.mark.parametrize("script", ["prepare.sbatch", "train.sbatch"])
def test_slurm_scripts_are_valid_and_refuse_to_run_without_a_manifest(script: str) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    run = subprocess.run([bash, str(DEPLOY / "slurm" / script)], capture_output=True, text=True, env={})
    assert run.returncode != 0
    assert "name the manifest" in run.stderr
