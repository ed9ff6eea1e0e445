"""The form of a transcription or translation request."""

from typing import Annotated, Any, Final

import msgspec

from longshore.deploy.gateway.api.field_rules import FIELD_RULES
from longshore.deploy.gateway.api.parameters import apply_rule, field_at_fault
from longshore.deploy.gateway.api.requests import Int32
from longshore.deploy.gateway.api.unknown_fields import ignore_fields
from longshore.deploy.gateway.http.multipart import Form
from longshore.deploy.requests.errors import invalid
from longshore.protocol.errors import shortened

MAX_LANGUAGE_CHARACTERS: Final = 64
FORMATS: Final = ("json", "text")


class TranscriptionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of the form in addition to the file. None: the default.

    language: code of the spoken language; None: it is detected.
    prompt:   preceding text, whose style the transcript continues.
    max_tokens: limit for each piece of the audio.
    Beyond OpenAI's API: top_p, top_k, min_p, seed, max_tokens, priority, and for translations
    language and stream.
    """

    model: str | None = None
    language: Annotated[str, msgspec.Meta(max_length=MAX_LANGUAGE_CHARACTERS)] | None = None
    prompt: str | None = None
    response_format: str = "json"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: Int32 | None = None
    priority: Int32 = 0
    stream: bool = False

    def check(self) -> None:
        """Raise RequestError for an unsupported response format."""
        if self.response_format not in FORMATS:
            known = " or ".join(FORMATS)
            times = self.response_format in ("verbose_json", "srt", "vtt")
            raise invalid(
                f"response_format={shortened(self.response_format)!r} is not supported"
                + (", because timestamps are not computed" if times else "")
                + f"; use {known}",
                param="response_format",
                code="unsupported_parameter",
            )
        if self.stream and self.response_format != "json":
            raise invalid(
                "a stream always has JSON events; remove response_format", param="response_format"
            )


def read_request(form: Form) -> tuple[bytes, TranscriptionRequest]:
    """The file's content and the other fields. Raises RequestError naming the invalid field."""
    values: dict[str, Any] = {}
    for name, value in form.fields:
        plain = name.removesuffix("[]")
        if plain in FIELD_RULES["transcription"]:
            apply_rule(FIELD_RULES["transcription"], plain, value)
            continue
        if name in values:
            raise invalid(f"the form has the field {shortened(name)!r} twice", param=name)
        if name == "file":
            raise invalid("the form field `file` is not a file; send it as a file", param="file")
        if name in TranscriptionRequest.__struct_fields__:
            values[name] = value
        else:
            ignore_fields((name,))
    for name in form.files:
        if name != "file":
            raise invalid(f"unknown file {shortened(name)!r}; send the audio as `file`", param=name)
    if "file" not in form.files:
        raise invalid("the form has no file; send the audio as `file`", param="file")
    try:
        request = msgspec.convert(values, TranscriptionRequest, strict=False)
    except msgspec.ValidationError as error:
        raise invalid(str(error), param=field_at_fault(error)) from error
    request.check()
    return form.files["file"], request
