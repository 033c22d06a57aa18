"""The command line of `llama-server`, on the server inside xllamacpp: the real HTTP, in a process of its own.

`install(folder)` puts an executable of that name into a folder for PATH. Only the options that Kvasir and benchmarks
give are known; another one ends it with an error, as the real program does.
"""

import argparse
import signal
import sys
from pathlib import Path
from typing import Any


def install(folder: Path) -> Path:
    """Write the program; its path."""
    program = folder / "llama-server"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" "$@"\n')
    program.chmod(0o755)
    return program


def parser() -> argparse.ArgumentParser:
    """Its options, as a release of 2026 has them."""
    argument_parser = argparse.ArgumentParser("llama-server", allow_abbrev=False)
    argument_parser.add_argument("--list-devices", action="store_true")
    for name in ("--model", "--slot-save-path"):
        argument_parser.add_argument(name)
    argument_parser.add_argument("--host", help="an address, or a Unix socket if it ends with .sock")
    for name in ("--port", "--ctx-size", "--parallel", "--threads", "--cache-ram"):
        argument_parser.add_argument(name, type=int)
    argument_parser.add_argument("--flash-attn", choices=("on", "off", "auto"), metavar="[on|off|auto]")
    for name in ("--no-kv-unified", "--swa-full", "--no-warmup", "--no-webui"):
        argument_parser.add_argument(name, action="store_true")
    argument_parser.add_argument("--fit", choices=("on", "off"))
    return argument_parser


def main() -> None:
    """Serve until SIGTERM."""
    options = parser().parse_args()
    if options.list_devices:
        sys.stdout.write("Available devices:\n")
        return
    import xllamacpp

    server = xllamacpp.Server(_parameters(xllamacpp, options))
    sys.stdout.write(f"server is listening on {server.listening_address}\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


def _parameters(xllamacpp: Any, options: argparse.Namespace) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.hostnames = [options.host]
    if options.port:
        params.port = options.port
    params.n_ctx, params.n_parallel = options.ctx_size, options.parallel
    params.slot_save_path, params.endpoint_slots = options.slot_save_path, True
    params.kv_unified, params.swa_full = not options.no_kv_unified, options.swa_full
    params.cache_ram_mib = options.cache_ram
    params.ui, params.warmup, params.verbosity = not options.no_webui, not options.no_warmup, -1
    kind = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = {"on": kind.LLAMA_FLASH_ATTN_TYPE_ENABLED, "off": kind.LLAMA_FLASH_ATTN_TYPE_DISABLED}[
        options.flash_attn
    ]
    if options.threads:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    return params


if __name__ == "__main__":
    main()
