"""Images of conversations: decoded or fetched, and processed, beside the event loop and within limits."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.server_options import ServerOptions
from octavo.server.api_errors import invalid
from octavo.server.protocol import ChatMessage, ImagePart

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.images.image_reader import ImageReader
    from octavo.images.image_sources import ImageFetcher
    from octavo.images.processor import ProcessedImage

logger = logging.getLogger("octavo.server")


class ImageInputs:
    """What one server does with images; what it needs is imported with the first."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self._llm, self._options = llm, options

    @property
    def placeholder(self) -> str | None:
        """What stands for an image in a prompt; None: the model sees none."""
        prompts = self._llm.inputs.image_prompts
        return None if prompts is None else prompts.processor.placeholder

    @property
    def are_seen(self) -> bool:
        """Whether the model sees images."""
        return self._llm.inputs.image_prompts is not None

    def check(self, messages: Sequence[ChatMessage]) -> list[ImagePart]:
        """The images of a conversation, in their order.

        Raises:
            ApiError: 400, there are more than may be.
        """
        contents = [message.content for message in messages if isinstance(message.content, list)]
        parts = [part for content in contents for part in content if isinstance(part, ImagePart)]
        most = (self._llm.config.limit_mm_per_prompt or {}).get("image")
        if most is not None and len(parts) > most:
            text = f"the conversation has {len(parts)} images; at most {most} are taken (limit_mm_per_prompt)"
            raise invalid("messages", text)
        return parts

    async def read(self, parts: Sequence[ImagePart], client: str) -> list[ProcessedImage]:
        """What the model makes of images; one that comes twice is read once.

        Raises:
            ApiError: 400, one is not there, not allowed, or no image, or this server cannot read images.
            ClientLimitError: the client has taken its seconds in the sandbox.
        """
        tasks: dict[str, asyncio.Task[ProcessedImage]] = {}
        for number, part in enumerate(parts, start=1):
            name = "the image" if len(parts) == 1 else f"image {number}"
            if part.url not in tasks:
                tasks[part.url] = asyncio.create_task(self._read(part.url, name, client))
        try:
            await asyncio.gather(*tasks.values())
            return [tasks[part.url].result() for part in parts]
        except InvalidRequestError as e:
            raise invalid("messages", str(e), "invalid_image") from None
        except ConfigError as e:  # its text names folders of this machine
            logger.error("%s", e)
            message = "this server reads no images: the extra octavo[images] is not installed"
            # Not a 501, which would say it better: clients try again what has a status from 500 on.
            raise invalid("messages", message, "images_not_installed") from None
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _read(self, url: str, name: str, client: str) -> ProcessedImage:
        from octavo.images.image_sources import read_data_url

        if url[:5].lower() == "data:":
            content = await asyncio.to_thread(read_data_url, url, self._options.max_image_bytes, name)
        else:
            content = await self._fetcher.fetch(url, name)
        prompts = self._llm.inputs.image_prompts
        assert prompts is not None
        future = self._reader.process(content, prompts.processor, client=client, name=name)
        return await asyncio.wrap_future(future)

    @cached_property
    def _reader(self) -> ImageReader:
        from octavo.images.image_files import ImageLimits
        from octavo.images.image_reader import ImageReader

        limits = ImageLimits(int(self._options.max_image_bytes), self._options.max_image_pixels)
        return ImageReader(self._llm.inputs.sandbox, limits)

    @cached_property
    def _fetcher(self) -> ImageFetcher:
        from octavo.images.image_sources import ImageFetcher, UrlRules

        options = self._options
        networks = tuple(ipaddress.ip_network(text) for text in options.image_url_networks)
        rules = UrlRules(options.allow_image_urls, options.allowed_media_domains, networks, options.image_url_seconds)
        return ImageFetcher(rules, options.max_image_bytes)
