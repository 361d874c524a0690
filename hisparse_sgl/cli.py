"""The command line: ``hisparse-sgl plan``, ``config`` and ``replay``.

Exit codes: 0 as wanted, 1 a finding, 2 bad input. Bad input is one line with place and fix.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

COMMANDS = {
    "plan": "hisparse_sgl.capacity.command",
    "config": "hisparse_sgl.capacity.command",
    "replay": "hisparse_sgl.replay.command",
}
EXTRA = ("typer", "rich")
HELP = """What a host-backed KV cache will hold and gain, before a GPU is rented.

Exit codes: 0 as wanted, 1 a finding, 2 bad input."""
BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. ``ValueError`` from a command is bad input."""
    for name in EXTRA:
        try:
            import_module(name)
        except ModuleNotFoundError:
            return refuse(f"{name} is missing: pip install {name}, or '.[tools]' in the checkout")
    import typer

    command = typer.main.get_command(build_app())
    try:
        code = command.main(list(arguments) or ["--help"], prog_name="hisparse-sgl", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except typer.Abort:
        return refuse("interrupted")
    except ValueError as error:
        return refuse(str(error))
    except BrokenPipeError:  # whoever read standard output has left; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        place = error.filename or "standard output"
        return refuse(f"{place}: {error.strerror}; give a place that can be written")
    except Exception as error:
        # Not a class of typer: its releases up to 0.15 raise those of click, later ones their own copy.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return refuse(message())
    return code if isinstance(code, int) else 0


def build_app() -> Any:
    """The typer application. A command's module is read here, so that importing this one needs no extra."""
    import typer

    app = typer.Typer(help=HELP, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    for name, module in COMMANDS.items():
        found: Callable[..., object] = getattr(import_module(module), name)
        app.command(name)(found)
    return app


def refuse(message: str) -> int:
    """Print one line on standard error and return the exit code of bad input."""
    print("hisparse-sgl: error: " + " ".join(message.split()), file=sys.stderr)
    return BAD_INPUT


if __name__ == "__main__":
    main()
