"""Requests with texts or token ids of which vectors are computed."""

from typing import Final

from longshore.deploy.gateway.api.endpoint import Service
from longshore.deploy.gateway.api.pooling_endpoint import PoolingRequest
from longshore.deploy.gateway.api.requests import TokenIds, each_of
from longshore.deploy.requests.prompts import empty

MAX_INPUTS: Final = 2048


class InputRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """A request with inputs, with vLLM's `add_special_tokens`."""

    input: str | list[str | int | TokenIds]
    add_special_tokens: bool | None = None

    async def token_ids(self, service: Service) -> list[TokenIds]:
        """The valid token ids of each input. Raises RequestError, also as `each_of` does."""
        inputs = each_of(self.input, "input", MAX_INPUTS)
        for index, given in enumerate(inputs):
            if not given:
                raise empty(f"input[{index}]")
        form = service.prompts.form(self, gives_tokens=False)
        return await service.prompts.encode_all(inputs, form, "input[{}]".format)
