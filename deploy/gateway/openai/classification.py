"""POST /classify: the label of each text or list of token ids, with vLLM's bodies."""

import time

import msgspec
import numpy as np

from longshore.deploy.gateway.api.endpoint import Service
from longshore.deploy.gateway.api.pooled_inputs import InputRequest
from longshore.deploy.gateway.api.pooling_endpoint import (
    PoolingCall,
    PoolingEndpoint,
    PoolingUsage,
    usage_of,
)
from longshore.deploy.model.classifier import CLASSIFIED
from longshore.deploy.requests.errors import invalid


class ClassificationRequest(InputRequest, kw_only=True, forbid_unknown_fields=True):
    """use_activation: False returns scores before the head's activation, as `probs`."""

    use_activation: bool | None = None


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
    """Labels inputs, with models that have a classification head."""

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
        prompts = await request.token_ids(service)
        ends = await self.pooled(call, prompts, CLASSIFIED)
        classifier = service.classifier
        assert classifier is not None

        def whole() -> bytes:
            scores = np.stack([end.pooled for end in ends])
            rows = classifier.probabilities(scores, use_activation=request.use_activation).tolist()
            data = [
                Classification(index, classifier.labels[row.index(max(row))], row, len(row))
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
