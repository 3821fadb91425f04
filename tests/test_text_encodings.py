"""Texts are read and written in an encoding that is named. The locale's would read a user's file otherwise on another
machine, and fail on some."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("profiles", "mps", "placement", "batching", "deployments", "loadgen", "tenuto", "lab/tenuto_lab")
# How many arguments without a name come before the encoding, and which of them is the mode (None: there is none).
PATH_METHODS = {"read_text": (0, None), "write_text": (1, None), "open": (2, 0)}
FUNCTIONS = {"open": (3, 1), "os.fdopen": (3, 1), "io.open": (3, 1)}
TEMPORARY = ("NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile")
NO_PATHS = ("os", "Image", "sender", "self._sender", "super()")  # what has an `open` that opens no text


def is_in_the_locales_encoding(call: ast.Call) -> bool:
    """Whether a call reads or writes a text, and names no encoding."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    name = ast.unparse(call.func)
    owner, _, last = name.rpartition(".")
    if "encoding" in named or None in named:
        return False
    if any(isinstance(value := named.get(key), ast.Constant) and value.value for key in ("text", "universal_newlines")):
        return owner == "subprocess" or last == "create_subprocess_exec"
    if last in TEMPORARY:
        mode = named.get("mode", call.args[0] if call.args else ast.Constant("w+b"))
        return "b" not in ast.unparse(mode)
    known = FUNCTIONS.get(name) or (
        PATH_METHODS.get(last) if owner and owner not in NO_PATHS and "opener" not in owner else None
    )
    if known is None:
        return last == "TextIOWrapper"
    before, mode_at = known
    if len(call.args) > before or mode_at is None:
        return len(call.args) <= before
    mode = named.get("mode", call.args[mode_at] if len(call.args) > mode_at else ast.Constant("r"))
    return "b" not in ast.unparse(mode)


def test_no_text_is_read_in_the_encoding_of_the_locale() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:80]}"
        for folder in PRODUCT
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and is_in_the_locales_encoding(node)
    ]
    assert not wrong, "name the encoding:\n" + "\n".join(wrong)


def test_calls_without_an_encoding_are_found() -> None:
    def judged(text: str) -> bool:
        (node,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        return is_in_the_locales_encoding(node)

    for wrong in (
        "open(f)",
        "open(f, 'w')",
        "p.open()",
        "p.read_text()",
        "p.write_text(s)",
        "subprocess.run(c, text=True)",
    ):
        assert judged(wrong), wrong
    for right in ("open(f, 'rb')", "p.open('wb')", "p.read_text('utf-8')", "p.write_text(s, 'utf-8')", "os.open(f, m)"):
        assert not judged(right), right
