"""``octavo transcribe``: texts and subtitles of recordings."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.flags import add_engine_flags, add_verbose_flag, apply_verbosity, read_engine_config
from octavo.cli.inputs import for_output
from octavo.cli.parsing import EXIT_FAILED, Arguments, Parser, add_json_flag, errors_of_the_call, write_json
from octavo.config.sources import configured_model
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.speech.segments import Transcription
    from octavo.speech.transcription import TranscriptionParams

DEFAULT_MODEL = "whisper-tiny.en"
#: ``--format`` -> file extension.
ENDINGS = {"text": "txt", "srt": "srt", "vtt": "vtt", "json": "json", "verbose_json": "json"}

EXAMPLE = """\
examples:
  octavo transcribe talk.mp3
  octavo transcribe talk.mp3 --format srt > talk.srt
  octavo transcribe *.wav --format vtt --output-dir subtitles
  octavo transcribe talk.mp3 --format verbose_json --word-timestamps
  octavo transcribe interview.flac --model ./whisper-small --language de --hotwords "Octavo, Whisper"

Files are wav, flac, ogg or mp3 of any length and usual rate, of up to 64 channels. Several are computed together, and
each text is written as soon as it is complete. If a file cannot be read, the exit code is 1. Without --model,
OCTAVO_MODEL or a configuration file the model is whisper-tiny.en, which is for English.
"""


def make_parser() -> Parser:
    parser = Parser(
        prog="octavo transcribe",
        usage="octavo transcribe [options] FILE ...",
        description="Writes what is said in recordings.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--format", choices=ENDINGS, default="text", help="what to write (default: text)")
    parser.add_argument("--output-dir", type=Path, metavar="FOLDER", help="write a file for each recording into it")
    parser.add_argument("--language", metavar="CODE", help="language that is spoken (default: it is detected)")
    parser.add_argument("--task", metavar="TASK", default="transcribe", help="transcribe, or translate (to English)")
    parser.add_argument("--prompt", metavar="TEXT", help="text before the recording: its style, how names are written")
    parser.add_argument("--hotwords", metavar="TEXT", help="words that may occur")
    parser.add_argument("--temperature", type=float, metavar="X", help="one alone (default: 0, and more on doubt)")
    parser.add_argument("--seed", dest="speech_seed", type=int, default=0, metavar="N", help="of temperatures above 0")
    parser.add_argument("--word-timestamps", action="store_true", help="times of words, in verbose_json")
    parser.add_argument("--max-seconds", type=float, metavar="X", help="refuse recordings that last longer")
    add_json_flag(parser)
    add_verbose_flag(parser)
    add_engine_flags(parser, renamed={"seed": "--engine-seed", "task": "--engine-task"})
    return parser


def run(arguments: Arguments) -> int:
    apply_verbosity(arguments)
    paths = [Path(word) for word in arguments.words]
    targets = _targets(paths, arguments.output_dir, ENDINGS[arguments.format], arguments.format)
    named = arguments.model or (None if configured_model(arguments.config) else DEFAULT_MODEL)
    config = read_engine_config(arguments, named)
    params = _params(arguments)
    from octavo.speech.audio_files import AudioLimits, import_soundfile

    import_soundfile()  # fails before a model is downloaded
    failed = 0
    jobs = []
    for path, target in zip(paths, targets, strict=True):
        try:
            path.open("rb").close()
        except OSError as e:
            print(f"octavo: error: {path} cannot be read: {e.strerror}", file=sys.stderr)
            failed += 1
        else:
            jobs.append((path, target))
    if not jobs:
        return EXIT_FAILED
    if (folder := arguments.output_dir) is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"--output-dir {folder} cannot be made: {e.strerror}") from None
    from octavo.core.request import DEFAULT_OPTIONS
    from octavo.engine.llm import TranscriptionBatch
    from octavo.engine.llm_engine import LLMEngine
    from octavo.engine.model_files import find_files
    from octavo.engine.transcription import check_hears
    from octavo.speech.transcription import FORMATS

    start = time.monotonic()
    files = find_files(config)
    with errors_of_the_call():
        check_hears(files.model_config, config.model)
    limits = AudioLimits() if arguments.max_seconds is None else AudioLimits(max_seconds=arguments.max_seconds)
    engine = LLMEngine(files)
    loaded, start = time.monotonic() - start, time.monotonic()

    def write(number: int, made: Transcription) -> None:
        nonlocal failed
        if made.error is not None:
            failed += 1
            print(f"octavo: error: {made.error}", file=sys.stderr)
            return
        text, (path, target) = FORMATS[arguments.format](made), jobs[number]
        if target is not None:
            target.write_text(text, encoding="utf-8")
        else:
            print(for_output(f"{path}: {text}" if len(paths) > 1 else text), end="", flush=True)

    shows_bar = sys.stderr.isatty() and (arguments.output_dir is not None or not sys.stdout.isatty())
    sources, options = [path for path, _ in jobs], [DEFAULT_OPTIONS] * len(jobs)
    made = TranscriptionBatch(engine, sources, [params] * len(jobs), options, limits, write).run(shows_bar)
    seconds, audio = time.monotonic() - start, sum(each.duration for each in made)
    if arguments.json is not None:
        figures = {"recordings": len(paths), "failed": failed, "audio_seconds": audio}
        write_json(arguments.json, {**figures, "seconds": seconds, "load_seconds": loaded})
    print(
        f"octavo: {audio:.0f} s of audio in {seconds:.2f} s: {audio / seconds:.1f} times as fast as it is spoken "
        f"(loaded in {loaded:.2f} s)",
        file=sys.stderr,
    )
    return EXIT_FAILED if failed else 0


def _params(arguments: Arguments) -> TranscriptionParams:
    from octavo.speech.transcription import TranscriptionParams

    if arguments.word_timestamps and arguments.format != "verbose_json":
        raise ConfigError(f"--word-timestamps needs --format verbose_json: {arguments.format} has no times of words")
    names = ("language", "task", "prompt", "hotwords", "temperature", "word_timestamps")
    with errors_of_the_call():
        return TranscriptionParams(**{name: getattr(arguments, name) for name in names}, seed=arguments.speech_seed)


def _targets(paths: list[Path], folder: Path | None, ending: str, output_format: str) -> list[Path | None]:
    """The file to write for each recording; None: standard output."""
    if not paths:
        raise ConfigError("no recording given: octavo transcribe FILE ...")
    if folder is None:
        if len(paths) > 1 and output_format != "text":
            raise ConfigError(f"--format {output_format} of {len(paths)} recordings needs --output-dir FOLDER")
        return [None] * len(paths)
    targets = [folder / f"{path.stem}.{ending}" for path in paths]
    for first, second in itertools.pairwise(sorted(targets)):
        if first == second:
            raise ConfigError(f"two recordings would be written to {first}: transcribe them apart")
    return list(targets)
