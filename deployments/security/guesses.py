"""Wrong keys, counted by the address they come from. The more come, the later they are answered. A right key never
waits, as behind a proxy all clients have the same address."""

from __future__ import annotations

import ipaddress
import logging

logger = logging.getLogger("ray.serve")

# limit: so many wrong keys of an address are answered at once, as a wrongly configured client tries a few times
_FREE = 5.0
_FIRST_S = 0.1  # pace: the wait of the next wrong key; each further one waits twice as long
_LONGEST_S = 2.0  # limit: the longest wait, during which the connection is held
_HALVED_S = 30.0  # pace: time in which the count of an address halves
MOST_ADDRESSES = 4096  # limit: addresses that are remembered


class Guesses:
    """Counts recent wrong keys by address."""

    def __init__(self) -> None:
        self.total = 0
        self._lately: dict[str, tuple[float, float]] = {}  # by address, the latest last: (count, time of the last key)

    def wait_s(self, address: str, now_s: float) -> float:
        """Count a wrong key; return how long its answer has to wait, in seconds.

        Args:
            address: the client's address, "" if it is not known.
            now_s: the present time.
        """
        self.total += 1
        place = _network(address)
        count, at_s = self._lately.pop(place, (0.0, now_s))
        count = count * 0.5 ** (max(0.0, now_s - at_s) / _HALVED_S) + 1.0
        if len(self._lately) >= MOST_ADDRESSES:
            del self._lately[next(iter(self._lately))]
        self._lately[place] = (count, now_s)
        if count <= _FREE:
            return 0.0
        if count - 1.0 <= _FREE:
            logger.warning("more than %d wrong keys came from %s: answers to them wait", _FREE, place or "a proxy")
        return float(min(_LONGEST_S, _FIRST_S * 2.0 ** min(32.0, count - _FREE - 1.0)))  # limit: keeps the power finite


def _network(address: str) -> str:
    """Return the network that is counted for an address: a client of IPv6 may have a whole /64 of addresses."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False)) if parsed.version == 6 else str(parsed)
