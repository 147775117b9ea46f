"""Reads a form with a recording, as OpenAI's clients send it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from octavo.core.threads import finish_in_thread
from octavo.server.api_errors import ApiError
from octavo.server.audio.audio_fields import AudioRequest, read_values
from octavo.server.request_models import read_model
from octavo.server.service import Service

R = TypeVar("R", bound=AudioRequest)

#: Most texts in a form, and bytes of one.
_MAX_FIELDS = 100
_MAX_FIELD_BYTES = 1 << 20
_FILE = "file"


@dataclass(frozen=True)
class Upload:
    """A recording as it was sent."""

    #: What errors call it.
    name: str
    data: bytes


async def read_form(request: Request, kind: type[R], service: Service) -> tuple[R, Upload]:
    """The fields and the recording of a form.

    Raises:
        ApiError: 400, it is no form, has no recording or several, or a field is wrong.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        message = "the body must be a form (multipart/form-data) with the recording as its part 'file'"
        raise ApiError(400, message, code="invalid_form")
    try:
        form = await request.form(max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES)
    except HTTPException as e:
        raise ApiError(400, f"the form cannot be read: {e.detail}", code="invalid_form") from None
    try:
        texts = [(name, part) for name, part in form.multi_items() if isinstance(part, str)]
        file = form.get(_FILE)
        if not isinstance(file, UploadFile):
            what = "is a text" if isinstance(file, str) else "is missing"
            raise ApiError(400, f"file: it {what}; send the recording as a file", param=_FILE, code="missing_file")
        name = f"the file {file.filename[:100]!r}" if file.filename else "the file"
        data = await finish_in_thread(file.file.read)
    finally:
        await form.close()
    try:
        values = read_values((name, text) for name, text in texts if name != _FILE)
    except ValueError as e:
        raise ApiError(400, str(e), code="invalid_form") from None
    return read_model(kind, values, service), Upload(name, data)
