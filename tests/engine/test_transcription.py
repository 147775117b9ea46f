"""Transcriptions: offline, and in an event loop."""

from __future__ import annotations

import asyncio
import io
import signal
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

from octavo import LLM, SamplingParams
from octavo.core.errors import AudioError, InvalidRequestError
from octavo.core.request import RequestOptions
from octavo.engine import transcription as async_transcription
from octavo.engine.transcription import transcribe_recording
from octavo.process.children import finish_in_thread
from octavo.speech import transcription as loops
from octavo.speech.audio_files import DEFAULT_LIMITS, AudioLimits, OpenedAudio, open_audio
from octavo.speech.transcription import TranscriptionParams
from tests.busy_machine import PATIENCE
from tests.speech.fake_speech import CODEC, KNOWN

SPEECH = Path(__file__).resolve().parent.parent / "data" / "speech.ogg"
MODEL = "whisper-tiny.en"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM(MODEL, dtype="float32", max_num_seqs=8)


@pytest.fixture(scope="module")
def speech() -> NDArray[np.float32]:
    with open_audio(SPEECH) as opened:
        return np.concatenate(list(opened.pieces()))


#: Speech that is repeated is no reason to draw again.
ONCE = TranscriptionParams(temperature=0.0)


def transcribe(llm: LLM, audio: Any, params: Any = ONCE, **keywords: Any) -> list[Any]:
    return llm.transcribe(audio, params, use_tqdm=False, **keywords)


def test_speech_becomes_text(llm: LLM) -> None:
    [made] = transcribe(llm, SPEECH)
    text = made.text.lower()
    assert "fox" in text
    assert "lazy dog" in text
    assert "sea shore" in text
    assert made.language == "en"
    assert abs(made.duration - 7.9) < 0.5
    ends = [0.0, *(time for segment in made.segments for time in (segment.start, segment.end))]
    assert ends == sorted(ends)
    assert ends[-1] <= made.duration + 0.02


def test_recordings_in_company_have_the_same_bits_as_alone(llm: LLM, speech: NDArray[np.float32]) -> None:
    compare_company(llm, [str(SPEECH), speech[: 3 * 16_000]])


@pytest.mark.slow
def test_many_recordings_in_company_have_the_same_bits_as_alone(llm: LLM, speech: NDArray[np.float32]) -> None:
    compare_company(llm, [speech, speech[: 3 * 16_000], np.concatenate([speech] * 4), str(SPEECH)])
    params = TranscriptionParams(temperature=0.0, word_timestamps=True)
    assert transcribe(llm, [SPEECH, speech[: 3 * 16_000]], params)[0] == transcribe(llm, SPEECH, params)[0]


def compare_company(llm: LLM, many: list[Any]) -> None:
    alone = [transcribe(llm, audio)[0] for audio in many]
    llm.reset_prefix_cache()
    assert transcribe(llm, many) == alone


@pytest.mark.slow
def test_long_recordings_are_windows_in_order(llm: LLM, speech: NDArray[np.float32]) -> None:
    pause = np.zeros(8_000, np.float32)
    [made] = transcribe(llm, np.concatenate([speech, pause] * 5))
    assert made.text.lower().count("morning") >= 4
    starts = [segment.start for segment in made.segments]
    assert starts == sorted(starts)
    assert {segment.seek for segment in made.segments} != {0}
    assert made.segments[-1].end > made.duration - 10


def test_words_have_times(llm: LLM, speech: NDArray[np.float32]) -> None:
    params = TranscriptionParams(temperature=0.0, word_timestamps=True)
    [made] = transcribe(llm, SPEECH, params)
    words = [word for segment in made.segments for word in segment.words or ()]
    for segment in made.segments:
        assert segment.words is not None
        assert "".join(word.word for word in segment.words) == segment.text
    times = [time for word in words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert times[0] >= 0.0
    assert times[-1] <= made.duration
    assert all(0.0 < word.probability <= 1.0 for word in words)
    assert min(segment.words[0].start - segment.start for segment in made.segments if segment.words) > -0.5
    # What comes later in the recording comes later in the words, by as much.
    shift = np.zeros(16_000, np.float32)
    [later] = transcribe(llm, np.concatenate([shift, speech]), params)
    moved = {word.word: word.start for segment in later.segments for word in segment.words or ()}
    shifts = [moved[word.word] - word.start for word in words if word.word in moved and word.word != " the"]
    assert len(shifts) > 5
    assert abs(np.median(shifts) - 1.0) < 0.1


def test_alignment_heads_that_the_model_has_not_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    tokens = llm.front_end.speech.tokens
    monkeypatch.setattr(llm.front_end.speech, "tokens", replace(tokens, alignment_heads=((1, 0), (4, 0))))
    with pytest.raises(InvalidRequestError, match=r"alignment_heads of the model's files has \[4, 0\].* 4 layers of 6"):
        transcribe(llm, SPEECH, TranscriptionParams(word_timestamps=True))
    assert transcribe(llm, SPEECH)[0].text


def test_a_recording_drawn_with_a_seed_is_drawn_again(llm: LLM) -> None:
    params = TranscriptionParams(temperature=1.0, seed=3)
    first, second = (transcribe(llm, SPEECH, params)[0] for _ in range(2))
    assert first == second
    assert first.segments[0].temperature == 1.0


def test_silence_has_no_text(llm: LLM) -> None:
    faint = (1e-5 * np.random.default_rng(0).standard_normal(20 * 16_000)).clip(-3e-5, 3e-5).astype(np.float32)
    assert [made.text for made in transcribe(llm, [np.zeros(20 * 16_000, np.float32), faint])] == ["", ""]
    [made] = transcribe(llm, faint)
    assert made.duration == 20.0


def test_special_tokens_in_a_prompt_are_left_out(llm: LLM) -> None:
    prompts = ("A story about a fox.", "A story<|endoftext|> about<|startoftranscript|> a fox.")
    params = [TranscriptionParams(prompt=prompt, temperature=0.0) for prompt in prompts]
    plain, cut = (transcribe(llm, SPEECH, each)[0] for each in params)
    assert "fox" in plain.text.lower()
    assert cut == plain
    assert plain.prompt_tokens > transcribe(llm, SPEECH)[0].prompt_tokens


@pytest.mark.parametrize("rate", [48_000, pytest.param(8_000, marks=pytest.mark.slow)])
def test_other_rates_and_channels(llm: LLM, speech: NDArray[np.float32], rate: int) -> None:
    other = soxr.resample(speech, 16_000, rate)
    out = io.BytesIO()
    soundfile.write(out, np.repeat(other[:, None], 6, axis=1), rate, format="WAV", subtype="FLOAT")
    [made] = transcribe(llm, out.getvalue())
    assert "morning" in made.text.lower()


def test_one_that_cannot_be_read_fails_alone(llm: LLM, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("These are notes and no recording.\n" * 30)
    ended: dict[int, Any] = {}
    cut = SPEECH.read_bytes()[:20_000]
    made = transcribe(llm, [SPEECH, text, cut, np.zeros(0, np.float32)], on_end=ended.__setitem__)
    assert "fox" in made[0].text
    assert made[0].error is None
    assert "is a text file" in made[1].error
    assert "cut off" in made[2].error
    assert "0 samples" in made[3].error
    assert [ended[i] for i in range(4)] == made
    with pytest.raises(AudioError, match="is a text file"):
        transcribe(llm, text)
    assert not llm.has_unfinished_requests()


def test_limits(llm: LLM) -> None:
    with pytest.raises(AudioError, match="at most 2 s are taken"):
        transcribe(llm, SPEECH, limits=AudioLimits(max_seconds=2))


def test_what_the_model_cannot_do_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot generate text; it can: transcribe recordings|reads sound"):
        llm.generate("Hello", SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"the model is English"):
        transcribe(llm, SPEECH, TranscriptionParams(language="fr"))
    with pytest.raises(InvalidRequestError, match="needs a multilingual model"):
        transcribe(llm, SPEECH, TranscriptionParams(task="translate"))
    with pytest.raises(InvalidRequestError, match="one for each of 1 recordings, not 2"):
        transcribe(llm, SPEECH, [TranscriptionParams()] * 2)


def test_an_interrupt_leaves_nothing_behind(llm: LLM, speech: NDArray[np.float32]) -> None:
    import _thread

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    threading.Timer(0.3, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            transcribe(llm, [np.concatenate([speech] * 20)] * 4)
    signal.signal(signal.SIGINT, before)
    assert not llm.has_unfinished_requests()
    assert llm.stats().num_running == 0
    assert "fox" in transcribe(llm, SPEECH)[0].text


@pytest.mark.slow
def test_answers_are_those_of_transformers(llm: LLM, speech: NDArray[np.float32]) -> None:
    """Token by token, with the weights as they are published and its own extractor and rules."""
    import torch
    from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    from octavo.loader.resolve import resolve_model
    from octavo.loader.weights import read_safetensors

    folder = resolve_model(MODEL)
    model = WhisperForConditionalGeneration(WhisperConfig.from_pretrained(folder)).eval()
    weights = {name: torch.from_numpy(np.array(values)).float() for name, values in read_safetensors(folder)}
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    model.tie_weights()
    config = GenerationConfig.from_pretrained(folder)
    for audio in (speech, speech[8_000:64_000], speech[::-1].copy()):
        features = WhisperFeatureExtractor()(audio, sampling_rate=16_000, return_tensors="pt").input_features
        expected = model.generate(features, generation_config=config, return_timestamps=True, max_new_tokens=200)
        params = TranscriptionParams(temperature=0.0, no_speech_threshold=None)
        [made] = transcribe(llm, audio, params)
        found = [token for segment in made.segments for token in segment.tokens]
        ids = expected[0].tolist()
        assert found == ids[: len(found)]
        assert found


@pytest.mark.slow
def test_two_hours_take_bounded_memory(llm: LLM, speech: NDArray[np.float32], tmp_path: Path) -> None:
    """The file is read in pieces; most of it is silence, so that it does not take an hour."""
    import psutil

    path = tmp_path / "long.flac"
    with soundfile.SoundFile(path, "w", 16_000, 1, format="FLAC") as file:
        for minute in range(120):
            audio = np.zeros(60 * 16_000, np.float32)
            if minute % 20 == 0:
                audio[: len(speech)] = speech
            file.write(audio)
    process = psutil.Process()
    before = process.memory_info().rss
    [made] = transcribe(llm, path, TranscriptionParams(temperature=0.0))
    assert made.duration == 7200.0
    assert made.text.lower().count("lazy dog") >= 5
    assert process.memory_info().rss - before < 200 << 20


# --- in an event loop -------------------------------------------------------------------------------------------------


class SlowAudio(OpenedAudio):
    """Each piece takes until it is let go."""

    seconds = 60.0

    def __init__(self) -> None:
        self.reading, self.go = threading.Event(), threading.Event()
        self.in_use = False
        #: Whether it was in use when it was closed.
        self.closed: bool | None = None

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        while True:
            self.in_use = True
            self.reading.set()
            assert self.go.wait(PATIENCE)
            self.in_use = False
            yield np.zeros(160_000, np.float32)

    def close(self) -> None:
        self.closed = self.in_use


def hear(audio: Any) -> AsyncGenerator[Any]:
    """A transcription whose engine is not asked: nothing is said."""

    def loop(params: TranscriptionParams, scores: bool) -> Any:
        return loops.transcribe(params, KNOWN, CODEC, scores=scores)

    speech: Any = SimpleNamespace(loop=loop, hear=lambda window: None)
    host: Any = SimpleNamespace(in_thread=finish_in_thread)
    return transcribe_recording(speech, host, audio, TranscriptionParams(), RequestOptions(), DEFAULT_LIMITS)


@pytest.mark.parametrize("opens", [False, True])
def test_who_is_cancelled_closes_nothing_that_a_thread_reads(opens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    audio = SlowAudio()
    monkeypatch.setattr(async_transcription, "open_audio", lambda *_: audio)

    async def cancel() -> None:
        task = asyncio.create_task(anext(hear("a path" if opens else audio)))
        assert await asyncio.to_thread(audio.reading.wait, PATIENCE)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        assert audio.closed is None
        audio.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert not audio.in_use
    assert audio.closed is (False if opens else None)  # whoever opens it closes it


def test_a_recording_that_is_opened_too_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    audio, opening = SlowAudio(), threading.Event()

    def open_slowly(*_: Any) -> SlowAudio:
        opening.set()
        assert audio.go.wait(PATIENCE)
        return audio

    monkeypatch.setattr(async_transcription, "open_audio", open_slowly)

    async def cancel() -> None:
        task = asyncio.create_task(anext(hear("a path")))
        assert await asyncio.to_thread(opening.wait, PATIENCE)
        task.cancel()
        audio.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert audio.closed is False
