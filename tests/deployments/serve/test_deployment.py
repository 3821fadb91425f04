"""What is deployed as a document, and its history."""

from __future__ import annotations

import pytest

from tenuto.deployments.serve import history as module
from tenuto.deployments.serve.applications import Deployed
from tenuto.deployments.serve.config import CONTROL_APPLICATION, is_ours
from tenuto.deployments.serve.deployment import Deployment, fitting_gateways
from tenuto.deployments.serve.history import History
from tenuto.deployments.serve.sub_clusters import fits_plan, parted
from tenuto.documents import dump_yaml
from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.files import parse_yaml
from tenuto.placement import Plan
from tests.instruments.plans import make_plan
from tests.instruments.stores import DictStore

OTHER = make_plan({"n0/0/a": (60.0, ["a"]), "n0/0/b": (40.0, ["b"])})
PLAN = make_plan({"n0/0/a": (50.0, ["a"]), "n0/0/b": (50.0, ["b"])})


def of(plan=PLAN, **how: object) -> Deployment:  # type: ignore[no-untyped-def]
    return Deployment.model_validate({"plan": plan.to_data(), "executor": "emulated", **how})


def test_a_controller_always_runs_and_changes_nothing_by_itself_unless_told_to() -> None:
    for control, settings in ((None, {"mode": "off"}), ({"mode": "act"}, {"mode": "act"})):
        config = of(control=control).config()
        assert (config.control.name, config.control.user_config.settings) == (CONTROL_APPLICATION, settings)
        assert config.applications[-1] == config.control
        assert all(is_ours(application.name) for application in config.applications)
        assert Deployment.from_data(config.to_data()).control == control
    assert not is_ours("somebody-else")


def test_who_schedules_knows_the_idle_gpulets_of_its_models() -> None:
    idle = make_plan({"n0/0/c": (60.0, ["b"])}).gpulets

    def told(deployment: Deployment) -> dict[str, object]:
        config = deployment.config(standby=idle)
        return {each.name: each.user_config.standby for each in (config.entry, *config.dispatchers)}

    idle_ones = ("n0/0/c",)
    assert told(of()) == {"tenuto": idle_ones}
    assert told(of(gateways=2)) == {"tenuto": (), "dispatcher-0": idle_ones}
    parts = {"tenuto": (), "dispatcher-0": (), "dispatcher-3": idle_ones}
    assert told(of(gateways=2, partition={"a": 0, "b": 3})) == parts


def test_a_gpulet_is_told_the_weights_of_the_profile() -> None:
    data = PLAN.to_data()
    data["gpulets"][0]["models"][0]["weights_mib"] = 97.5
    programs = [program for each in of(Plan.from_data(data)).config().gpulets for program in each.user_config.programs]
    assert {program.name: program.weights_mib for program in programs} == {"a": 97.5, "b": None}


def test_another_plan_keeps_how_it_is_served() -> None:
    more = make_plan({"n0/0/a": (50.0, ["a"]), "n0/0/b": (50.0, ["b", "c"])})
    split = of(scheduler="eager", gateways=2, partition={"a": 0, "b": 3})
    assert split.with_plan(PLAN) == split
    assert split.with_plan(more).scheduler == "eager"
    assert split.with_plan(more).partition == {"a": 0, "b": 3, "c": 3}  # where its gpu-let is
    together = make_plan({"n0/0/a": (50.0, ["a", "b"])})
    assert split.with_plan(together).partition == {"a": 0, "b": 0}  # no gpu-let belongs to two


def test_newcomers_are_parted_so_that_rates_are_even() -> None:
    apart = make_plan({f"n0/{i}/a": (50.0, [name]) for i, name in enumerate("abcd")})
    found = parted(apart, {"a": 0, "b": 1})
    assert sorted(found.values()) == [0, 0, 1, 1]
    assert (found["a"], found["b"]) == (0, 1)
    assert fits_plan(apart, found)


def test_versions_are_numbered_kept_and_found() -> None:
    history = History(DictStore())
    assert history.latest() is None
    first = history.add(of(), "deploy", "the first")
    second = history.add(of(port=9000), "rollback", "another")
    assert [version.number for version in history.all()] == [1, 2]
    assert history.latest() == second
    assert history.get(1) == first
    assert first.deployment.plan == PLAN
    with pytest.raises(InvalidInputError, match="kept are 1 to 2"):
        history.get(7)
    with pytest.raises(EnvironmentFaultError, match="no other plan ran before"):
        history.before()
    history.add(of(make_plan({"n0/0/a": (60.0, ["a"])})), "deploy", "a third")
    assert history.before() == second
    with pytest.raises(EnvironmentFaultError, match="nothing is deployed"):
        History(DictStore()).before()


WAYS = [
    {},
    {"executor": "torch", "host": "127.0.0.2", "port": 9000, "proxy_port": 1234, "operator_port": 0},
    {
        "name": "shop-2.b",
        "port": 65535,
        "operator_port": 7,
        "grpc_port": 9,
        "log_json": True,
        "encrypt": True,
        "hangs_s": 3.0,
        "gateway_options": {"max_queued": 5},
    },
    {"scheduler": "eager", "gateways": 3, "nodes": 2, "dispatchers": 3},
    {"gateways": 2, "partition": {"a": 0, "b": 3}, "scheduler_options": {"hold": 0.5}},
    {"gateways": 1, "partition": {"a": 0, "b": 0}, "control": {"mode": "act"}},
    {
        "host": "0.0.0.0",
        "access": {
            "keys": [{"name": "anna", "sha256": "0" * 64, "models": ["a"]}],
            "host_names": ["x"],
            "traces": {"endpoint": "http://a/b", "ratio": 0.5},
            "tls_cert": "/c",
            "tls_key": "/k",
        },
    },
]


@pytest.mark.parametrize("how", WAYS)
def test_a_deployment_is_read_back_from_its_serve_config(how: dict[str, object]) -> None:
    made = of(**{"gateways": 1, **how})
    data = made.config().to_data()
    assert Deployment.from_data(data) == made
    assert Deployment.from_data(parse_yaml(dump_yaml(data))) == made


@pytest.mark.parametrize("how", WAYS)
def test_what_serve_deploy_brought_becomes_a_version_once_whatever_ran_before(how: dict[str, object]) -> None:
    ours, theirs = of(gateways=1), of(**{"gateways": 1, "port": 9999, **how})
    history = History(DictStore())
    history.add(ours, "deploy", "ours")
    assert history.running(Deployed(ours, by_serve=False)) == ours
    for _ in range(2):
        assert history.running(Deployed(theirs, by_serve=True)) == theirs
    assert [version.by for version in history.all()] == ["deploy", "serve deploy"]
    assert history.running(Deployed(theirs.with_plan(OTHER), by_serve=True)).plan == OTHER
    assert [version.by for version in history.all()] == ["deploy", "serve deploy", "serve deploy"]
    assert history.before().deployment == theirs


def test_what_is_changed_from_plan_to_plan_stays_as_it_was_deployed() -> None:
    made, history = of(gateways=1), History(DictStore())
    history.add(made, "deploy", "ours")
    told = Deployment.from_data(made.with_plan(OTHER).config().to_data()).model_copy(update={"executor": "auto"})
    assert history.running(Deployed(told, by_serve=False)) == made.with_plan(OTHER)
    assert len(history.all()) == 1


def test_two_writers_get_two_versions() -> None:
    store = DictStore()

    class Late(DictStore):
        """Sees the versions that were there before another wrote."""

        def keys(self, prefix: str) -> list[str]:
            return []

    late = Late()
    late.values = store.values
    History(store).add(of(), "deploy", "one")
    assert History(late).add(of(), "deploy", "two").number == 2
    assert [version.why for version in History(store).all()] == ["one", "two"]


def test_old_versions_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_VERSIONS", 3)
    history = History(DictStore())
    for number in range(6):
        history.add(of(), "deploy", str(number))
    assert [version.why for version in history.all()] == ["3", "4", "5"]


@pytest.mark.parametrize(("cores", "gpulets", "expected"), [(2, 1, 1), (4, 1, 1), (5, 1, 2), (8, 4, 2), (64, 100, 1)])
def test_two_gateways_run_where_every_process_has_a_core(cores: int, gpulets: int, expected: int) -> None:
    assert fitting_gateways(cores, gpulets) == expected


def test_a_deployment_that_does_not_say_has_one_gateway_until_it_is_known_where_it_runs() -> None:
    assert of().config() == of(gateways=1).config() != of(gateways=2).config()
