"""The thinking budget of a request."""

import msgspec

from longshore.deploy.gateway.api.endpoint import Service
from longshore.deploy.gateway.api.requests import GenerationRequest
from longshore.deploy.gateway.api.unknown_fields import ignore_fields
from longshore.deploy.requests.errors import invalid
from longshore.deploy.requests.thinking import thinking_budget
from longshore.protocol.sampling import SamplingParams


def with_budget(
    sampling: SamplingParams, request: GenerationRequest, service: Service
) -> SamplingParams:
    """The settings with the request's thinking budget. The response names a budget that this model
    can not have. Raises RequestError for one that is out of range."""
    wanted = request.thinking_token_budget
    if wanted is None or wanted == -1:
        return sampling
    try:
        budget = thinking_budget(
            wanted,
            service.parsers.reasoning,
            service.tokenizer,
            vocab_size=service.prompts.vocab_size,
        )
    except ValueError as error:
        raise invalid(str(error), param="thinking_token_budget") from error
    if budget is None:
        ignore_fields((request.budget_name,))
    return msgspec.structs.replace(sampling, thinking=budget)
