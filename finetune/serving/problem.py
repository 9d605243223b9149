"""JSON responses: values in ASCII, and errors in the form of OpenAI's API."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from finetune.errors import FinetuneError, first_line, of_a_file

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


def explained(request: Request, error: Exception) -> tuple[int, str]:
    """The status and the text of the answer to a request that an error ended."""
    match error:
        case HTTPException():
            status, text = error.status_code, str(error.detail)
            if status in (404, 405) and text == HTTPStatus(status).phrase:
                text = f"{request.method} {request.url.path}: this route does not exist"
            elif status == 400 and error.__cause__ is not None:  # raised by FastAPI
                text = f"the body cannot be read as JSON: {error.__cause__}"
            return status, text
        case FinetuneError():
            return 400, str(error)
        case RequestValidationError():
            return 400, "\n".join(map(about_field, error.errors()))
        case OSError() if (text := of_a_file(error)) is not None:
            return 507, text
        case _:
            return 500, f"{type(error).__name__}: {first_line(error)}"


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
