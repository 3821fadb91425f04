"""The one parser of `key=value` options."""

from dataclasses import dataclass, field

import pytest

from tenuto.errors import InvalidInputError
from tenuto.options import options_of_call, options_of_dataclass, read_options, split_pairs


@dataclass(frozen=True)
class Sizes:
    rule: str = field(default="window", metadata={"choices": ("window", "head-first")})
    window_ms: float = field(default=5.0, metadata={"minimum": 0.0})
    is_on: bool = True
    count: int = 3


class Search:
    def __init__(
        self, *, shares: tuple[int, ...] = (20, 40), limit_s: float | None = None, top: int | None = None, any_one=None
    ) -> None: ...


def test_pairs_become_names_and_texts() -> None:
    assert split_pairs(["time-limit-s=3", "a=b=c", "empty="]) == {"time_limit_s": "3", "a": "b=c", "empty": ""}
    with pytest.raises(InvalidInputError) as caught:
        split_pairs(["x", "=1", "a=1", "a=2"])
    assert len(caught.value.problems) == 3
    assert "already given as '1'" in str(caught.value)


def test_values_take_the_kind_of_their_default() -> None:
    raw = {"rule": "head-first", "window_ms": "2", "is_on": "off", "count": "7"}
    assert read_options("it", options_of_dataclass(Sizes), raw) == {
        "rule": "head-first",
        "window_ms": 2.0,
        "is_on": False,
        "count": 7,
    }
    raw = {"shares": "10,50", "limit_s": "2.5", "top": "4", "any_one": "1e3"}
    found = read_options("it", options_of_call(Search), raw)
    assert found == {"shares": (10, 50), "limit_s": 2.5, "top": 4, "any_one": 1000.0}
    assert read_options("it", options_of_call(Search), {"limit_s": None, "shares": [5]}) == {
        "limit_s": None,
        "shares": (5,),
    }


def test_all_that_is_wrong_is_told_at_once_with_what_there_is() -> None:
    raw = {"rule": "x", "window_ms": "-1", "is_on": "maybe", "count": "1.5", "speed": "9"}
    with pytest.raises(InvalidInputError) as caught:
        read_options("scheduler 'it'", options_of_dataclass(Sizes), raw)
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    assert "must be one of window, head-first. The default is window." in text
    assert "must be at least 0.0" in text
    assert "must be true or false" in text
    assert "must be a whole number" in text
    assert "scheduler 'it' has no such option. Known options: rule, window_ms, is_on, count." in text


@pytest.mark.parametrize(("name", "value"), [("window_ms", "nan"), ("window_ms", "inf"), ("count", True)])
def test_what_no_comparison_would_notice_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidInputError):
        read_options("it", options_of_dataclass(Sizes), {name: value})
