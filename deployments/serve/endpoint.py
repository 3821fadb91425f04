"""Asking a running endpoint over HTTP: its health, its models, its plan; as a client with a key where there is one."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote

from tenuto.errors import EnvironmentFaultError, refused

CLIENT_KEY = "TENUTO_API_KEY"


def client_key() -> str:
    """Return the API key that this process shows where it is a client; empty without one."""
    return os.environ.get(CLIENT_KEY, "").strip()


def get_json(url: str, timeout_s: float = 5.0) -> Any:
    """Return the JSON document at a URL, also that of an error status.

    Raises:
        InvalidInputError: that is no URL.
        EnvironmentFaultError: nobody answers there, or not with JSON.
    """
    if not url.startswith(("http://", "https://")):
        raise refused("URL", url, "is not the address of a server", "Write for example http://127.0.0.1:8000.")
    key = client_key()
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        with error, contextlib.suppress(ValueError):
            return json.load(error)
        raise EnvironmentFaultError(f"{url} answered {error.code} without JSON. Is this a Tenuto server?") from error
    except (OSError, ValueError) as error:
        raise EnvironmentFaultError(
            f"{url} does not answer ({error}). Start the server with `tenuto serve PLAN`."
        ) from error


def model_metadata(url: str, model: str) -> dict[str, Any]:
    """Return the Open Inference Protocol metadata of a model, or the endpoint's `{"error": …}`."""
    found: dict[str, Any] = get_json(f"{url.rstrip('/')}/v2/models/{quote(model, safe='')}")
    return found


def served_plan(url: str) -> dict[str, Any]:
    """Return the plan a Tenuto endpoint serves, as plain data.

    Raises:
        EnvironmentFaultError: the endpoint is not Tenuto, or has no plan.
    """
    status = get_json(f"{url.rstrip('/')}/status")
    plan = status.get("plan") if isinstance(status, dict) else None
    if not isinstance(plan, dict):
        raise EnvironmentFaultError(f"{url}/status carries no plan. Give the plan file instead of the address.")
    return plan
