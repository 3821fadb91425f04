"""What a command line asks of a deployment that runs, and what it leaves as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner, Result

from tenuto.cli import VERBS, bench, delete, deploy, drain, history, load_verb, model, undrain
from tenuto.cli.deploying import (
    ServingArguments,
    agrees_to_losses,
    deployment_at,
    keep_drained,
    operations,
    read_deployment,
)
from tenuto.deployments.control.change_preview import ChangePreview, preview_plan
from tenuto.deployments.process.ray_address import KnownDeployment
from tenuto.deployments.serve.deployment import UNCHANGEABLE, Deployment
from tenuto.deployments.serve.history import History
from tenuto.deployments.serve.user_config import HANGS_S
from tenuto.deployments.wire.status import SystemStatus
from tenuto.documents import dump_yaml
from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.placement import ModelSpec, Plan, Workload
from tenuto.placement.cluster import Gpu
from tenuto.placement.plan import PlannedGpu, PolicyUsed
from tenuto.placement.planner.minimal_change import less_by
from tenuto.profiles import Profiles
from tests.instruments.fake_server import fake_server
from tests.instruments.generating import fixed, writes
from tests.instruments.plans import make_plan
from tests.instruments.stores import DictStore


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ([], set()),
        (["--gateways", "3"], {"gateways"}),
        (["--emulate", "--port", "8000"], {"executor", "port"}),
        (["--scheduler", "eager"], {"scheduler", "scheduler_options"}),
        (["--keys", "keys.yaml"], {"access"}),
    ],
)
def test_what_no_option_asks_for_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, options: list[str], changed: set[str]
) -> None:
    left: list[str] = []

    def read(asked: ServingArguments) -> Deployment:
        left.extend(asked.left_open())
        raise SystemExit(0)

    monkeypatch.setattr(ServingArguments, "deployment", read)
    assert CliRunner().invoke(deploy.command, ["plan.yaml", *options]).exit_code == 0
    of_its_own = {"plan", "workload", "gateway_options", "nodes"}  # kept, or taken from the plan file, elsewhere
    assert {name for name in left if "." not in name} == Deployment.model_fields.keys() - of_its_own - changed


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        (["--host-name", "api.example.com"], {"host_names"}),
        (["--traces", "http://127.0.0.1:4318"], {"traces"}),
        (["--keys", "{folder}/keys.yaml"], {"keys"}),
        (["--tls-cert", "elsewhere.pem", "--tls-key", "elsewhere.key"], {"tls_cert", "tls_key"}),
    ],
)
@pytest.mark.parametrize("runs", [True, False])
def test_who_may_ask_stays_as_it_is_where_no_option_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], changed: set[str], runs: bool
) -> None:
    """Whether it runs so already, or the plan file says so."""
    access = {
        "keys": [{"name": "anna", "sha256": "1" * 64}],
        "key_file": "/keys/more.yaml",
        "tls_cert": "/tls/cert.pem",
        "tls_key": "/tls/key.pem",
        "host_names": ["here"],
        "traces": {"endpoint": "http://10.0.0.1:4318"},
    }
    plan = make_plan({"n0/0/a": (50.0, ["m"])})
    before = Deployment.model_validate({"plan": plan.to_data(), "access": access})
    file = tmp_path / "plan.yaml"
    file.write_text(dump_yaml((Deployment(plan=plan) if runs else before).config().to_data()))
    (tmp_path / "keys.yaml").write_text(f"keys: [{{name: bert, sha256: {'b' * 64}}}]")
    found: list[Deployment] = []

    def ground(asked: ServingArguments, _plan: Plan) -> None:
        found.append(asked.deployment().left_open_as(before, asked.left_open()) if runs else asked.deployment())
        raise SystemExit(0)

    monkeypatch.setattr(ServingArguments, "ground", ground)
    done = CliRunner().invoke(deploy.command, [str(file), *(each.format(folder=tmp_path) for each in options)])
    assert done.exit_code == 0, done.exception
    (asked,) = found
    of_access = type(before.access).model_fields
    assert {name for name in of_access if getattr(asked.access, name) != getattr(before.access, name)} == changed


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ([], {}),
        (["--port", "9100"], {"port": 9100}),
        (["--emulate", "--scheduler", "deferred"], {"executor": "emulated", "scheduler": "deferred"}),
        (["--gateways", "1"], {"gateways": 1}),
        (["--hangs-s", "3"], {"hangs_s": 3.0}),
    ],
)
def test_a_plan_file_says_how_it_is_served_and_options_say_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], changed: dict[str, object]
) -> None:
    plan = make_plan({"n0/0/a": (50.0, ["m"])})
    made = Deployment(
        plan=plan, executor="torch", port=9000, proxy_port=7, operator_port=8, scheduler="eager", gateways=2
    )
    file = tmp_path / "plan.yaml"
    file.write_text(dump_yaml(made.config().to_data()))
    found: list[Deployment] = []

    def ground(asked: ServingArguments, _plan: Plan) -> None:
        found.append(asked.deployment())
        raise SystemExit(0)

    monkeypatch.setattr(ServingArguments, "ground", ground)
    done = CliRunner().invoke(deploy.command, [str(file), *options])
    assert done.exit_code == 0, done.exception
    (asked,) = found
    assert asked == made.model_copy(update={"name": "plan", **changed})
    assert [each.user_config.hangs_s for each in asked.config().gpulets] == [changed.get("hangs_s", HANGS_S)]


def test_a_plan_file_leaves_open_what_its_author_did_not_choose(tmp_path: Path) -> None:
    plan, file = make_plan({"n0/0/a": (50.0, ["m"])}), tmp_path / "plan.yaml"
    for text in (plan.dump(), dump_yaml(Deployment(plan=plan).config().to_data())):
        file.write_text(text)
        assert all(read_deployment(str(file)).leaves_open(name) for name in UNCHANGEABLE)
    file.write_text(dump_yaml(Deployment(plan=plan, port=9000).config().to_data()))
    assert [name for name in UNCHANGEABLE if not read_deployment(str(file)).leaves_open(name)] == ["port"]


BOTH, ONE = make_plan({"n0/0/a": (50.0, ["m", "n"])}), make_plan({"n0/0/a": (50.0, ["m"])})


def test_what_loses_its_service_does_so_only_with_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    agrees_to_losses(yes=False)(preview_plan(ONE, BOTH))
    agrees_to_losses(yes=True)(preview_plan(BOTH, ONE))
    with pytest.raises(InvalidInputError, match="n: served now, and by the new plan no more, and nobody agreed"):
        agrees_to_losses(yes=False)(preview_plan(BOTH, ONE))  # nobody is there to be asked
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    answers = iter([True, False])
    monkeypatch.setattr("click.confirm", lambda _question, **_how: next(answers))
    agrees_to_losses(yes=False)(preview_plan(BOTH, ONE))
    with pytest.raises(InvalidInputError, match="nobody agreed"):
        agrees_to_losses(yes=False)(preview_plan(BOTH, ONE))


def test_a_fault_in_a_plan_file_is_said_with_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    for data in (ONE.to_data(), Deployment(plan=ONE).config().to_data()):
        path.write_text(dump_yaml(data).replace("share_pct: 50.0", "share_pct: 120"))
        found = CliRunner().invoke(deploy.command, [str(path)])
        assert str(found.exception).startswith(f"{path}: gpulets.0.share_pct: 120: "), found.exception


class DrainedRuns:
    """A deployment as `tenuto drain` sees it, that goes wherever it is asked to."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.reasons: list[str] = []
        self.lost: tuple[str, ...] = ()

    def await_settled(self) -> Deployment:
        return Deployment(plan=self.plan)

    def planner_inputs(self) -> tuple[Profiles, tuple[Gpu, ...]]:
        return Profiles([]), ()

    def lost_gpus(self, _gpus: Sequence[object]) -> tuple[str, ...]:
        return self.lost

    def deploy(self, wanted: Deployment, why: str, *, by: str, agrees: Callable[[ChangePreview], None]) -> bool:
        agrees(preview_plan(self.plan, wanted.plan))
        self.plan = wanted.plan
        self.reasons.append(f"{by}: {why}")
        return True

    def await_empty(self, _before: Plan, _places: Sequence[str]) -> list[str]:
        return ["gateway"]


def drained_with(monkeypatch: pytest.MonkeyPatch, runs: DrainedRuns, *words: str) -> Result:
    for verb in (drain, undrain):
        monkeypatch.setattr(verb, "operations", lambda _address: nullcontext(runs))
    return CliRunner().invoke({"drain": drain, "undrain": undrain}[words[0]].command, words[1:])


SPARE = make_plan({"n0/0/a": (100.0, ["m"]), "n1/0/a": (100.0, ["n"])}, rate_rps=10.0)
FULL = make_plan({"n0/0/a": (100.0, ["m"]), "n1/0/a": (100.0, ["n"])}, rate_rps=600.0)


def test_a_drain_says_what_moves_and_what_stays_and_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = DrainedRuns(SPARE)
    first = drained_with(monkeypatch, runs, "drain", "n1")
    assert first.exit_code == 0
    assert "n1/0/a: stop: " in first.output
    assert "no gpu-let is left on n1; until its Ray ends, there stay: gateway" in first.output
    again = drained_with(monkeypatch, runs, "drain", "n1")
    assert (again.exit_code, "n1 is drained already" in again.output) == (0, True)
    assert runs.reasons == ["drain: drain n1"]
    for place, why in (("n0", "no GPU would be left"), ("n9", "no such place")):
        assert why in str(drained_with(monkeypatch, runs, "drain", place).exception)
    assert drained_with(monkeypatch, runs, "undrain", "n1").exit_code == 0
    assert "'n1': is not drained" in str(drained_with(monkeypatch, runs, "undrain", "n1").exception)
    assert runs.reasons == ["drain: drain n1", "undrain: undrain n1"]


def test_a_drain_with_too_little_room_says_who_loses_how_much_and_wants_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = DrainedRuns(FULL)
    refused = drained_with(monkeypatch, runs, "drain", "n1")
    assert "too little room elsewhere: " in str(refused.exception)
    assert " rps, and nobody agreed to that. Say --yes" in str(refused.exception)
    assert runs.plan == FULL
    assert drained_with(monkeypatch, runs, "drain", "n1", "--yes").exit_code == 0
    assert runs.plan.drained == ("n1",)
    assert drained_with(monkeypatch, runs, "undrain", "n1").exit_code == 0
    assert less_by(FULL, runs.plan) == {}


def test_what_a_lost_node_served_is_not_what_a_drain_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    there = make_plan({"n1/0/a": (100.0, ["m"]), "n1/1/a": (100.0, ["m"])}, rate_rps=1000.0)
    runs = DrainedRuns(there.model_copy(update={"gpus": (*there.gpus, PlannedGpu(id="n0/0", type="v100"))}))
    assert "too little room" in str(drained_with(monkeypatch, runs, "drain", "n1").exception)
    runs.lost = ("n1/0", "n1/1")
    assert drained_with(monkeypatch, runs, "drain", "n1").exit_code == 0
    assert runs.plan.drained == ("n1",)


def test_a_drain_of_a_plan_by_a_policy_that_is_not_here_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = DrainedRuns(SPARE.model_copy(update={"policy": PolicyUsed(name="theirs")}))
    assert "--policy: 'theirs': unknown policy" in str(drained_with(monkeypatch, runs, "drain", "n1").exception)
    assert drained_with(monkeypatch, runs, "drain", "n1", "--policy", "gpulet").exit_code == 0
    assert runs.plan.drained == ("n1",)


def test_a_plan_that_knows_nothing_of_a_drain_ends_it_only_with_a_yes(capsys: pytest.CaptureFixture[str]) -> None:
    drained = ONE.model_copy(update={"drained": ("n1",)})
    for agrees in (agrees_to_losses(yes=False), keep_drained):
        agrees(preview_plan(ONE, drained))
        agrees(preview_plan(drained, drained))
        with pytest.raises(InvalidInputError, match=r"n1.*drained.*by the new plan no more"):
            agrees(preview_plan(drained, ONE))
    assert "drained by the new plan: n1" in capsys.readouterr().err
    agrees_to_losses(yes=True)(preview_plan(drained, ONE))


def verbs(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for part in command.commands.values():
            yield from verbs(part, f"{name} {part.name}".strip())
    else:
        yield name, command


def test_every_verb_names_a_deployment_in_the_same_way() -> None:
    """`serve` and `cluster` want a Ray that need not run a deployment."""
    found = [each for name in VERBS for each in verbs(load_verb(name) or click.Command(name), name)]
    names = {
        name: set(option.opts)
        for name, command in found
        for option in command.params
        if {"--url", "--address"} & set(option.opts) and name not in ("serve", "cluster")
    }
    assert {"deploy", "delete", "status", "bench", "control log", "model add"} <= names.keys()
    assert set(map(frozenset, names.values())) == {frozenset({"--url", "--address"})}


def test_a_url_leads_to_its_ray_and_a_ray_to_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def connected(address: str | None, _tell: object) -> object:
        asked.append(address)
        return nullcontext(SimpleNamespace(running=lambda: Deployment(plan=ONE, port=9000)))

    told = SystemStatus(models={}, cluster="127.0.0.1:6379")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("tenuto.deployments.process.ray_address.known_deployments", list)
    monkeypatch.setattr("tenuto.deployments.control.operations.Operations", connected)
    monkeypatch.setattr("tenuto.deployments.serve.endpoint.get_told", lambda _url, _kind: told)
    for address in (None, "10.0.0.1:6379", "http://127.0.0.1:9002/"):
        with operations(address):
            pass
    assert asked == [None, "10.0.0.1:6379", "127.0.0.1:6379"]
    assert deployment_at("10.0.0.1:6379").url == "http://127.0.0.1:9000"
    assert deployment_at("10.0.0.1:6379").operator_url == "http://127.0.0.1:9002"
    assert deployment_at("https://a:1/").operator_url == "https://a:1"
    assert deployment_at(None).operator_url == "http://127.0.0.1:8000"


def test_nothing_is_deleted_that_was_not_named_or_agreed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[bool] = []
    what = "the deployment at http://127.0.0.1:9000 (m) on the Ray at 127.0.0.1:6379"
    found = SimpleNamespace(describe=lambda: what, delete=lambda: gone.append(True) or ["tenuto"])
    monkeypatch.setattr(delete, "operations", lambda _address: nullcontext(found))
    refused = CliRunner().invoke(delete.command, [])
    assert f"{what} is drained and removed, and nobody agreed" in str(refused.exception)
    assert not gone
    for named in (["--yes"], ["--address", "127.0.0.1:6379"]):
        assert CliRunner().invoke(delete.command, named).exit_code == 0
    assert len(gone) == 2


def test_a_version_is_written_to_a_file_and_that_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan, kept = make_plan({"n0/0/a": (50.0, ["m"])}), History(DictStore())
    kept.add(Deployment(plan=plan.to_data()), "deploy", "the first")
    monkeypatch.setattr(history, "operations", lambda _address: nullcontext(SimpleNamespace(history=kept)))
    file = tmp_path / "plan.yaml"
    done = CliRunner().invoke(history.command, ["-o", str(file)])
    assert (done.exit_code, done.output) == (0, f"wrote {file}\n")
    assert Plan.load(file) == plan


SHOP = KnownDeployment("127.0.0.1:1", "shop", "http://127.0.0.1:8000", "http://127.0.0.1:8002")
LAB = KnownDeployment("127.0.0.1:2", "lab", "https://127.0.0.1:9000", "http://127.0.0.1:9002")


@pytest.mark.parametrize(
    ("known", "address", "variable", "found"),
    [
        ([SHOP, LAB], "lab", None, LAB),
        ([SHOP, LAB], "127.0.0.1:1", None, SHOP),
        ([SHOP, LAB], None, "127.0.0.1:2", LAB),
        ([SHOP, LAB], "http://a:1/", None, KnownDeployment("", url="http://a:1", operator_url="http://a:1")),
        ([SHOP, LAB], SHOP.url, None, SHOP),
        ([SHOP, LAB], "https://localhost:9000/", None, replace(LAB, url="https://localhost:9000")),
        ([SHOP, LAB], LAB.operator_url, None, LAB),
        ([LAB], None, None, LAB),
        ([LAB], None, "local", LAB),
        ([], None, "local", KnownDeployment("", url="http://127.0.0.1:8000", operator_url="http://127.0.0.1:8000")),
        ([], None, None, KnownDeployment("", url="http://127.0.0.1:8000", operator_url="http://127.0.0.1:8000")),
        ([SHOP], "lab", None, InvalidInputError("Known here: shop")),
        ([SHOP, LAB], None, None, EnvironmentFaultError("several deployments run here: shop .* lab")),
    ],
)
def test_a_deployment_is_found_by_its_name_or_address_and_the_only_one_by_nothing(
    monkeypatch: pytest.MonkeyPatch,
    known: list[KnownDeployment],
    address: str | None,
    variable: str | None,
    found: KnownDeployment | Exception,
) -> None:
    monkeypatch.setattr("tenuto.deployments.process.ray_address.known_deployments", lambda: known)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    if isinstance(found, KnownDeployment):
        assert deployment_at(address) == found
    else:
        with pytest.raises(type(found), match=str(found)):
            deployment_at(address)


@pytest.mark.parametrize("words", [["--clients", "2"]])
@pytest.mark.parametrize("address", ["lab", LAB.address, "its URL"])
def test_a_bench_beside_another_deployment_joins_the_ray_of_the_one_it_asks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], address: str
) -> None:
    joined: list[str] = []

    def join(cluster: str) -> None:
        joined.append(cluster)
        raise KeyboardInterrupt  # nothing runs there

    with fake_server() as server:
        lab = replace(LAB, url=server.url, operator_url=server.url)
        monkeypatch.setattr("tenuto.deployments.process.ray_address.known_deployments", lambda: [SHOP, lab])
        monkeypatch.setattr("tenuto.deployments.process.ray_address.join_ray", join)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        file = tmp_path / "plan.yaml"
        file.write_text(
            Plan(policy=PolicyUsed(name="test"), models=(ModelSpec(name="m", rate_rps=1, slo_ms=9),)).dump()
        )
        where = server.url if address == "its URL" else address
        CliRunner().invoke(bench.command, [str(file), "--address", where, "--duration-s", "5", *words])
    assert joined == [lab.address]


def test_models_of_both_kinds_are_listed_with_their_slos(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = (writes("chat"), fixed(), writes("chat:2", share_pct=5.0))
    monkeypatch.setattr(model, "asked_of_controller", lambda _address, _call: Workload(models=specs))
    found = CliRunner().invoke(model.command, ["list"])
    assert found.exit_code == 0
    assert [line.split() for line in found.output.splitlines()[1:]] == [
        ["chat", "2", "1000,", "50", "a", "token"],
        ["fixed", "50", "100"],
        ["chat:2", "5", "%", "2", "1000,", "50", "a", "token"],
    ]


class Edited:
    """A deployment as `tenuto model` sees it; `why` says what is not carried out."""

    def __init__(self, why: str) -> None:
        self.why, self.waits = why, list[bool]()

    def edit(self, _make: object, *, waits: bool) -> str:
        self.waits.append(waits)
        return self.why if waits else ""

    def controller(self) -> SimpleNamespace:
        specs = (ModelSpec(name="m", rate_rps=1, slo_ms=9), ModelSpec(name="m:2", rate_rps=1, slo_ms=9, share_pct=5))
        return SimpleNamespace(workload=lambda: Workload(models=specs))


@pytest.mark.parametrize(
    ("words", "done"),
    [
        (["add", "{name: n, rate_rps: 1, slo_ms: 9}"], "added"),
        (["update", "{name: m, rate_rps: 1, slo_ms: 9}"], "updated"),
        (["remove", "m"], "removed"),
        (["canary", "m", "2", "--share", "5"], "sent 5 % as version 2"),
        (["canary", "m", "2", "--shadow"], "sent copies of all as version 2"),
        (["promote", "m", "2"], "promoted"),
        (["take-back", "m", "2"], "taken back"),
    ],
)
def test_a_model_command_ends_when_it_is_done_or_says_what_is_not(
    monkeypatch: pytest.MonkeyPatch, words: list[str], done: str
) -> None:
    def said(why: str, *options: str) -> tuple[str, int, list[bool]]:
        edited = Edited(why)
        monkeypatch.setattr(model, "operations", lambda _address: nullcontext(edited))
        found = CliRunner().invoke(model.command, [*words, *options], standalone_mode=False)
        assert found.exception is None
        return found.output.strip(), found.return_value, edited.waits

    assert said("") == (done, 0, [True])
    assert said("m: paused") == ("tenuto: m: paused. See `tenuto control log`.", 1, [True])
    assert said("m: paused", "--no-wait") == (f"to be {done}; `tenuto control log` says when it is", 0, [False])
