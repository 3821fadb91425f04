"""The outcome in which every request ends, its HTTP status, and the rule behind it. A leaf module that every folder may
import."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Outcome(IntEnum):
    """How a request ended. Records store its number; files and messages show its `word`.

    `OK`: answered by its deadline. `LATE`: answered after it. `EXPIRED`: given up, as the deadline could not be met,
    and never executed. `REJECTED`: turned away before it was queued. `FAILED`: everything else. Inside the server an
    answer counts as `OK` until its time shows that it is late.
    """

    OK = 0
    LATE = 1
    EXPIRED = 2
    REJECTED = 3
    FAILED = 4

    @property
    def word(self) -> str:
        """The outcome as a word, for files and messages."""
        return OUTCOMES[self]

    @property
    def http_status(self) -> int:
        """The status of the HTTP answer."""
        return _HTTP_STATUS[self]

    @classmethod
    def of_http_status(cls, status: int) -> Outcome:
        """Return the outcome of an HTTP status. For a 200 it is `OK`; only the client's clock can tell if it was
        late."""
        return _OF_STATUS.get(status, cls.FAILED)


ATTAINED = 0.99  # paper: Symphony's goodput, for which 99 % of each model's requests are in time
WARM_UP = 0.05  # default: the first part of a run, which is not counted
OUTCOMES = ("ok", "late", "expired", "rejected", "failed")
_HTTP_STATUS = (200, 200, 504, 429, 503)  # format: RFC 9110 and 6585
_OF_STATUS = {200: Outcome.OK, 504: Outcome.EXPIRED, 429: Outcome.REJECTED}


class Rule(StrEnum):
    """The rule that refused a request, or the bound that its answer missed."""

    TOO_LATE = "too late on arrival"
    CUT = "no batch that meets its deadline"
    BEYOND_PLAN = "beyond the planned rate"
    FULL = "queue full"
    YIELDED = "lower priority, and a full batch waits"
    FIRST_TOKEN = "time to first token"
    FURTHER_TOKENS = "time per further token"
    LENGTH = "its number of tokens"
    SIZE = "larger than any size it is profiled at"
    LOST = "its process ended or hung"
    RAISED = "its model raised an error"
    INPUT = "a function refused its input"
    NONE = ""  # the request failed, or was late without two bounds
