"""iGniter and the first-fit baselines of its paper: shares that meet half the SLO, with and without interference."""

from __future__ import annotations

from tenuto.placement.cluster import Cluster
from tenuto.placement.plan import Plan
from tenuto.placement.policies.igniter.packing import OpenGpu, extend, igniter_plan, pack_cluster
from tenuto.placement.policies.igniter.shares import Demand, Shares, allocate
from tenuto.placement.policy import Policy
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles


def beside(gpu: OpenGpu, demand: Demand) -> Shares | None:
    """Return the shares of a GPU with one more resident, its neighbours' shares raised as needed (Algorithm 2)."""
    return allocate([*gpu.demands, demand], [*gpu.shares, demand.lower_units or demand.most_units])


def lower_bounds(gpu: OpenGpu, demand: Demand) -> Shares | None:
    """Return the shares of a GPU with one more resident at its lower bound, the others as they are; or None."""
    shares = (*gpu.shares, demand.lower_units or demand.most_units)
    return shares if sum(shares) <= demand.most_units else None


class Igniter(Policy):
    """Places models, largest lower bound of the share first, where they raise the shares of all least.

    Algorithms 1 and 2 of the paper. A model that needs more than one GPU gets whole ones and a rest, as in the authors'
    code (see `demands_of`). All GPUs are of the type that serves all at the lowest price, mixed with others only where
    that serves more or costs less (see `pack_cluster`). What fits nowhere on a fixed cluster is left out. Every batch
    is within half its SLO; the other half is for filling it. As in the paper, arrivals count as evenly spaced: bursts
    need headroom, that is a workload of higher rates (docs/benchmarks-placement.md has figures).

    Newcomers (`extend`, section 4.2): what is placed stays; each newcomer goes where it raises shares least, and shares
    of residents are raised on that GPU only.
    """

    name = "igniter"
    summary = "smallest shares that meet half the SLO under an analytic interference model; least interference first"
    source = "iGniter (arXiv 2211.01713), Theorem 1, Algorithms 1 and 2; several GPUs per model as in the authors' code"
    readings = "ours: memory is checked, and GPU types are compared by price; the paper has one type and no memory"
    _attempt = staticmethod(beside)
    _first = False
    _notes: tuple[str, ...] = ()

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan.

        Raises:
            InvalidInputError: a model has iGniter's coefficients on no GPU type of the cluster.
        """
        packed = pack_cluster(workload, cluster, profiles, self._attempt, first=self._first)
        return igniter_plan(self.name, workload, cluster, packed, self._notes)

    def extend(self, plan: Plan, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan with the workload's models that it does not serve yet added.

        Raises:
            InvalidInputError: as `place`, or the plan holds several models on one gpu-let.
        """
        packed = extend(plan, workload, cluster, profiles, self._attempt, first=self._first)
        return igniter_plan(self.name, workload, cluster, packed, self._notes)


class FirstFitPlusPlus(Igniter):
    """Places models, largest lower bound of the share first, on the first GPU where they fit; shares as iGniter's."""

    name = "ffd++"
    summary = "first-fit decreasing with iGniter's shares under interference"
    source = "the baseline FFD++ of iGniter (arXiv 2211.01713), section 5"
    readings = "as igniter"
    _first = True


class FirstFitPlus(Igniter):
    """Places models on the first GPU where they fit with the lower bound of their share (Theorem 1), as if alone."""

    name = "ffd+"
    summary = "first-fit decreasing with iGniter's lower bounds of the shares, without regard to interference"
    source = "the baseline FFD+ of iGniter (arXiv 2211.01713), section 5"
    readings = "as igniter; the latencies it believes in include interference, its shares do not"
    _attempt = staticmethod(lower_bounds)
    _first = True
    _notes = ("shares are lower bounds; the latencies the policy believes in include interference",)
