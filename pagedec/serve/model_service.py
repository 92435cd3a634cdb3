"""ModelService: what is served, and its tokens."""

from __future__ import annotations

from typing import Any

from google.protobuf.struct_pb2 import Struct

from pagedec.decoders.registry import registered_names
from pagedec.llm.slow import LONG_PROMPT
from pagedec.serve.gateway import Gateway
from pagedec.serve.orders import read_ids
from pagedec.speculation import METHODS
from pagedec.v1 import model_service_pb2 as pb
from pagedec.v1 import model_service_pb2_grpc


class ModelService(model_service_pb2_grpc.ModelServiceServicer):
    """Answers from what the gateway knows."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        """All models that are served."""
        return pb.ListModelsResponse(models=map(self._model, self._gateway.models.names))

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        """One model."""
        self._gateway.check_model(request.name)
        return pb.GetModelResponse(model=self._model(request.name or self._gateway.model))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """The tokens of a text or of a conversation."""
        gateway = self._gateway
        gateway.check_model(request.model)
        tokenizer = gateway.llm.get_tokenizer()
        if request.no_special_tokens and request.prompt.WhichOneof("form") == "text":
            text = request.prompt.text
            tokenizer.check_length(text, gateway.limits.max_model_len, "prompt.text")
            token_ids = await gateway.preparing.in_thread(lambda: tokenizer.encode(text, False))
        else:
            _, token_ids = await gateway.tokens(request.prompt)
        gateway.llm.engine.check_tokens("prompt.token_ids.ids", token_ids)

        def made() -> pb.TokenizeResponse:
            texts = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in token_ids]
            return pb.TokenizeResponse(token_ids=token_ids, texts=texts)

        return await gateway.preparing.in_thread(made) if len(token_ids) > LONG_PROMPT else made()

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """The text of tokens."""
        self._gateway.check_model(request.model)
        tokenizer = self._gateway.llm.get_tokenizer()
        token_ids = read_ids(request.token_ids, "token_ids", self._gateway.limits)
        self._gateway.llm.engine.check_tokens("token_ids", token_ids)
        join, skips = tokenizer.byte_table.join, not request.special_tokens
        pieces = await self._gateway.preparing.in_thread(lambda: [join([token], skips) for token in token_ids])
        return pb.DetokenizeResponse(text=b"".join(pieces).decode("utf-8", "replace"), pieces=pieces)

    async def ApplyChatTemplate(
        self, request: pb.ApplyChatTemplateRequest, context: Any
    ) -> pb.ApplyChatTemplateResponse:
        """The text that a conversation becomes."""
        self._gateway.check_model(request.model)
        text, token_ids = await self._gateway.chat_tokens(request.chat)
        return pb.ApplyChatTemplateResponse(text=text, token_ids=token_ids)

    # ---- inside
    def _model(self, name: str) -> pb.Model:
        gateway = self._gateway
        llm, config = gateway.llm, gateway.llm.config
        engine, scheduler, tokenizer = llm.engine.limits, llm.engine.scheduler.limits, llm.tokenizer
        defaults = Struct()
        defaults.update({name: value for name, value in gateway.limits.defaults.items() if _is_plain(value)})
        return pb.Model(
            name=name,
            parent="" if name == gateway.model else gateway.model,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            block_size=scheduler.block_size,
            num_blocks=llm.kv_cache.num_blocks,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            dtype=llm.engine.executor.geometry.dtype,
            quantization=config.model.quantization or "",
            end_token_ids=engine.eos_token_ids,
            default_parameters=defaults,
            speculation_methods=list(METHODS),
            decoders=registered_names(),
            tries=list(gateway.limits.tries),
            max_logprobs=engine.max_logprobs,
            has_chat_template=tokenizer is not None and bool(tokenizer.chat_template),
            kv_cache_dtype=llm.engine.executor.geometry.kv_cache_dtype,
        )


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str))
