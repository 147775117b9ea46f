"""What stands before engine cores: prompts become requests of a core, and what it gives becomes text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec

from octavo.core.adapters import AdapterRef, LoRARequest
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.errors import InvalidRequestError
from octavo.core.messages import check_sendable
from octavo.core.pooling_params import PoolingParams
from octavo.core.prompts import Prompt
from octavo.core.request_options import RequestOptions
from octavo.core.sampling_params import RequestOutputKind, SamplingParams
from octavo.core.threads import finish_in_thread
from octavo.engine.adapter_registry import make_registry
from octavo.engine.input_processor import InputProcessor
from octavo.engine.model_files import ModelFiles
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.pooling_inputs import PoolingInputs
from octavo.engine.prompt_features import PromptFeatures, take_images
from octavo.engine.request_state import RequestState
from octavo.engine.shared_prefixes import SharedPrefixes

if TYPE_CHECKING:
    from octavo.engine.speech_requests import SpeechRequests

#: What a request asks for.
Params = SamplingParams | BeamSearchParams | PoolingParams
#: Keys of prompts that may have sound.
_SOUND = ("encoder_input", "encoder_prompt", "multi_modal_data")
#: Texts of this many characters take some 10 ms to tokenize, and are tokenized in a thread.
LONG_TEXT = 8192


class FrontEnd:
    """Owns the open requests of an engine, and all that they need outside of its cores. For one thread.

    Invariant: an adapter that a request names is in use from ``add`` until the request has ended, in whichever way.
    """

    def __init__(self, files: ModelFiles, max_model_len: int, *, sends: bool) -> None:
        """``max_model_len``: the longest sequence that a core can hold, in tokens, prompt and output together.

        ``sends``: requests go to another process, so that code cannot be part of them.
        """
        self.files = files
        self._sends = sends
        self.tokenizer = files.tokenizer
        self.inputs = InputProcessor(files, max_model_len)
        #: The adapters that requests may name.
        self.adapters = make_registry(files.options, files.model_config)
        self.pooling = PoolingInputs(files, self.inputs)
        self.outputs = OutputProcessor(files.tokenizer, self.adapters.end)
        self.prefixes = SharedPrefixes(files.options, self.inputs)
        #: By name: held while an adapter is read.
        self._adapter_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @cached_property
    def speech(self) -> SpeechRequests:
        """What the model's files say of speech.

        Raises:
            InvalidRequestError: the model does not read sound.
            ConfigError: its files do not say what its tokens mean.
        """
        from octavo.engine.speech_requests import SpeechRequests

        return SpeechRequests(self.files)

    async def prepare(
        self, prompt: Prompt, params: Params | None, options: RequestOptions
    ) -> tuple[Prompt, RequestOptions, AdapterRef | None]:
        """What ``add`` takes, after all that takes long, so that it does not: done in threads and in the sandbox.

        Long texts are tokenized, images and the adapter are read, if they are not yet, and the grammar of structured
        output is compiled.

        Raises:
            InvalidRequestError: the prompt is no text, an image is none, or there can be no such grammar.
            ClientLimitError: the client has used up the seconds that it may have for compiling (``Sandbox``).
            AdapterError: the adapter cannot be used.
        """
        prompt = await self._read_images(await self.tokenize(prompt, params))
        if isinstance(options.prediction, str) and len(options.prediction) >= LONG_TEXT:
            [ids] = await asyncio.to_thread(self.tokenizer.encode_batch, [options.prediction], False)
            options = msgspec.structs.replace(options, prediction=ids)
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            params.validate()  # fields may have been assigned
            await self.inputs.grammars.compile_for(options.client, params.structured_outputs)
        named = options.lora_request
        return prompt, options, None if named is None else await self._find_adapter(named)

    async def tokenize(self, prompt: Prompt, params: Params | None = None) -> Prompt:
        """The prompt, to which token ids are added if it is a long text; that is done in a thread."""
        fields: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        if "encoder_prompt" in fields and "encoder_input" not in fields:
            return {**fields, "encoder_prompt": await self.tokenize(fields["encoder_prompt"])}
        text = fields.get("prompt")
        if not isinstance(text, str) or len(text) < LONG_TEXT or fields.get("prompt_token_ids") is not None:
            return prompt
        if isinstance(params, PoolingParams):
            return await asyncio.to_thread(self.pooling.tokenize, prompt, params)
        # Unlike ``encode``, this lets other threads run.
        [ids] = await asyncio.to_thread(self.tokenizer.encode_batch, [text])
        return {**fields, "prompt_token_ids": ids}

    async def _read_images(self, prompt: Prompt) -> Prompt:
        """The prompt with its images as the model sees them; they are made in a thread, and files in the sandbox."""
        if self.inputs.image_prompts is None:
            return prompt
        rest, images = take_images(prompt)
        if not images or isinstance(images, PromptFeatures):
            return prompt
        return {**rest, "multi_modal_data": {"image": await finish_in_thread(self.inputs.image_prompts.read, images)}}

    async def _find_adapter(self, request: LoRARequest) -> AdapterRef:
        """The adapter that a request names, read in a thread if it is not loaded; one read serves all that wait."""
        ref = self.adapters.find(request)
        if ref is None:
            async with self._adapter_locks.setdefault(request.lora_name, asyncio.Lock()):
                if (ref := self.adapters.find(request)) is None:
                    self.adapters.add(request, await asyncio.to_thread(self.adapters.read, request))
                    return self.adapters.load(request)
        return ref

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None,
        options: RequestOptions,
        adapter: AdapterRef | None,
        kind: RequestOutputKind,
    ) -> RequestState:
        """Begins a request, which goes to a core now; without ``params`` it has the model's defaults.

        ``adapter``: what ``options`` name. ``kind``: see ``OutputProcessor.open``.

        Raises:
            InvalidRequestError: its id is in use, or as ``InputProcessor.process``; nothing is changed.
        """
        if request_id in self.outputs:
            raise InvalidRequestError(f"request id {request_id!r} is in use by an unfinished request")
        request: RequestState
        if isinstance(params, PoolingParams):
            request = self.pooling.process(request_id, prompt, params, options, adapter)
        else:
            # What is said of sound is the task of a model that hears, however it is asked.
            hears = isinstance(prompt, Mapping) and any(prompt.get(key) is not None for key in _SOUND)
            self.pooling.require("transcribe" if hears and "transcribe" in self.pooling.tasks else "generate")
            params = params if params is not None else self.inputs.default_params()
            request = self.inputs.process(request_id, prompt, params, options, adapter)
        if self._sends:
            check_sendable(request.group)
        if adapter is not None:
            self.adapters.begin(request.group.group_id, adapter)
        return self.outputs.open(request, kind)
