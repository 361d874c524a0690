"""Whether the installed SGLang is one that the plugin was written for.

SGLang swallows every ``Exception`` of a plugin and serves on without it, so a mismatch raises ``SystemExit``.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

from hisparse_sgl.integrations.sglang.signatures import SIGNATURES, Expected

SUPPORTED = ">=0.5.22,<0.5.24"

# Dicts, because SGLang rewrites plain module globals that hold what it replaces.
_originals: dict[str, type] = {}
_hooks: dict[str, Callable[..., Any]] = {}
_failures: list[str] = []


def expect(target: str, hook: Callable[..., Any]) -> None:
    """Note that ``hook`` is registered on ``target``; of a class, keep what SGLang has there now."""
    _hooks[target] = hook
    if isinstance(hook, type) and target not in _originals:
        _originals[target] = pkgutil.resolve_name(target)


def note_failure(reason: str) -> None:
    """Note why the plugin could not register; ``check`` reports it."""
    _failures.append(reason)


def check() -> None:
    """Raise ``SystemExit`` unless SGLang's version is supported and has all of ``SIGNATURES`` as written."""
    wrong = wrong_version() or [*_failures, *_mismatches()]
    if wrong:
        _refuse(wrong)


def check_applied() -> None:
    """Raise ``SystemExit`` unless SGLang has applied every hook of the plugin in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    wrong = [] if _hooks else ["register: expected to run in this process, found that it did not"]
    for target, hook in _hooks.items():
        registered = [entry[1] for entry in HookRegistry._hooks.get(target, ())]
        applied = target in HookRegistry._patched and hook in registered
        if applied and isinstance(hook, type):
            applied = issubclass(pkgutil.resolve_name(target), hook)
        if not applied:
            wrong.append(f"{target}: expected our hook, found that SGLang did not apply it (see its log)")
    if wrong:
        _refuse(wrong)


def parameters(function: Callable[..., Any]) -> str:
    """Parameters of a function as in ``SIGNATURES``: names, kinds and defaults."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))[1:-1]


def wrong_version() -> list[str]:
    """What stands against the version of the installed SGLang; empty if nothing."""
    from packaging.specifiers import SpecifierSet
    from sglang import __version__

    if SpecifierSet(SUPPORTED).contains(__version__, prereleases=True):
        return []
    return [f"version: expected {SUPPORTED}, found {__version__}"]


def _mismatches() -> Iterator[str]:
    for home, functions in SIGNATURES.items():
        for name, expected in functions.items():
            wrong = _mismatch(home, name, expected)
            if wrong:
                yield f"{home}.{name}: {wrong}"


def _mismatch(home: str, name: str, expected: Expected) -> str | None:
    choices = expected if isinstance(expected, tuple) else (expected,)
    try:
        owner = _originals[home] if home in _originals else pkgutil.resolve_name(home)
    except (ImportError, AttributeError) as error:
        return f"expected it to exist, found {error}"
    function = getattr(owner, name, None)
    found = None if function is None else parameters(function)
    if found in choices:
        return None
    wanted = " or ".join(f"({choice})" for choice in choices if choice is not None)
    return f"expected {wanted}, found {'nothing' if found is None else f'({found})'}"


def _refuse(wrong: list[str]) -> None:
    from sglang import __version__

    listed = "\n".join(f"  {line}" for line in wrong)
    raise SystemExit(
        f"hisparse_sgl does not work with this SGLang {__version__}:\n{listed}\n"
        f"It works with sglang{SUPPORTED}: install one of these, for example pip install 'sglang==0.5.23', "
        "or set HISPARSE_SGL=0 to serve without the plugin."
    )
