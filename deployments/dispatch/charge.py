"""Which of the dispatchers of a sub-cluster has its gpu-lets: they hear of each other only from these.

Of two terms the gpu-lets obey the later one. A term names the gateways that reach its dispatcher, and none once that
dispatcher is gone. Another dispatcher that is asked takes charge only where all of these reach it too, or where more
reach it. Two that each have a gateway of their own therefore never take charge from each other in turns: both
would have the same gateways, and a gateway that reaches both asks one.

Whoever takes charge sends no batch before every gpu-let that it reaches has heard so: the last one might begin what the
dispatcher before had sent there, while another gpu-let runs it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable

from tenuto.deployments.wire.messages import GpuletState, TakeCharge, Term
from tenuto.deployments.wire.peer import Connection

logger = logging.getLogger("ray.serve")

_DRAWN_BITS = 31  # derived: half of an int64; of a term, so that two that have heard of the same one never choose equal


class Charge:
    """Invariant: while this dispatcher is in charge it has claimed every gpu-let that is connected, with one term."""

    def __init__(self, sub_cluster: str = "", on_superseded: Callable[[], None] = lambda: None) -> None:
        """Wait to be asked.

        Args:
            sub_cluster: whose gpu-lets these are; "" where nobody else schedules.
            on_superseded: called when another dispatcher has taken charge: what is open here must be cancelled.
        """
        self._sub_cluster = sub_cluster
        self._on_superseded = on_superseded
        self._gateways: frozenset[str] = frozenset()
        self._lately: frozenset[str] = frozenset()  # with those that were connected until a moment ago
        self._number = 0  # of this dispatcher's term, 0 while it is not in charge
        self._latest = 0  # heard of
        self._gpulets: dict[str, Connection[GpuletState]] = {}
        self._unheard: set[str] = set()  # gpu-lets that have yet to say that they obey
        self._later: list[Callable[[], None]] = []

    def take(self) -> bool:
        """Have the gpu-lets to this dispatcher alone from now on, if they can be had; return whether it has them."""
        if not self._number and self.can_be_had():
            self._number = (self._latest >> _DRAWN_BITS) + 1 << _DRAWN_BITS | secrets.randbits(_DRAWN_BITS)
            self._claim_all()
            # One that is near finds the claim before it begins another batch, and may not answer before that.
            self._unheard = {name for name, each in self._gpulets.items() if each.is_up and not each.is_near}
        return self._number > 0

    def once_obeyed(self, send: Callable[[], None]) -> None:
        """Send a batch once every gpu-let that was connected when charge was taken obeys, or is gone."""
        if self._unheard:
            self._later.append(send)
        else:
            send()

    def can_be_had(self) -> bool:
        """Whether this dispatcher is in charge or may take it."""
        return self._number > 0 or all(
            term.gateways <= self._lately or len(term.gateways) < len(self._gateways)
            for term in map(self._term_at, self._gpulets.values())
        )

    def reached_by(self, gateways: Iterable[str], lately: Iterable[str] = ()) -> None:
        """Take note of the gateways that are connected now; without any, somebody else may have the gpu-lets.

        Args:
            gateways: their names.
            lately: those that have just gone, maybe with the dispatcher in charge: the gpu-lets are about to notice.
        """
        self._gateways = frozenset(gateways)
        self._lately = self._gateways.union(lately)
        if self._number:
            self._claim_all()
        if not self._gateways:
            self._leave()

    def heard(self, connection: Connection[GpuletState]) -> None:
        """Take note of a gpu-let that has connected or said anew what it is."""
        self._gpulets[connection.peer] = connection
        number = self._term_at(connection).number
        self._latest = max(self._latest, number)
        if 0 < self._number < number:
            logger.warning("another dispatcher has taken charge of gpu-let %s: this one waits", connection.peer)
            self._leave()
            self._on_superseded()
        elif self._number and self._term_at(connection) != self._term:  # also where its connection had ended
            self._claim(connection)
        if number == self._number:
            self._obeys(connection.peer)

    def lost(self, connection: Connection[GpuletState]) -> None:
        """Take note that the connection to a gpu-let is gone."""
        self._obeys(connection.peer)

    def _leave(self) -> None:
        """Be in charge no more. What waits is sent all the same: gpu-lets refuse what they are not to begin."""
        self._number = 0
        self._unheard.clear()
        self._send()

    def _obeys(self, gpulet: str) -> None:
        self._unheard.discard(gpulet)
        if not self._unheard:
            self._send()

    def _send(self) -> None:
        later, self._later = self._later, []
        for send in later:
            send()

    @property
    def _term(self) -> Term:
        return Term(self._number, self._gateways)

    def _term_at(self, connection: Connection[GpuletState]) -> Term:
        state = connection.state
        return Term() if state is None or not connection.is_up else state.terms.get(self._sub_cluster, Term())

    def _claim_all(self) -> None:
        for connection in self._gpulets.values():
            self._claim(connection)

    def _claim(self, connection: Connection[GpuletState]) -> None:
        if self._sub_cluster and connection.is_up:
            connection.send(TakeCharge(self._sub_cluster, self._term))
