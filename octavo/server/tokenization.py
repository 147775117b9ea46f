"""The routes ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.text_stream import TextStream
from octavo.engine.tokenizer import Tokenizer
from octavo.server.api_errors import ApiError
from octavo.server.large_bodies import beside_loop
from octavo.server.prompt_fields import encode, write_conversation
from octavo.server.protocol_admin import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizedContent,
    TokenizeRequest,
    TokenizerInfo,
    TokenPiece,
)
from octavo.server.service import Service, service_of

#: Up to this many tokens are decoded in well under a millisecond.
_SHORT = 1000


async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Token ids of a text, or of a conversation as the model's template writes it."""
    service = service_of(request)
    await service.model(body.model)
    if sum(given is not None for given in (body.prompt, body.messages, body.content)) != 1:
        raise ApiError(400, "give exactly one of prompt, messages and content", param="prompt")
    if body.content is not None:
        return await _tokenized_content(service, body, body.content)
    limit = service.llm.max_model_len
    if body.messages is not None:
        text = await write_conversation(service, request, body.messages, body)
        [ids] = await encode(service, [text], body.add_special_tokens is True)
        response = Tokenized(tokens=ids, count=len(ids), max_model_len=limit, prompt=text)
    else:
        [ids] = await encode(service, [body.prompt or ""], body.add_special_tokens is not False)
        response = Tokenized(tokens=ids, count=len(ids), max_model_len=limit)
    if body.return_token_strs:
        response.token_strs = [token or "" for token in service.llm.tokenizer.convert_ids_to_tokens(ids)]
    return Response(response.encode(), media_type="application/json")


async def _tokenized_content(service: Service, body: TokenizeRequest, content: str) -> Response:
    [ids] = await encode(service, [content], body.add_special is True, param="content")
    response = TokenizedContent(tokens=ids)
    if body.with_pieces:
        response.tokens = [TokenPiece(id=token, piece=_piece(service.llm.tokenizer, token)) for token in ids]
    return Response(response.encode(), media_type="application/json")


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    data = tokenizer.token_bytes(token_id)
    try:
        return tokenizer.token_text(token_id) if data is None else data.decode()
    except UnicodeDecodeError:
        return list(data or b"")


async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of token ids, special tokens included."""
    service = service_of(request)
    await service.model(body.model)
    vocab_size = service.llm.model_config.vocab_size
    for token in (min(body.tokens), max(body.tokens)) if body.tokens else ():
        if not 0 <= token < vocab_size:
            raise ApiError(400, f"token ids are integers from 0 to {vocab_size - 1}, not {token}", param="tokens")
    text = await beside_loop(request, _decode, service.llm.tokenizer, body.tokens)
    return Response(Detokenized(prompt=text, content=text).encode(), media_type="application/json")


async def tokenizer_info(request: Request) -> TokenizerInfo:
    """The tokenizer: its special tokens and chat templates."""
    service = service_of(request)
    tokenizer = service.llm.tokenizer
    templates = tokenizer.chat_templates
    return TokenizerInfo(
        tokenizer_class=type(tokenizer.backend.model).__name__,
        vocab_size=service.llm.model_config.vocab_size,
        model_max_length=service.llm.max_model_len,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        special_tokens=tokenizer.named_tokens,
        chat_template=templates if len(templates) > 1 else next(iter(templates.values()), None),
    )


def _decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """What ``tokenizer.decode`` gives, which of many is one long call in which no other thread has a turn."""
    if len(token_ids) < _SHORT:
        return tokenizer.decode(token_ids, skip_special_tokens=False)
    stream = TextStream(tokenizer, [], skip_special_tokens=False)
    return "".join([*map(stream.push, token_ids), stream.flush()])
