"""``octavo bench calibrate``: prints the fit of a step profile, or writes the profile."""

from __future__ import annotations

from typing import IO

import msgspec

from octavo.cli.flags import read_engine_config
from octavo.cli.parsing import Arguments
from octavo.core.errors import ConfigError


def run(arguments: Arguments, model: str | None, stream: IO[str] | None) -> None:
    """Measures steps of a model on this machine; the profile as JSON goes to ``stream``, if there is one."""
    from octavo.cli.info import cpu_name, usable_cores
    from octavo.engine.llm import LLM
    from octavo.kernels import gpu_name, resolve_device
    from octavo.lab.bench.calibrate import calibrate, least_squares
    from octavo.lab.bench.calibrate_disk import calibrate_disk
    from octavo.lab.bench.calibrate_server import calibrate_server
    from octavo.lab.simulate.step_profile import format_profile

    least_squares()  # refused before the measurement
    options = read_engine_config(arguments, model)
    if options.kv_store is not None:
        raise ConfigError("octavo bench calibrate measures no shared store: leave kv_store out")
    folder = options.kv_disk  # measured alone: steps must not fetch what earlier ones have stored
    kept = {name: value for name, value in options.model_dump(exclude_unset=True).items() if name != "kv_disk"}
    options = type(options)(**kept)
    device = f"{options.num_threads or usable_cores()} threads of {cpu_name()}"
    if resolve_device(options.device) != "cpu":
        device = gpu_name()
    profile, _ = calibrate(LLM(**kept), device, rounds=arguments.rounds, seed=options.seed)
    if folder is not None:
        block_bytes = options.block_size * profile.kv_bytes_per_token
        disk = calibrate_disk(folder, block_bytes, rounds=arguments.rounds)
        profile = msgspec.structs.replace(profile, disk=disk)
    if arguments.with_server:
        profile = calibrate_server(profile, options)
    if stream is not None:
        stream.write(format_profile(profile).decode())
        return
    print(f"{profile.model} on {profile.device}: relative error of the fit")
    print("steps        count    median       p90     worst  total seconds")
    for kind, e in profile.errors.items():
        print(f"{kind:10} {e.steps:7} {e.median:9.1%} {e.p90:9.1%} {e.worst:9.1%}  {e.total - 1:+13.1%}")
    print("tokens of a step   ms of its matrix products")
    for tokens, seconds in profile.products:
        print(f"{tokens:16.0f}  {seconds * 1e3:10.3f}")
    for name in ("sampled", "context", "pairs", "chunk", "moved"):
        print(f"{name:16}  {getattr(profile, name) * 1e6:10.4f} us each")
    if folder is not None:
        print(f"{'disk: call':16}  {profile.disk.call * 1e6:10.4f} us each")
        for name in ("read", "write"):
            print(f"{f'disk: {name}':16}  {getattr(profile.disk, name) * 1e9:10.4f} ns each byte")
    if arguments.with_server:
        for name, seconds in msgspec.structs.asdict(profile.server).items():
            print(f"server: {name:8}  {seconds * 1e6:10.4f} us each")
