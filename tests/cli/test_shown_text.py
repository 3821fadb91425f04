"""Whatever others say, a terminal is shown a text, and is not commanded by it."""

from collections.abc import Callable

import pytest

from tenuto.cli import exit_code
from tenuto.cli.common import ProgressLine, notice, say, tell
from tenuto.cli.tables import print_table
from tenuto.errors import EnvironmentFaultError

HOSTILE = "a\x1b[2J\x1b]0;title\x07\x9b31m\r\b\u202eb\nc"


def _fails() -> None:
    raise EnvironmentFaultError(HOSTILE)


@pytest.mark.parametrize(
    "show",
    [
        lambda: say(HOSTILE),
        lambda: notice(HOSTILE),
        lambda: tell(HOSTILE),
        lambda: print_table((HOSTILE, "b"), [(HOSTILE, HOSTILE)], title=HOSTILE),
        lambda: ProgressLine().show(HOSTILE, is_last=True),
        lambda: exit_code(_fails),
    ],
    ids=["say", "notice", "tell", "table", "progress", "error"],
)
def test_no_text_commands_the_terminal(show: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> None:
    show()
    shown = "".join(capsys.readouterr())
    assert "\ufffd[2J" in shown
    assert shown.replace("\n", "").isprintable()
    assert "\nc" in shown
