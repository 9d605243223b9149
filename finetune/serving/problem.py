"""JSON responses: values in ASCII, and errors in the form of OpenAI's API."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse


class Json(JSONResponse):
    """JSON in ASCII: texts may contain unpaired surrogates, which UTF-8 cannot encode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def problem(status: int, text: str, headers: Mapping[str, str] | None = None) -> Json:
    """An error response."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": text, "type": kind, "param": None, "code": None}
    return Json({"error": error}, status, headers)
