"""The one outcome every request ends in, and what HTTP says of it. A leaf module that every folder may import."""

from __future__ import annotations

from enum import IntEnum


class Outcome(IntEnum):
    """How a request ended. Its number is the value in columns of records, its `word` that of files and messages.

    `OK`: answered by its deadline. `LATE`: answered after it. `EXPIRED`: given up, as the deadline could not be met,
    and never executed. `REJECTED`: turned away before it was queued. `FAILED`: everything else. Inside the server an
    answer is `OK` before it is known when it reaches the client.
    """

    OK = 0
    LATE = 1
    EXPIRED = 2
    REJECTED = 3
    FAILED = 4

    @property
    def word(self) -> str:
        """The outcome as files and messages have it."""
        return OUTCOMES[self]

    @property
    def http_status(self) -> int:
        """The status of the HTTP answer."""
        return _HTTP_STATUS[self]

    @classmethod
    def of_http_status(cls, status: int) -> Outcome:
        """Return what a client makes of a status; whether a 200 was late only its clock can tell."""
        return _OF_STATUS.get(status, cls.FAILED)


OUTCOMES = ("ok", "late", "expired", "rejected", "failed")
_HTTP_STATUS = (200, 200, 504, 429, 503)  # format: RFC 9110 and 6585
_OF_STATUS = {200: Outcome.OK, 504: Outcome.EXPIRED, 429: Outcome.REJECTED}
