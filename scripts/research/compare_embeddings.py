"""Seconds that engines take for the vectors of 1,000 texts of 8 to 256 tokens, in turn on the same machine.

    python scripts/research/compare_embeddings.py FOLDER --peers PEERS/bin/python --llama-server PATH

FOLDER holds a BERT encoder of sentence-transformers, such as ``octavo pull all-minilm-l6-v2`` prints. PEERS is an
environment with torch, sentence-transformers, onnxruntime, onnx and gguf; onnxruntime's model is exported from torch,
its graph optimised as for BERT, and quantised (dynamic int8); llama.cpp's is a GGUF file in float32, from which
``llama-quantize``, beside the server, makes the other types. Every engine gets the same texts, made of words of the
repository's own documentation, and as many threads as there are processors; peers sort them by length. Times are the
least of ``--rounds``, after one that warms up. Vectors are compared with those of torch in float32.

Then servers are asked one text at a time by 16 and by 64 clients, and a short text by a single one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Vectors of texts in order: numpy [n, E].
Embed = Callable[[list[str]], Any]
THREADS = len(os.sched_getaffinity(0))
_TYPES = {
    "torch": ["float32", "bfloat16"],
    "onnxruntime": ["float32", "int8"],
    "llama": ["float32", "bfloat16", "int8"],
    "octavo": ["float32", "bfloat16", "int8"],
}
ENGINES = [f"{engine}-{dtype}" for engine, types in _TYPES.items() for dtype in types]
SERVERS = [name for name in ENGINES if name.startswith(("llama", "octavo"))]
SHORT = "How far is the moon?"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers", default=sys.executable, help="Python of the peers")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--clients", default="16,64")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder for converted models, kept")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_engine(arguments)
        return
    with tempfile.TemporaryDirectory() as temporary:
        arguments.work = arguments.work or Path(temporary)
        arguments.work.mkdir(parents=True, exist_ok=True)
        texts, counts = make_texts(arguments.folder, arguments.texts)
        (arguments.work / "texts.json").write_text(json.dumps(texts))
        print(
            f"{len(texts)} texts, {sum(counts)} tokens, {min(counts)} to {max(counts)}; {THREADS} threads", flush=True
        )
        result: dict[str, Any] = {"tokens": sum(counts), "threads": THREADS, "offline": {}, "served": {}}
        for name in filter(None, arguments.engines.split(",")):
            result["offline"][name] = found = measure_offline(arguments, name)
            print(offline_line(name, found, sum(counts)), flush=True)
        compare(arguments.work, result["offline"])
        for name in filter(None, arguments.servers.split(",")):
            result["served"][name] = served = measure_served(arguments, name, texts)
            print(f"{name:22s} served: {json.dumps(served)}", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1))


def offline_line(name: str, found: dict[str, Any], tokens: int) -> str:
    if "error" in found:
        return f"{name:22s} {found['error']}"
    return f"{name:22s} {found['seconds']:8.2f} s {tokens / found['seconds']:10,.0f} tokens/s"


def make_texts(folder: Path, count: int) -> tuple[list[str], list[int]]:
    """The same texts for every engine, and their tokens: lengths spread evenly from 8 to 256 tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    words = [w for page in pages for w in page.read_text().split() if re.fullmatch(r"[A-Za-z]+[.,;:?]?", w)]
    sizes = [len(e.ids) for e in tokenizer.encode_batch(words, add_special_tokens=False)]
    rng = random.Random(30)
    texts = []
    for _ in range(count):
        left, at, chosen = rng.randint(8, 256) - 2, rng.randrange(len(words)), []
        while left > 0:
            at = (at + 1) % len(words)
            if sizes[at] <= left:
                chosen.append(words[at])
                left -= sizes[at]
        texts.append(" ".join(chosen))
    return texts, [len(e.ids) for e in tokenizer.encode_batch(texts)]


def measure_offline(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """What ``run_engine`` prints, in a process of its own."""
    python = sys.executable if name.startswith("octavo") else arguments.peers
    command = [python, __file__, str(arguments.folder), "--run", name, "--work", str(arguments.work)]
    command += ["--rounds", str(arguments.rounds)]
    if arguments.llama_server:
        command += ["--llama-server", str(arguments.llama_server)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no result"])[-1]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def run_engine(arguments: argparse.Namespace) -> None:
    """In the engine's own process: prints seconds, and leaves the vectors in the work folder."""
    import numpy as np

    texts = json.loads((arguments.work / "texts.json").read_text())
    engine, dtype = arguments.run.split("-")
    maker = {"torch": torch_embed, "onnxruntime": onnx_embed, "llama": llama_embed, "octavo": octavo_embed}[engine]
    embed, close = maker(arguments, dtype)
    try:
        embed(texts[:64])
        seconds = []
        for _ in range(arguments.rounds):
            start = time.perf_counter()
            vectors = embed(texts)
            seconds.append(time.perf_counter() - start)
    finally:
        close()
    np.save(arguments.work / f"{arguments.run}.npy", np.asarray(vectors, np.float32))
    print(json.dumps({"seconds": round(min(seconds), 3), "all": [round(s, 3) for s in seconds]}))


def octavo_embed(arguments: argparse.Namespace, dtype: str) -> tuple[Embed, Callable[[], None]]:
    import numpy as np

    from octavo import LLM

    kind = {"dtype": "bfloat16", "quantization": "int8"} if dtype == "int8" else {"dtype": dtype}
    llm = LLM(str(arguments.folder), **kind)  # type: ignore[arg-type]

    def embed(texts: list[str]) -> Any:
        outputs: list[Any] = llm.embed(texts, use_tqdm=False)
        return np.array([output.outputs.embedding for output in outputs])

    return embed, lambda: None


def torch_embed(arguments: argparse.Namespace, dtype: str) -> tuple[Embed, Callable[[], None]]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(THREADS)
    kind = {"torch_dtype": getattr(torch, dtype)}
    model = SentenceTransformer(str(arguments.folder), device="cpu", model_kwargs=kind)
    return lambda texts: model.encode(texts, batch_size=32, convert_to_tensor=True).float().numpy(), lambda: None


def onnx_embed(arguments: argparse.Namespace, dtype: str) -> tuple[Embed, Callable[[], None]]:
    """Batches of 32 texts of like length, as fastembed and optimum run such a model; pooled by numpy."""
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    path = onnx_model(arguments, dtype)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()

    def embed(texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors: Any = [None] * len(texts)
        for start in range(0, len(texts), 32):
            rows = order[start : start + 32]
            encoded = tokenizer.encode_batch([texts[i] for i in rows])
            ids, mask = (np.array([getattr(e, kind) for e in encoded], np.int64) for kind in ("ids", "attention_mask"))
            feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            hidden = session.run(None, {name: feeds[name] for name in names})[0]
            weights = mask[:, :, None].astype(np.float32)
            pooled = (hidden * weights).sum(1) / weights.sum(1)
            pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
            for i, vector in zip(rows, pooled, strict=True):
                vectors[i] = vector
        return np.array(vectors)

    return embed, lambda: None


def onnx_model(arguments: argparse.Namespace, dtype: str) -> Path:
    """The exported and optimised model."""
    path: Path = arguments.work / f"{dtype}.onnx"
    if path.exists():
        return path
    if dtype == "int8":
        from onnx import TensorProto
        from onnxruntime.quantization import QuantType, quantize_dynamic

        source = onnx_model(arguments, "float32")
        kind = {"DefaultTensorType": TensorProto.FLOAT}
        quantize_dynamic(str(source), str(path), weight_type=QuantType.QInt8, per_channel=True, extra_options=kind)
        return path
    import torch
    from onnxruntime.transformers import optimizer
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(arguments.folder, attn_implementation="eager").eval().requires_grad_(False)

    class Encoder(torch.nn.Module):
        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            return model(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 10:] = 0
    plain = arguments.work / "plain.onnx"
    axes = {name: {0: "batch", 1: "tokens"} for name in [*names, "hidden"]}
    torch.onnx.export(
        Encoder(),
        (mask.clone(), mask, torch.zeros_like(mask)),
        str(plain),
        input_names=names,
        output_names=["hidden"],
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )
    config = model.config
    fused = optimizer.optimize_model(str(plain), "bert", config.num_attention_heads, config.hidden_size)
    fused.save_model_to_file(str(path))
    return path


def llama_embed(arguments: argparse.Namespace, dtype: str) -> tuple[Embed, Callable[[], None]]:
    """One text at a time by 32 clients of its server, which was faster than lists of texts."""
    import numpy as np

    server = Server(llama_command(arguments, dtype))

    def embed(texts: list[str]) -> Any:
        answers = asyncio.run(server.ask([{"input": text} for text in texts], clients=32))
        return np.array([answer["data"][0]["embedding"] for answer, _ in answers], np.float32)

    return embed, server.close


def llama_command(arguments: argparse.Namespace, dtype: str) -> list[str]:
    path = gguf_model(arguments, dtype)
    os.environ["LD_LIBRARY_PATH"] = str(arguments.llama_server.parent)
    flags = f"-t {THREADS} -tb {THREADS} --embeddings --pooling mean -c 16384 -np 32 -b 512 -ub 512 --no-webui"
    return [str(arguments.llama_server), "-m", str(path), *flags.split()]


def gguf_model(arguments: argparse.Namespace, dtype: str) -> Path:
    """As llama.cpp's converter writes it."""
    path: Path = arguments.work / f"{dtype}.gguf"
    if path.exists():
        return path
    if dtype != "float32":
        kind = {"bfloat16": "BF16", "int8": "Q8_0"}[dtype]
        tool = arguments.llama_server.parent / "llama-quantize"
        environment = {**os.environ, "LD_LIBRARY_PATH": str(tool.parent)}
        source = gguf_model(arguments, "float32")
        subprocess.run([tool, source, path, kind], check=True, capture_output=True, env=environment)
        return path
    write_gguf(arguments.folder, path)
    return path


def write_gguf(folder: Path, path: Path) -> None:
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), "bert")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    vocabulary: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(config["type_vocab_size"])
    special = [bool(re.fullmatch(r"\[.*\]", token)) for token in tokens]
    pieces = [t if s else t[2:] if t.startswith("##") else "▁" + t for t, s in zip(tokens, special, strict=True)]
    writer.add_token_list(pieces)
    writer.add_token_types([gguf.TokenType.CONTROL if s else gguf.TokenType.NORMAL for s in special])
    for token, add in (
        ("[UNK]", writer.add_unk_token_id),
        ("[SEP]", writer.add_sep_token_id),
        ("[PAD]", writer.add_pad_token_id),
        ("[CLS]", writer.add_bos_token_id),
        ("[MASK]", writer.add_mask_token_id),
    ):
        add(tokens.index(token))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "position_ids" in name or "pooler" in name:
            continue
        stem, kind = name.removeprefix("bert.").rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", tensor.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Server:
    """A server process with ``/v1/embeddings``, and clients of it on connections that are kept."""

    def __init__(self, command: list[str]) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self._log = output = tempfile.TemporaryFile()  # noqa: SIM115 - the process writes to it until it ends
        self._process = subprocess.Popen([*command, "--port", str(self.port)], stdout=output, stderr=output)
        deadline = time.monotonic() + 120
        while True:
            try:
                asyncio.run(self.ask([{"input": SHORT}], clients=1))
                return
            except (OSError, ValueError, KeyError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self._log.seek(0)
                    raise RuntimeError(self._log.read()[-300:].decode().replace("\n", " ")) from None
                time.sleep(0.1)

    async def ask(self, bodies: list[dict[str, Any]], clients: int) -> list[tuple[dict[str, Any], float]]:
        """The answers in order, each with its seconds."""
        answers: list[Any] = [None] * len(bodies)
        waiting = iter(enumerate(bodies))

        async def client() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
            for i, body in waiting:
                data = json.dumps({"model": "m", **body}).encode()
                head = "POST /v1/embeddings HTTP/1.1\r\nHost: l\r\nContent-Type: application/json\r\n"
                start = time.perf_counter()
                for last in (False, True):
                    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
                    try:
                        answer = await read_answer(reader)
                        break
                    except (asyncio.IncompleteReadError, ConnectionError):  # some end a connection after many requests
                        if last:
                            raise
                        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
                answers[i] = json.loads(answer), time.perf_counter() - start
                if "data" not in answers[i][0]:
                    raise ValueError(answer[:300])
            writer.close()

        await asyncio.gather(*(client() for _ in range(clients)))
        return answers

    def close(self) -> None:
        """Ends it."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """The body of an answer, of known length or in chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = re.search(rb"content-length: *(\d+)", head)
    if length:
        return await reader.readexactly(int(length[1]))
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return body


def measure_served(arguments: argparse.Namespace, name: str, texts: list[str]) -> dict[str, Any]:
    """Seconds for all texts with so many clients, and the median of a single short text."""
    engine, dtype = name.split("-")
    if engine == "llama":
        command = llama_command(arguments, dtype)
    else:
        kind = ["--dtype", "bfloat16", "--quantization", "int8"] if dtype == "int8" else ["--dtype", dtype]
        command = [sys.executable, "-m", "octavo", "serve", str(arguments.folder), "--served-model-name", "m", *kind]
    try:
        server = Server(command)
    except RuntimeError as e:
        return {"error": str(e)}
    found: dict[str, Any] = {}
    bodies = [{"input": text} for text in texts]
    try:
        for clients in map(int, arguments.clients.split(",")):
            start = time.perf_counter()
            answers = asyncio.run(server.ask(bodies, clients))
            seconds = time.perf_counter() - start
            times = sorted(each for _, each in answers)
            found[str(clients)] = {"seconds": round(seconds, 2), "p50_ms": round(1000 * times[len(times) // 2], 1)}
        alone = sorted(each for _, each in asyncio.run(server.ask([{"input": SHORT}] * 50, 1)))
        found["short_ms"] = round(1000 * alone[25], 2)
    except (ValueError, OSError) as e:
        found["error"] = str(e)
    finally:
        server.close()
    return found


def compare(work: Path, offline: dict[str, Any]) -> None:
    """Prints the least and the mean cosine with torch's vectors in float32."""
    import numpy as np

    if "error" in offline.get("torch-float32", {"error": "not run"}):
        return
    expected = np.load(work / "torch-float32.npy")
    for name, found in offline.items():
        if "error" in found:
            continue
        vectors = np.load(work / f"{name}.npy")
        cosines = (vectors * expected).sum(1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(expected, axis=1)
        found["least_cosine"], found["mean_cosine"] = float(cosines.min()), float(cosines.mean())
        print(f"{name:22s} cosine with torch-float32: {cosines.min():.6f} least, {cosines.mean():.6f} mean", flush=True)


if __name__ == "__main__":
    main()
