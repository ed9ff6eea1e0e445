"""POST /classify: the label of each text or list of token ids, with vLLM's bodies."""

import time

import msgspec

from longshore.deploy.gateway.openai.endpoint import Service
from longshore.deploy.gateway.openai.errors import invalid
from longshore.deploy.gateway.openai.pooled_inputs import MAX_INPUTS, max_tokens_of, token_ids_of
from longshore.deploy.gateway.openai.pooling_endpoint import (
    PoolingCall,
    PoolingEndpoint,
    PoolingRequest,
    PoolingUsage,
    usage_of,
)
from longshore.deploy.gateway.openai.requests import TokenIds, each_of
from longshore.deploy.gateway.openai.scoring import label_scores
from longshore.deploy.model.classifier import CLASSIFIED


class ClassificationRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """use_activation: False returns scores before the head's activation, as `probs`."""

    input: str | list[str | int | TokenIds]
    add_special_tokens: bool | None = None
    use_activation: bool | None = None

    def inputs(self) -> list[str | TokenIds]:
        """The list of inputs. Raises ApiError as `each_of` does."""
        return each_of(self.input, "input", MAX_INPUTS)


class Classification(msgspec.Struct, frozen=True):
    """label: of the highest score. probs: of all labels, in the order of the model's config."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage
    object: str = "list"


class ClassifyEndpoint(PoolingEndpoint[ClassificationRequest]):
    """Available for models with a classification head."""

    path = "/classify"
    other_paths = ("/v1/classify",)
    id_prefix = "classify"
    param = "input"
    request_type = ClassificationRequest

    def check_service(self, service: Service) -> None:
        if service.classifier is None:
            raise invalid(
                f"{service.model_name} has no classification head; {self.path} is for models for "
                "sequence classification",
                param="model",
            )

    async def answer(self, call: PoolingCall[ClassificationRequest]) -> bytes:
        service, request = call.service, call.request
        prompts = await token_ids_of(
            request.inputs(),
            service,
            max_tokens=max_tokens_of(request.truncate_prompt_tokens, service),
            keeps_end=request.keeps_end,
            with_special=request.add_special_tokens is not False,
        )
        ends = await self.pooled(call, prompts, CLASSIFIED)
        assert service.classifier is not None
        labels = service.classifier.labels

        def whole() -> bytes:
            assert service.classifier is not None
            rows = label_scores(ends, service.classifier, use_activation=request.use_activation)
            data = [
                Classification(index, labels[row.index(max(row))], row, len(row))
                for index, row in enumerate(rows)
            ]
            return msgspec.json.encode(
                ClassificationResponse(
                    id=call.request_id,
                    created=int(time.time()),
                    model=service.model_name,
                    data=data,
                    usage=usage_of(prompts, ends),
                )
            )

        return await service.json.run(sum(end.pooled.nbytes for end in ends), whole)
