"""The profiles that come with Tenuto, by name. Each file names its sources and what is doubtful."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import resources

from tenuto.documents import parse_document
from tenuto.errors import one_of, refused
from tenuto.files import parse_yaml
from tenuto.profiles.gpu_types import measured_as
from tenuto.profiles.profile import Profile

# Name and GPU type. When no profile is named, the first of a type is its default.
_SHIPPED = {
    "thesis-v100": "v100",
    "igniter-v100": "v100",
    "symphony-1080ti": "1080ti",
    "parvagpu-a100": "a100",
    "symphony-a100": "a100",
    "muxserve-a100": "a100-80gb",
    "distserve-a100": "a100-80gb",
}


def shipped_names() -> tuple[str, ...]:
    """Return the names `--profiles` takes beside files."""
    return tuple(_SHIPPED)


@cache
def load_shipped(name: str) -> Profile:
    """Return a shipped profile.

    Raises:
        InvalidInputError: unknown name; the message lists those that exist.
    """
    if name not in _SHIPPED:
        raise refused("profiles", name, "not a shipped profile", one_of(name, _SHIPPED, "Shipped profiles:"))
    text = resources.files("tenuto.profiles").joinpath("data", f"{name}.yaml").read_text(encoding="utf-8")
    return parse_document(Profile, parse_yaml(text), origin=name)


def shipped_for(gpu_types: Iterable[str], *, except_for: Iterable[Profile] = ()) -> list[Profile]:
    """Return every shipped profile of these GPU types without those in `except_for`; a type's default comes first."""
    types = {kind for gpu_type in gpu_types for kind in measured_as(gpu_type)}
    known = {profile.name for profile in except_for}
    return [load_shipped(name) for name, kind in _SHIPPED.items() if kind in types and name not in known]


def default_profiles(gpu_type: str) -> list[Profile]:
    """Return the profiles of a GPU type that are used by default: its first one, and those that only have other
    networks; empty if none is shipped."""
    profiles: list[Profile] = []
    for name in (
        name for measured_type in measured_as(gpu_type) for name, kind in _SHIPPED.items() if kind == measured_type
    ):
        profile = load_shipped(name)
        if not any(profile.models.keys() & other.models.keys() for other in profiles):
            profiles.append(profile)
    return profiles
