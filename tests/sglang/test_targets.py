"""The check of SGLang's version, signatures and applied hooks; each part of it can fail."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
import sglang
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry

from hisparse_sgl.integrations.sglang import hooks, targets
from hisparse_sgl.integrations.sglang.signatures import SIGNATURES

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("plugin")


def test_the_installed_sglang_fits() -> None:
    targets.check()
    targets.check_applied()


def test_every_hooked_method_has_a_signature() -> None:
    for hook in (hooks.GATE, *hooks.HOOKS):
        home, name = hook.target.rsplit(".", 1)
        assert hook.target in SIGNATURES or name in SIGNATURES[home], hook.target


def test_originals_are_looked_at_not_our_classes() -> None:
    """After the replacement the paths lead to our classes, whose parameters are not SGLang's."""
    for hook in hooks.HOOKS:
        if hook.kind == "replace":
            assert targets._originals[hook.target].__module__ == hook.target.rsplit(".", 1)[0]


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def evict(self: object, params: object, urgent: bool = False) -> None: ...

    monkeypatch.setattr(UnifiedRadixCache, "evict", evict)
    with pytest.raises(SystemExit) as caught:
        targets.check()
    message = str(caught.value)
    assert "UnifiedRadixCache.evict: expected (self, params), found (self, params, urgent=False)" in message
    assert message.count("expected") == 1
    assert targets.SUPPORTED in message and "HISPARSE_SGL=0" in message


def test_a_missing_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(UnifiedRadixCache, "checkpoint_into_tree")
    with pytest.raises(SystemExit, match=r"checkpoint_into_tree: expected \(self, req, .*\), found nothing"):
        targets.check()


def test_a_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIGNATURES, "sglang.srt.no_such_module", {"f": "self"})
    with pytest.raises(SystemExit, match=r"no_such_module\.f: expected it to exist"):
        targets.check()


@pytest.mark.parametrize("version", ["0.5.21", "0.5.22rc1", "0.5.24", "0.5.24rc1", "0.6.0", "0.0.0.dev0"])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(sglang, "__version__", version)
    with pytest.raises(SystemExit, match=rf"expected {re.escape(targets.SUPPORTED)}, found {version}"):
        targets.check()


def test_in_another_version_only_the_gate_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "__version__", "0.6.0")
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    hooks.register()
    assert list(HookRegistry._hooks) == [hooks.GATE.target]


@pytest.mark.parametrize("version", ["0.5.22", "0.5.22.post1", "0.5.23", "0.5.23.post2"])
def test_supported_versions_pass(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(sglang, "__version__", version)
    targets.check()


def test_the_range_is_that_of_the_package() -> None:
    assert f'"sglang{targets.SUPPORTED}"]' in (ROOT / "pyproject.toml").read_text()


def test_a_hook_that_was_not_applied_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    target = hooks.HOOKS[3].target
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    with pytest.raises(SystemExit, match=re.escape(target)):
        targets.check_applied()


def test_a_class_that_another_plugin_took_over_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import hisparse_coordinator

    monkeypatch.setattr(hisparse_coordinator, "HiSparseCoordinator", object)
    with pytest.raises(SystemExit, match="HiSparseCoordinator"):
        targets.check_applied()


def test_a_process_that_never_registered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_hooks", {})
    with pytest.raises(SystemExit, match="register"):
        targets.check_applied()
