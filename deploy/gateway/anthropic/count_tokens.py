"""POST /v1/messages/count_tokens: the length of a prompt, computed without the engine."""

from functools import partial

import msgspec

from longshore.deploy.gateway.anthropic.bodies import TokenCount
from longshore.deploy.gateway.anthropic.messages import parse_conversation
from longshore.deploy.gateway.anthropic.requests import Conversation
from longshore.deploy.gateway.api.endpoint import ApiEndpoint, Service, check_model, read_in_turn
from longshore.deploy.gateway.http.exchange import Exchange


class CountTokensEndpoint(ApiEndpoint):
    """Counts the tokens that /v1/messages would send to the engine."""

    path = "/v1/messages/count_tokens"

    async def serve(self, exchange: Exchange, service: Service, arrived_s: float) -> None:
        body = await read_in_turn(exchange, service)
        read = partial(parse_conversation, Conversation, service.seal)
        chat = await service.json.run(len(body), read, body)
        check_model(chat.model, service)
        token_ids = await service.prompts.chat_token_ids(chat)
        await exchange.send_json(msgspec.json.encode(TokenCount(len(token_ids))))
