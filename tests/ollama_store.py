"""A store as Ollama lays it out, made of a GGUF file that is linked into it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any


class Store:
    """A folder for ``OLLAMA_MODELS``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs").mkdir(parents=True)

    def blob(self, content: bytes | Path) -> tuple[str, int]:
        """Digest and size of a new blob; a file is linked, and its digest is that of its path."""
        name = str(content).encode() if isinstance(content, Path) else content
        digest = hashlib.sha256(name).hexdigest()
        path = self.root / "blobs" / f"sha256-{digest}"
        if isinstance(content, Path) and not path.exists():
            try:
                os.link(content, path)
            except OSError:  # on another disk
                shutil.copyfile(content, path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        return f"sha256:{digest}", path.stat().st_size

    def add(self, name: str, gguf: Path, **layers: Any) -> Path:
        """Writes a manifest ``HOST/NAMESPACE/MODEL/TAG``; the layers are texts, objects as JSON, or files."""
        contents: dict[str, bytes | Path] = {"model": gguf}
        for kind, value in layers.items():
            text = value if isinstance(value, str | Path) else json.dumps(value)
            contents[kind] = text if isinstance(text, Path) else text.encode()
        entries = []
        for kind, content in contents.items():
            digest, size = self.blob(content)
            entries.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": size})
        return self.write(name, {"schemaVersion": 2, "layers": entries})

    def write(self, name: str, manifest: Any) -> Path:
        path = self.root / "manifests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
        return path


LIBRARY = "registry.ollama.ai/library"
