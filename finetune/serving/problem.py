"""JSON responses: values in ASCII, and errors in the form of OpenAI's API."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

LONGEST = 80
"""Maximum number of characters of a value that is quoted."""


class Json(JSONResponse):
    """JSON in ASCII: texts may contain unpaired surrogates, which UTF-8 cannot encode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def problem(status: int, text: str, headers: Mapping[str, str] | None = None) -> Json:
    """An error response."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": text, "type": kind, "param": None, "code": None}
    return Json({"error": error}, status, headers)


def about_field(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors about a request as `field: what is wrong, got VALUE`."""
    place = ".".join(str(part) for part in error["loc"][1:])
    if error["type"] == "json_invalid":
        return f"the body is not valid JSON: {error['ctx']['error']} at character {place}"
    if error["type"] == "extra_forbidden":
        return f"{place}: this server has no such field, and leaving it out may change the answer"
    if error["type"] == "missing":
        return f"{place or 'the body'}: {error['msg']}"
    got = json.dumps(error["input"])
    got = got if len(got) <= LONGEST else f"{got[:LONGEST]}..."
    return f"{place or 'the body'}: {error['msg']}, got {got}"
