"""Plans that the thesis states, for points at which many plans are equally good and the solver chooses one.

An integer program does not know of waiting: at equal goodput it may choose batches of 8 or of 64. At some points the
thesis' solver chose another plan than ours, and the thesis' observations are about that plan. Batch sizes and places
that the thesis does not state are those of our policy for the same point.
"""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.placement import Cluster, Gpulet, Plan, PolicyUsed, Replica, Workload, load_policy
from tenuto.placement.plan import PlannedGpu
from tenuto.placement.planner import PlanTask
from tenuto.placement.planner.completion import check_plan, complete
from tenuto.profiles import Profiles


@dataclass(frozen=True)
class Published:
    """A stated plan: by GPU, the models and their batch sizes; `stated` says which parts of it the thesis prints."""

    policy: str
    section: str
    x: float
    slo_ms: float
    gpus: tuple[tuple[tuple[str, int], ...], ...]
    stated: str


PUBLISHED: dict[str, Published] = {
    "ao-milp-6.2.1-6": Published(
        "ao-milp",
        "6.2.1",
        6,
        200.0,
        (
            (("alexnet", 4),),
            (("densenet121", 16),),
            (("efficientnet_b7", 64),),
            (("efficientnet_b7", 64),),
            (("resnet50", 64),),
            (("vgg19", 16),),
        ),
        "efficientnet_b7 and resnet50 at batch 64",
    ),
    "igniter-6.2.1-5": Published(
        "igniter",
        "6.2.1",
        5,
        200.0,
        tuple((("efficientnet_b7", size),) for size in (9, 5, 5, 5)),
        "the batch sizes of the four replicas of efficientnet_b7; shares and the other models' batches are not "
        "printed, so that only the division of the load is simulated",
    ),
    "ao-milp-6.3-3000": Published(
        "ao-milp",
        "6.3",
        3000,
        250.0,
        ((("alexnet", 4),), (("densenet121", 64),), (("resnet50", 8),), (("vgg19", 16),)),
        "densenet121 at batch 64",
    ),
}


def published_plan(name: str, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
    """Return a stated plan, completed and checked like any other; KeyError if there is none of that name.

    Raises:
        InvalidInputError: it does not fit the cluster.
    """
    stated = PUBLISHED[name]
    gpulets = tuple(
        Gpulet(id=f"{gpu.id}/{'abcdefgh'[place]}", gpu=gpu.id, models=(Replica(name=model, batch_size=size),))
        for gpu, hosted in zip(cluster.gpus, stated.gpus, strict=False)
        for place, (model, size) in enumerate(hosted)
    )
    hosted_models = {model for hosted in stated.gpus for model, _ in hosted}
    plan = Plan(
        policy=PolicyUsed(name=stated.policy),
        gpus=tuple(PlannedGpu(id=gpu.id, type=gpu.type) for gpu in cluster.gpus),
        gpulets=gpulets,
        unserved=tuple(spec.name for spec in workload.models if spec.name not in hosted_models),
        notes=(f"stated in section {stated.section}: {stated.stated}; the rest is our policy's choice",),
    )
    plan = complete(plan, PlanTask(load_policy(stated.policy), workload, cluster, profiles))
    check_plan(plan, cluster)
    return plan
