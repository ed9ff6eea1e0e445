"""POST /v1/responses/input_tokens: the length of a prompt, computed without the engine."""

import msgspec

from longshore.deploy.gateway.api.endpoint import Service, check_model
from longshore.deploy.gateway.http.exchange import Exchange
from longshore.deploy.gateway.responses_api.bodies import InputTokens
from longshore.deploy.gateway.responses_api.endpoint import ResponsesEndpoint


class InputTokensEndpoint(ResponsesEndpoint):
    """Counts the tokens that /v1/responses would send to the engine."""

    path = "/v1/responses/input_tokens"

    async def serve(self, exchange: Exchange, service: Service, arrived_s: float) -> None:
        chat = await self.read_chat(exchange, service)
        check_model(chat.model, service)
        token_ids = await service.prompts.chat_token_ids(chat)
        await exchange.send_json(msgspec.json.encode(InputTokens(input_tokens=len(token_ids))))
