"""Leader election among the dispatchers of a sub-cluster: which one is in charge of its gpu-lets.

Dispatchers learn of each other only from gpu-lets. Failover: another dispatcher claims the gpu-lets. Fencing: the term
keeps a former leader from beginning batches, so that there is no split brain.

A dispatcher in charge has a *term*: a number, and the names of the gateways that reach it (none, once the dispatcher is
gone). Of two terms, gpu-lets obey the one with the higher number. When another dispatcher gets requests, it takes
charge only if all gateways of the present term reach it too, or if more gateways reach it. So two dispatchers never
take charge from each other in turns: for that both would need the same gateways, but a gateway that reaches both asks
only one of them.

A dispatcher that takes charge sends no batch before every gpu-let that it reaches has confirmed the new term. Otherwise
a gpu-let might still begin a batch of the former dispatcher while another gpu-let runs the same requests.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable

from tenuto.deployments.wire.messages import GpuletState, TakeCharge, Term
from tenuto.deployments.wire.peer import Connection

logger = logging.getLogger("ray.serve")

_DRAWN_BITS = 31  # derived: half of an int64: the random bits of a term, so that no two dispatchers choose the same


class Leadership:
    """Invariant: while this dispatcher is in charge, it has claimed every connected gpu-let with the same term."""

    def __init__(self, sub_cluster: str = "", on_superseded: Callable[[], None] = lambda: None) -> None:
        """Begin without charge.

        Args:
            sub_cluster: the sub-cluster of the gpu-lets; "" when there is no other dispatcher.
            on_superseded: called when another dispatcher has taken charge; it must cancel all open requests.
        """
        self._sub_cluster = sub_cluster
        self._on_superseded = on_superseded
        self._gateways: frozenset[str] = frozenset()
        self._lately: frozenset[str] = frozenset()  # these gateways, and those that left a moment ago
        self._number = 0  # of this dispatcher's term; 0 while it is not in charge
        self._latest = 0  # the highest number of any term that gpu-lets told of
        self._gpulets: dict[str, Connection[GpuletState]] = {}
        self._unheard: set[str] = set()  # gpu-lets that have not confirmed the term yet
        self._later: list[Callable[[], None]] = []  # batches that wait until all have

    def claim(self) -> bool:
        """Take charge of the gpu-lets, if that is allowed; return whether this dispatcher is in charge."""
        if not self._number and self.can_be_had():
            self._number = (self._latest >> _DRAWN_BITS) + 1 << _DRAWN_BITS | secrets.randbits(_DRAWN_BITS)
            self._claim_all()
            # A gpu-let on this machine reads the claim before it begins another batch, so nobody need wait for it.
            self._unheard = {name for name, each in self._gpulets.items() if each.is_up and not each.is_near}
        return self._number > 0

    def once_obeyed(self, send: Callable[[], None]) -> None:
        """Call `send` once every gpu-let that was connected when charge was taken has confirmed the term or is gone."""
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
        """Take note of the gateways that are connected now. Without any, this dispatcher gives up charge.

        Args:
            gateways: their names.
            lately: names of gateways that have just left. They may have died with the dispatcher in charge, which the
                gpu-lets are about to notice.
        """
        self._gateways = frozenset(gateways)
        self._lately = self._gateways.union(lately)
        if self._number:
            self._claim_all()
        if not self._gateways:
            self._leave()

    def heard(self, connection: Connection[GpuletState]) -> None:
        """Take note of a gpu-let that has connected or sent its state again."""
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
        """Give up charge. Waiting batches are sent all the same, as gpu-lets refuse batches that they must not
        begin."""
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
