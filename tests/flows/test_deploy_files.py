"""Files of deploy/ match the flows: every named object exists and every file parses."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from benchmarks.checkout import ROOT
from gristmill.mixtures.schema.engine import Engine

DEPLOY = ROOT / "deploy"


def test_every_deployment_names_a_flow_with_its_parameters() -> None:
    deployments = yaml.safe_load((DEPLOY / "prefect.yaml").read_text())["deployments"]
    names = set()
    for deployment in deployments:
        module, _, function = deployment["entrypoint"].rpartition(".")
        flow = getattr(importlib.import_module(module), function)
        names.add(f"{flow.name}/{deployment['name']}")
        assert set(deployment["parameters"]) <= set(
            inspect.signature(flow.fn).parameters
        )
    assert names == {"gristmill/cpu", "gristmill-stage/gpu"}
    assert deployments[0]["parameters"]["training_deployment"] in names


def test_kubernetes_jobs_are_not_repeated_and_have_time_for_a_checkpoint() -> None:
    for name, resource in (("cpu-pool.json", "requests"), ("gpu-pool.json", "limits")):
        template = json.loads((DEPLOY / "kubernetes" / name).read_text())
        spec = template["job_configuration"]["job_manifest"]["spec"]
        assert spec["backoffLimit"] == 0
        assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 40
        assert resource in spec["template"]["spec"]["containers"][0]["resources"]
    kinds = [
        resource_object["kind"]
        for resource_object in yaml.safe_load_all(
            (DEPLOY / "kubernetes" / "worker.yaml").read_text()
        )
    ]
    assert kinds == [
        "Namespace",
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "NetworkPolicy",
        "Deployment",
        "Deployment",
    ]


def test_ray_cluster_runs_the_job_from_its_own_head() -> None:
    cluster, job, policy = yaml.safe_load_all(
        (DEPLOY / "kubernetes" / "ray.yaml").read_text()
    )
    assert [cluster["kind"], job["kind"]] == ["RayCluster", "RayJob"]
    assert job["spec"]["clusterSelector"] == {
        "ray.io/cluster": cluster["metadata"]["name"]
    }
    constraints = (DEPLOY.parent / "constraints.txt").read_text()
    assert f"\nray=={cluster['spec']['rayVersion']}\n" in constraints
    command = shlex.split(job["spec"]["entrypoint"])
    assert command[:2] == ["gristmill", "run"]
    setting = command[command.index("--set") + 1].removeprefix("engine=")
    assert Engine.model_validate(yaml.safe_load(setting)).address == "auto"
    labels = policy["spec"]["podSelector"]["matchLabels"]
    pods = [
        job["spec"]["submitterPodTemplate"],
        cluster["spec"]["headGroupSpec"]["template"],
        *(group["template"] for group in cluster["spec"]["workerGroupSpecs"]),
    ]
    for pod in pods:
        assert pod["metadata"]["labels"] == labels
        assert pod["spec"]["securityContext"]["runAsUser"] == 10001


def test_compose_starts_a_server_on_postgresql_and_a_worker_per_pool() -> None:
    services = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())[
        "services"
    ]
    assert set(services) == {
        "folder",
        "database",
        "server",
        "deployments",
        "cpu-worker",
        "training-worker",
    }
    assert all("profiles" not in item for item in services.values()), (
        "a pool without a worker keeps its runs waiting for ever"
    )
    created = set(
        re.findall(r"work-pool create (\S+)", services["deployments"]["command"][-1])
    )
    served = {
        item["command"][item["command"].index("--pool") + 1]
        for name, item in services.items()
        if "worker" in name
    }
    pools = {
        item["work_pool"]["name"]
        for item in yaml.safe_load((DEPLOY / "prefect.yaml").read_text())["deployments"]
    }
    assert created == served == pools
    gpu_services = yaml.safe_load((DEPLOY / "docker" / "compose.gpu.yaml").read_text())[
        "services"
    ]
    assert set(gpu_services) <= set(services)
    assert services["server"]["environment"][
        "PREFECT_API_DATABASE_CONNECTION_URL"
    ].startswith("postgresql+asyncpg://")
    assert services["server"]["ports"] == ["127.0.0.1:4200:4200"]
    password = services["server"]["environment"]["PREFECT_SERVER_API_AUTH_STRING"]
    # Compose refuses to start without a password
    assert password.startswith("${PREFECT_AUTH:?")
    clients = {
        name: item["environment"].get("PREFECT_API_AUTH_STRING")
        for name, item in services.items()
        if "PREFECT_API_URL" in item.get("environment", {})
    }
    assert clients == dict.fromkeys(
        ["deployments", "cpu-worker", "training-worker"], password
    )


def test_mounted_folders_belong_to_the_user_of_the_image() -> None:
    (user,) = re.findall(
        r"useradd --uid (\d+) .* gristmill",
        (DEPLOY / "docker" / "Dockerfile").read_text(),
    )
    services = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())[
        "services"
    ]
    mounting = [
        name
        for name, item in services.items()
        if "./srv:/srv/gristmill" in item.get("volumes", ())
    ]
    assert services["folder"]["user"] == "root"
    assert services["folder"]["command"] == ["chown", "gristmill:", "/srv/gristmill"]
    for name in set(mounting) - {"folder"}:
        assert services[name]["depends_on"]["folder"] == {
            "condition": "service_completed_successfully"
        }
    pods = [
        json.loads((DEPLOY / "kubernetes" / name).read_text())["job_configuration"][
            "job_manifest"
        ]["spec"]
        for name in ("cpu-pool.json", "gpu-pool.json")
    ]
    pods += [
        item["spec"]
        for item in yaml.safe_load_all(
            (DEPLOY / "kubernetes" / "worker.yaml").read_text()
        )
        if item["kind"] == "Deployment"
    ]
    for item in pods:
        assert item["template"]["spec"]["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": int(user),
            "runAsGroup": int(user),
            "fsGroup": int(user),
            "seccompProfile": {"type": "RuntimeDefault"},
        }


def test_all_files_for_kubernetes_name_one_image_which_the_readme_replaces() -> None:
    folder = DEPLOY / "kubernetes"
    images = {
        image
        for name in ("worker.yaml", "cpu-pool.json", "gpu-pool.json")
        for image in re.findall(
            r"[\w/.]*/gristmill[:@]\w+", (folder / name).read_text()
        )
    }
    assert images == {"REGISTRY/gristmill@DIGEST"}
    readme = (folder / "README.md").read_text()
    assert "s|REGISTRY/gristmill@DIGEST|$IMAGE|" in readme
    assert (
        readme.index("create namespace")
        < readme.index("create secret")
        < readme.index("kubectl apply")
    )


@pytest.mark.parametrize("place", ["docker", "kubernetes"])
def test_base_job_templates_describe_every_variable(
    place: str,
) -> None:
    for name in ("cpu-pool.json", "gpu-pool.json"):
        template = json.loads((DEPLOY / place / name).read_text())
        used = set(
            re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"]))
        )
        assert used == set(template["variables"]["properties"])
        Draft202012Validator.check_schema(template["variables"])


def test_jobs_of_docker_have_the_folder_shared_memory_and_gpus() -> None:
    for name, gpus in (("cpu-pool.json", None), ("gpu-pool.json", [["gpu"]])):
        configuration = json.loads((DEPLOY / "docker" / name).read_text())[
            "job_configuration"
        ]
        assert configuration["volumes"] == ["{{ folder }}:/srv/gristmill"]
        create = configuration["container_create_kwargs"]
        assert create["shm_size"] == "8g"
        assert (
            create.get("device_requests", [{"capabilities": None}])[0]["capabilities"]
            == gpus
        )


def test_image_contains_sources_but_no_environments_or_outputs() -> None:
    ignored_paths = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", "build", "**/gristmill-store", "deploy/docker/srv"} <= set(
        ignored_paths
    )
    assert not {
        "deploy",
        "constraints.txt",
        "pyproject.toml",
        "README.md",
        "flows",
    } & set(ignored_paths)


TOOLS = DEPLOY.parent / "build" / "deploy" / "bin"


def run_tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a checker of files in deploy/."""
    if not (TOOLS / name).exists():
        pytest.skip(f"{name} is missing: make deploy-tools fetches it")
    return subprocess.run(
        [str(TOOLS / name), *arguments], capture_output=True, text=True
    )


@pytest.mark.parametrize("place", ["docker", "beam"])
def test_hadolint_finds_no_error_in_dockerfiles(place: str) -> None:
    process = run_tool(
        "hadolint", "--failure-threshold", "error", str(DEPLOY / place / "Dockerfile")
    )
    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize("file", ["kubernetes/worker.yaml", "beam/flink-session.yaml"])
def test_the_objects_for_kubernetes_are_valid_by_its_own_schemas(file: str) -> None:
    process = run_tool("kubernetes-validate", "--strict", str(DEPLOY / file))
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("passed") + process.stderr.count("passed") == len(
        list(yaml.safe_load_all((DEPLOY / file).read_text()))
    )


def test_checkov_finds_nothing_in_the_jobs_that_pools_start(tmp_path: Path) -> None:
    """`make check` runs checkov on deploy/, but checkov does not recognise manifests
    inside the pools' templates.
    """
    for name in ("cpu-pool.json", "gpu-pool.json"):
        template = json.loads((DEPLOY / "kubernetes" / name).read_text())
        variables = template["variables"]["properties"]
        values = {
            key: variable.get("default", "x") for key, variable in variables.items()
        }
        values |= {"env": [], "labels": {"app": "x"}, "command": ["true"]}
        text = json.dumps(template["job_configuration"]["job_manifest"])
        for key, value in values.items():
            text = text.replace(f'"{{{{ {key} }}}}"', json.dumps(value)).replace(
                f"{{{{ {key} }}}}", str(value)
            )
        (tmp_path / name).write_text(text)
    options = ("--framework", "kubernetes", "--skip-download", "--output", "json")
    process = run_tool("checkov", "--directory", str(tmp_path), *options)
    summary = json.loads(process.stdout)["summary"]
    assert (summary["failed"], summary["parsing_errors"]) == (0, 0)
    assert summary["skipped"] == 2, "the answered check of each of the two jobs"


def test_other_namespaces_reach_only_the_job_server() -> None:
    objects = yaml.safe_load_all((DEPLOY / "beam" / "flink-session.yaml").read_text())
    policies = {
        item["metadata"]["name"]: item["spec"]
        for item in objects
        if item["kind"] == "NetworkPolicy"
    }
    assert policies["inside"] == {
        "podSelector": {},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {}}]}],
    }
    (rule,) = policies["beam-job-server"]["ingress"]
    assert policies["beam-job-server"]["podSelector"] == {
        "matchLabels": {"app": "beam-job-server"}
    }
    assert {entry["port"] for entry in rule["ports"]} == {8099, 8098}
    assert len(policies) == 2


def test_beam_workers_job_server_and_package_have_the_same_version() -> None:
    constraints = (DEPLOY.parent / "constraints.txt").read_text()
    (beam,) = re.findall(r"^apache-beam==(.+)$", constraints, re.MULTILINE)
    recipe = (DEPLOY / "beam" / "Dockerfile").read_text()
    ((version, base),) = re.findall(
        r"^FROM apache/beam_python(3\.\d+)_sdk:(.+)$", recipe, re.MULTILINE
    )
    assert re.findall(r"^FROM python:(3\.\d+)-", recipe, re.MULTILINE) == [version]
    session = (DEPLOY / "beam" / "flink-session.yaml").read_text()
    ((line, server),) = re.findall(
        r"image: apache/beam_flink([\d.]+)_job_server:(.+)$", session, re.MULTILINE
    )
    assert base == server == beam
    assert set(re.findall(r"image: flink:([\d.]+)-java", session)) == {line}


def test_the_flink_session_names_its_own_services_ports_and_image() -> None:
    objects = list(
        yaml.safe_load_all((DEPLOY / "beam" / "flink-session.yaml").read_text())
    )
    objects_by_name = {
        (item["kind"], item["metadata"]["name"]): item for item in objects
    }
    assert {
        item["metadata"].get("namespace", "gristmill-flink") for item in objects
    } == {"gristmill-flink"}
    pods = {
        name: item["spec"]["template"]
        for (kind, name), item in objects_by_name.items()
        if kind == "Deployment"
    }
    for (kind, name), item in objects_by_name.items():
        if kind != "Service":
            continue
        (pod,) = (
            pod
            for pod in pods.values()
            if pod["metadata"]["labels"] == item["spec"]["selector"]
        )
        open_ports = {
            port["containerPort"]
            for container in pod["spec"]["containers"]
            for port in container["ports"]
        }
        assert {port["port"] for port in item["spec"]["ports"]} - {
            6124
        } <= open_ports, name
    properties = objects_by_name["ConfigMap", "flink"]["data"]["FLINK_PROPERTIES"]
    assert "jobmanager.rpc.address: flink-jobmanager\n" in properties
    workers = pods["flink-taskmanager"]["spec"]["containers"][1]
    assert workers["args"] == ["--worker_pool"]
    readme = (DEPLOY / "beam" / "README.md").read_text()
    engine = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)[0])[
        "engine"
    ]
    Engine.model_validate(engine)
    host, port = engine["options"]["environment_config"].split(":")
    assert (host, int(port)) == ("localhost", workers["ports"][0]["containerPort"])
    server = engine["options"]["job_endpoint"].partition(":")[0].split(".")
    assert server == ["beam-job-server", "gristmill-flink"]
    assert workers["image"] == "REGISTRY/gristmill-beam@DIGEST"
    assert "s|REGISTRY/gristmill-beam@DIGEST|$IMAGE|" in readme
