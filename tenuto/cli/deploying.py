"""The arguments of verbs that run a plan, and the connection of verbs that operate a deployment."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

import click
from click.core import ParameterSource

from tenuto.cli.common import ClusterArguments, NumberRange, cluster_arguments, gathered, headed, tell
from tenuto.deployments.serve.executor_choice import ExecutorChoice
from tenuto.errors import EnvironmentFaultError, refused
from tenuto.options import split_pairs
from tenuto.placement import Plan

if TYPE_CHECKING:
    from tenuto.deployments.control.change_preview import ChangePreview
    from tenuto.deployments.control.controller_client import ControllerClient
    from tenuto.deployments.control.operations import Ground, Operations
    from tenuto.deployments.process.ray_address import KnownDeployment
    from tenuto.deployments.serve.deployment import Deployment

T = TypeVar("T")


@dataclass(frozen=True)
class ServingArguments:
    """The arguments that say how to serve a plan."""

    plan_file: str
    name: str
    emulate: bool
    executor: str | None
    host: str
    port: int
    proxy_port: int | None
    operator_port: int | None
    grpc_port: int
    key_file: str | None
    tls_cert: str | None
    tls_key: str | None
    traces: str | None
    trace_ratio: float
    log_json: bool
    insecure: bool
    host_names: tuple[str, ...]
    encrypt: bool
    hangs_s: float
    scheduler: str
    options: tuple[str, ...]
    gateways: int
    dispatchers: int
    partition_file: str | None
    offline_path: str | None
    control_file: str | None
    where: ClusterArguments

    def deployment(self) -> Deployment:
        """Read the files and return the deployment.

        Raises:
            InvalidInputError: lists the problems of the first file that has any.
        """
        from tenuto.batching.core.build import from_plan
        from tenuto.batching.registry import check_offline, make_scheduler
        from tenuto.deployments.control.settings import ControlSettings, check_policy
        from tenuto.deployments.security.certificate import Certificate
        from tenuto.deployments.security.keys import read_keys
        from tenuto.deployments.serve.deployment import Deployment
        from tenuto.deployments.serve.sub_clusters import parted, read_partition
        from tenuto.documents import parse_document
        from tenuto.placement.planner.gpu_matching import gpus_of
        from tenuto.placement.workload import offline_names

        if self.emulate and self.executor not in (None, "emulated"):
            raise refused("--executor", self.executor, "contradicts --emulate", "Give one of the two.")
        base = read_deployment(self.plan_file)
        chosen = split_pairs(self.options)
        control = None if self.control_file is None else ControlSettings.load(self.control_file)
        keys = [entry.model_dump(mode="json", exclude_defaults=True) for entry in read_keys(self.key_file)]
        partition, cut = None, self.partition_file or ""
        if cut.isdecimal():
            partition = parted(base.plan, {}, count=int(cut))
        elif cut:
            partition = read_partition(cut)
        left = set(self.left_open())
        access = {
            "keys": keys,
            "tls_cert": self.tls_cert and os.path.realpath(self.tls_cert),
            "tls_key": self.tls_key and os.path.realpath(self.tls_key),
            "insecure": self.insecure,
            "host_names": list(self.host_names),
            "traces": {"endpoint": self.traces, "ratio": self.trace_ratio} if self.traces is not None else None,
        }
        changed = {name: access[name] for name in access if "access" not in left and f"access.{name}" not in left}
        options = {
            **{name: getattr(self, name) for name in _same()},
            "executor": "emulated" if self.emulate else self.executor or base.executor,
            "access": {
                **base.access.model_dump(mode="json", exclude_defaults=True),
                **({"keys": keys} if keys else {}),  # which the environment may name, too
                **changed,
            },
            "scheduler_options": chosen,
            "partition": partition,
            "offline": self.offline_path and {"path": os.path.realpath(self.offline_path)},
            "control": None if control is None else control.model_dump(mode="json", exclude_defaults=True),
        }
        left -= {"access"} if keys else set()
        given = {name: value for name, value in options.items() if name not in left}
        whole = {**{name: getattr(base, name) for name in base.model_fields_set}, **given}
        deployment = parse_document(Deployment, whole, origin="options")
        # A wrong name or option must fail here, and not later in a replica.
        make_scheduler(deployment.scheduler, from_plan(deployment.plan), deployment.scheduler_options)
        waits = offline_names(deployment.plan.models, deployment.plan.applications)
        waits += [f"the key {entry.name}" for entry in deployment.access.keys if entry.offline]
        check_offline(deployment.scheduler, waits)
        check_policy(deployment.control, deployment.plan)
        deployment.config().check_ports()
        gpus_of(deployment.plan)
        check_texts(deployment)
        certificate, key = deployment.access.tls_cert, deployment.access.tls_key
        if certificate and key and (os.path.exists(certificate) or os.path.exists(key)):  # else on gateways' nodes only
            Certificate(certificate, key, ["http/1.1"])
        return deployment

    def left_open(self) -> list[str]:
        """Return the fields of `deployment` that no option sets. When a plan runs already, these stay as they are."""
        return left_open(given_options())

    def ground(self, plan: Plan) -> Ground | None:
        """Return the profiles and the possible GPUs that a controller plans with; None without --control."""
        return None if self.control_file is None else self.where.ground(plan)


def read_deployment(plan_file: str) -> Deployment:
    """Return a plan file's plan and how the file says that it is served. It says nothing by a default: plan files have
    those that nobody chose.

    Raises:
        InvalidInputError: lists the problems of the file.
    """
    from tenuto.deployments.serve.deployment import Deployment
    from tenuto.documents import load_document

    document = load_document(plan_file)
    plan = Plan.from_data(document, origin=plan_file)  # its faults with the name of the file
    deployment = Deployment(plan=plan)
    if isinstance(document, dict) and "applications" in document and "policy" not in document:
        deployment = Deployment.from_data(document, origin=plan_file)
        if deployment.gateways == 1:  # plan files say 1 when their author gave no number
            deployment = deployment.model_copy(update={"gateways": 0})
    deployment = deployment.model_copy(update={"name": deployment.name or _name_of(plan_file)})
    defaults = {name: field.get_default(call_default_factory=True) for name, field in Deployment.model_fields.items()}
    return Deployment.model_validate(
        {name: value for name in defaults if (value := getattr(deployment, name)) != defaults[name]}
    )


def given_options() -> set[str]:
    """Return the names of the options and arguments that the verb which runs was given."""
    context = click.get_current_context()
    return {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def _name_of(plan_file: str) -> str:
    """Return the name of a deployment from that of its file, as `Deployment.name` may be."""
    return re.sub(r"[^\w.-]+", "-", Path(plan_file).stem)[:63]


def left_open(given: Collection[str] = ()) -> list[str]:
    """Return the settings of a deployment for which none of these options was given; of access to it, where some of it
    was given, the others as `access.tls_cert`."""
    asked_by = {name: {name} for name in _same()} | _ASKED_BY
    if _ASKED_BY["access"] & {*given}:
        asked_by |= {f"access.{name}": options for name, options in _ACCESS.items()}
    return [field for field, names in asked_by.items() if not names & {*given}]


def _same() -> list[str]:
    """Return the fields that a deployment and the command line call the same."""
    from tenuto.deployments.serve.deployment import Deployment

    return [field.name for field in fields(ServingArguments) if field.name in Deployment.model_fields]


# The options that say what a field of `access` is. No option says which file every gateway reads for itself.
_ACCESS: dict[str, set[str]] = {
    "keys": {"key_file"},
    "key_file": set(),
    "tls_cert": {"tls_cert", "tls_key"},
    "tls_key": {"tls_cert", "tls_key"},
    "insecure": {"insecure"},
    "host_names": {"host_names"},
    "traces": {"traces", "trace_ratio"},
}
# The options that say what a field is, where it is not one of the field's name.
_ASKED_BY = {
    **{name: {"scheduler", "options"} for name in ("scheduler", "scheduler_options")},
    "executor": {"emulate", "executor"},
    "partition": {"partition_file"},
    "offline": {"offline_path"},
    "control": {"control_file"},
    "access": set().union(*_ACCESS.values()),
}


def check_texts(deployment: Deployment, *, is_here: bool = False) -> None:
    """Raise `InvalidInputError` for a tokenizer or a chat template that cannot be read, if it is on this machine.
    `is_here`: the gateways are, so it has to be."""
    from tenuto.deployments.entry.protocols.texts import place_of, tokenizer_of

    for spec in deployment.plan.models:
        if spec.generates is not None and (is_here or place_of(spec).exists()):
            tokenizer_of(spec)


address_option = click.option(
    "--address",
    "--url",
    "address",
    metavar="ADDRESS",
    help="The deployment: its name, its URL, or the address of its Ray. Default: RAY_ADDRESS, else this user's "
    "deployment on this machine.",
)


def _is_url(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def _meant(address: str | None) -> KnownDeployment | None:
    """Return this user's deployment on this machine that `address` names; None: `address` is that of another Ray.

    Raises:
        InvalidInputError: no deployment has that name.
        EnvironmentFaultError: there are several, and there is no terminal to ask which one.
    """
    from tenuto.deployments.process.ray_address import known_deployments, running_address

    address = running_address(address)
    if address == "auto":
        return None
    known = known_deployments()
    matching = [each for each in known if address in (None, each.name, each.address)]
    if len(matching) == 1 or (not matching and (address is None or ":" in address)):
        return matching[0] if matching else None
    shown = ", ".join(map(str, matching or known))
    if not matching:
        cure = f"Known here: {shown or 'none'}. Give a URL, or host:port of its Ray."
        raise refused("--address", address, "is no deployment that was brought up here", cure)
    if not sys.stdin.isatty():
        raise EnvironmentFaultError(f"several deployments run here: {shown}. Name one with --address.")
    chosen = click.prompt(f"{shown}. Which Ray?", type=click.Choice([each.address for each in matching]), err=True)
    return next(each for each in matching if each.address == chosen)


def deployment_at(address: str | None) -> KnownDeployment:
    """Return where a deployment answers and where its Ray is, from any form of its address. The Ray is empty where the
    deployment is not one of this user's on this machine, and its address is a URL."""
    from tenuto.deployments.process.ray_address import KnownDeployment, known_deployments, running_address

    if address is not None and _is_url(address):
        url = address.rstrip("/")
        local = url.replace("//localhost:", "//127.0.0.1:")
        for each in known_deployments():
            if local in (each.url, each.operator_url):
                return replace(each, url=url) if local == each.url else each
        return KnownDeployment("", url=url, operator_url=url)
    known = _meant(address)
    if known is not None and known.url:
        return known
    named = known.address if known is not None else running_address(address) or ""
    if not named:
        return KnownDeployment(named, url="http://127.0.0.1:8000", operator_url="http://127.0.0.1:8000")
    with operations(address) as running:
        deployment = running.running()
    return KnownDeployment(named, url=deployment.url, operator_url=deployment.operator_url)


yes_option = click.option("--yes", is_flag=True, help="Do not ask before going on.")


def agree(what: str, *, yes: bool) -> None:
    """Ask the user whether `what` may be done; `yes`: the user has agreed already.

    Raises:
        InvalidInputError: the user does not agree, or there is no terminal to ask on.
    """
    if yes:
        return
    if not sys.stdin.isatty() or not click.confirm(f"{what}. Go on?", err=True):
        raise refused("--yes", None, f"{what}, and nobody agreed to that", "Say --yes if it may be.")


def agrees_to_losses(*, yes: bool) -> Callable[[ChangePreview], None]:
    """Return a function that asks before served models lose their service. It prints which are interrupted, and which
    settings are not changed as asked."""

    def ask(preview: ChangePreview) -> None:
        for text in settings_shown(preview):
            tell(text)
        if preview.lost:
            agree(f"{', '.join(preview.lost)}: served now, and by the new plan no more", yes=yes)
        if preview.undrained:
            agree(f"{', '.join(preview.undrained)}: drained now, and by the new plan no more", yes=yes)
        if preview.drained:
            tell(f"drained by the new plan: {', '.join(preview.drained)}")
        interrupted = dict.fromkeys(name for step in preview.steps for name in step.unserved)
        if interrupted:
            tell(f"no room for old and new gpu-lets: {', '.join(interrupted)} is not served until new ones are ready")

    return ask


def settings_shown(preview: ChangePreview) -> Iterator[str]:
    """Yield what becomes of every setting that is asked for otherwise than it runs."""
    from tenuto.deployments.serve.deployment import UNCHANGEABLE

    for setting in preview.settings:
        cure = (
            "deploy with --replace, which interrupts serving"
            if setting.name in UNCHANGEABLE
            else "give it as an option"
        )
        runs, desired = setting.runs or "what runs", setting.wanted or "other settings"
        stays = f"{runs} stays, not {desired}; to change it, {cure}"
        yield f"{setting.name}: {stays if setting.stays else f'{runs} → {desired}'}"


def keep_drained(preview: ChangePreview) -> None:
    """Raise `InvalidInputError` if a change would end a drain. This is for changes about which nobody is asked."""
    if preview.undrained:
        cure = "Use `tenuto undrain`, or write what runs into the file with `tenuto history -o FILE`."
        raise refused("drained", ", ".join(preview.undrained), "is drained, and by the new plan no more", cure)


@contextmanager
def operations(address: str | None) -> Iterator[Operations]:
    """Connect to the cluster of a deployment. Progress of operations is printed on stderr."""
    from tenuto.deployments.control.operations import Operations
    from tenuto.deployments.serve.endpoint import get_told
    from tenuto.deployments.wire.status import SystemStatus

    if address is not None and _is_url(address):
        url, address = address, get_told(f"{address.rstrip('/')}/status", SystemStatus).cluster
        if not address:
            raise refused("--address", url, "does not say on which Ray it runs", "Give the address of its Ray.")
    elif (known := _meant(address)) is not None:
        address = known.address
    with Operations(address, tell) as opened:
        yield opened


def asked_of_controller(address: str | None, question: Callable[[ControllerClient], T]) -> T:
    """Return what the controller of a deployment answers to a question."""
    with operations(address) as running:
        return question(running.controller())


_PORT = click.IntRange(1, 65535)
_serving = (
    click.argument("plan_file", metavar="PLAN"),
    headed(
        "What runs",
        click.option("--name", default="", show_default="PLAN without suffix", help="Name of the deployment."),
        click.option(
            "--emulate", is_flag=True, help="Emulate every GPU of the plan. Answers say that they are emulated."
        ),
        click.option(
            "--executor",
            type=click.Choice(get_args(ExecutorChoice)),
            help="Run models with torch, or emulate GPUs.  [default: as in PLAN, else auto]",
        ),
        click.option("--scheduler", default="deferred", metavar="NAME", help="Batching scheduler of the dispatcher."),
        click.option("--option", "options", multiple=True, metavar="K=V", help="Option of the scheduler; repeatable."),
        click.option(
            "--gateways",
            default=0,
            show_default="2 where every process has a core, else 1",
            type=click.IntRange(0, 64),
            help="Processes that take HTTP. With several, each sub-cluster has a dispatcher of its own.",
        ),
        click.option(
            "--dispatchers",
            default=2,
            type=click.IntRange(1, 8),
            help="Dispatcher processes of each sub-cluster: one schedules, the others wait to take over.",
        ),
        click.option(
            "--partition",
            "partition_file",
            metavar="K|FILE",
            help="Divide the plan into K sub-clusters of even rate and memory, or by a file that names the sub-cluster "
            "of every model.  [default: one for all]",
        ),
        click.option(
            "--hangs-s",
            default=10.0,
            type=NumberRange(min=0, min_open=True),
            help="When a batch takes longer than this, and longer than 20 times its planned latency, its gpu-let is "
            "replaced.",
        ),
    ),
    headed(
        "Where it answers",
        click.option("--host", default="127.0.0.1", help="Address to bind to."),
        click.option("--port", default=8000, type=_PORT, help="Port to listen on."),
        click.option(
            "--proxy-port",
            type=_PORT,
            show_default="the one after PORT",
            help="Port of Serve's own proxies. Clients use PORT: the proxies answer 404.",
        ),
        click.option(
            "--operator-port",
            type=click.IntRange(0, 65535),
            show_default="two after PORT",
            help="Port on 127.0.0.1 for status, metrics and the live page; 0: none.",
        ),
        click.option(
            "--grpc-port",
            default=0,
            type=click.IntRange(0, 65535),
            help="Port for the Open Inference Protocol over gRPC (needs tenuto[grpc]); 0: none.",
        ),
    ),
    headed(
        "Who may send requests",
        click.option(
            "--keys",
            "key_file",
            metavar="FILE",
            help="File with the keys of clients (see `tenuto key`). TENUTO_API_KEYS adds more keys.",
        ),
        click.option("--tls-cert", metavar="FILE", help="Certificate (PEM). With --tls-key the gateway speaks TLS."),
        click.option("--tls-key", metavar="FILE", help="Private key of the certificate (PEM)."),
        click.option(
            "--host-name",
            "host_names",
            multiple=True,
            metavar="NAME",
            help="A further name by which clients reach this server, such as that of a proxy in front; repeatable.",
        ),
        click.option("--insecure", is_flag=True, help="Let other machines reach --host without keys."),
        click.option("--encrypt", is_flag=True, help="Encrypt the traffic between nodes."),
    ),
    headed(
        "Logs and traces",
        click.option("--log-json", is_flag=True, help="Write logs as JSON lines."),
        click.option("--traces", metavar="URL", help="Send spans to URL by OTLP over HTTP (needs tenuto[tracing])."),
        click.option(
            "--trace-ratio",
            default=0.0,
            type=NumberRange(0, 1),
            help="Share of the requests without a traceparent that are traced.",
        ),
    ),
    headed(
        "Work that can wait",
        click.option(
            "--offline-path",
            metavar="DIR",
            help="Take files and batches of requests that can wait (/v1/files, /v1/batches), and keep them in DIR on "
            "the head's node.",
        ),
    ),
    headed(
        "A controller",
        click.option(
            "--control",
            "control_file",
            metavar="FILE",
            help="Settings of the controller.  [default: mode off, it changes nothing by itself]",
        ),
        cluster_arguments,
    ),
)
serving_arguments = gathered(ServingArguments, "arguments", *_serving)
