"""Checks what the workers' cards say: who serves a model, whether each pair can hand over, and on which device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from engines.catalogue import BY_NAME
from infra.settings import MachineSettings, ModelSettings, Settings
from kvasir.findings import Finding, error, ok, warn
from messages.cards import WorkerCard

_GPU_PLATFORMS = {"linux-cuda": "cuda", "macos": "metal"}
_OBSERVED = "observed-"  # a tokenizer known only by what it makes of a sample


def check_workers(settings: Settings, cards: Sequence[WorkerCard]) -> Iterator[Finding]:
    """One model after another, then each worker's device."""
    for model in settings.models.values():
        yield from _check_model(settings, model, [card for card in cards if card.model == model.name])
    for card in cards:
        yield from _check_device(settings, card)
        if card.model not in settings.models:
            yield warn(
                card.model,
                f"{_called(card)} serves a model that this configuration does not have",
                f'add [models."{card.model}"], or stop the worker',
            )


def _check_model(settings: Settings, model: ModelSettings, cards: Sequence[WorkerCard]) -> Iterator[Finding]:
    prefills = [card for card in cards if card.role == "prefill"]
    decodes = [card for card in cards if card.role == "decode"]
    if not prefills or not decodes:
        yield _unserved(settings, model, bool(prefills), bool(decodes))
    for prefill, decode in _different(product(prefills, decodes)):
        yield _check_pair(model, prefill, decode)
        if decode.context < prefill.context:
            yield warn(
                model.name,
                f"prefill takes prompts of {prefill.context:,} tokens, and {_called(decode)} {decode.context:,}",
                "start both with the same --context",
            )


def _unserved(settings: Settings, model: ModelSettings, prefill: bool, decode: bool) -> Finding:
    absent = [role for role, there in (("prefill", prefill), ("decode", decode)) if not there]
    todo = " and ".join(f"kvasir {role}-worker --model {model.name}" for role in absent)
    grades = model.name in (settings.grading.code_model, settings.grading.feedback_model)
    level = error if grades or prefill or decode else warn
    return level(model.name, f"no {' and no '.join(absent)} worker serves it: its jobs wait for ever", f"start {todo}")


def _different(pairs: Iterator[tuple[WorkerCard, WorkerCard]]) -> Iterator[tuple[WorkerCard, WorkerCard]]:
    """One pair of each kind: ten equal decode workers are one finding."""
    seen = set()
    for prefill, decode in pairs:
        kind = tuple((c.engine, c.fingerprint, c.tokenizer, c.context, c.hands_over) for c in (prefill, decode))
        if kind not in seen:
            seen.add(kind)
            yield prefill, decode


def _check_pair(model: ModelSettings, prefill: WorkerCard, decode: WorkerCard) -> Finding:
    pair = f"{prefill.engine} to {decode.engine}"
    for card in (prefill, decode):
        if not card.hands_over or not card.fingerprint:
            return _check_without_hand_over(model, pair, card)
    if _tokenizers_differ(prefill, decode):
        return error(
            model.name,
            f"{pair}: different tokenizers ({prefill.tokenizer:.12} and {decode.tokenizer:.12}): the decoder "
            "would read other words than were sent",
            "give both workers conversions of one model",
        )
    if _shape(prefill) and _shape(decode) and _shape(prefill) != _shape(decode):
        return error(
            model.name,
            f"{pair}: KV caches of different shapes ({_shape(prefill)}; and {_shape(decode)}): they are not "
            "conversions of the same weights; every prompt is computed twice",
            _mend_shapes(model, prefill, decode),
        )
    if prefill.fingerprint == decode.fingerprint:
        because = ", because same_weights says that it may" if prefill.engine != decode.engine else ""
        return ok(model.name, f"{pair}: hands its KV cache over{because} (family {prefill.fingerprint:.12})")
    if {prefill.engine, decode.engine} <= set(model.same_weights) and prefill.engine != decode.engine:
        return _check_family(model, pair, prefill, decode)
    return error(
        model.name,
        f"{pair}: other weights or shapes (KV families {prefill.fingerprint:.12} and {decode.fingerprint:.12}); every "
        "prompt is computed twice",
        _mend_families(model, prefill, decode),
    )


def _check_family(model: ModelSettings, pair: str, prefill: WorkerCard, decode: WorkerCard) -> Finding:
    """Both engines are in same_weights, and go by different names: one of them was started without it."""
    return error(
        model.name,
        f"{pair}: same_weights says that they may share KV caches, but they go by different families "
        f"({prefill.fingerprint:.12} and {decode.fingerprint:.12}); every prompt is computed twice",
        "start both workers again with this configuration",
    )


def _shape(card: WorkerCard) -> str:
    """Layers, heads and windows of its KV cache, without the dtype; "" where an older worker doesn't say."""
    return card.layout.partition(";")[0]


def _mend_shapes(model: ModelSettings, prefill: WorkerCard, decode: WorkerCard) -> str:
    if {prefill.engine, decode.engine} <= set(model.same_weights):
        return f'take them out of same_weights in [models."{model.name}"], or give both conversions of one model'
    return "give both workers the same model, or serve one of them under another model name"


def _mend_families(model: ModelSettings, prefill: WorkerCard, decode: WorkerCard) -> str:
    if prefill.engine == decode.engine:
        return "give both workers the same file, or serve one of them under another model name"
    engines = ", ".join(f'"{name}"' for name in sorted({prefill.engine, decode.engine}))
    return f'if they are conversions of the same weights, say so: same_weights = [{engines}] in [models."{model.name}"]'


def _tokenizers_differ(prefill: WorkerCard, decode: WorkerCard) -> bool:
    known = [t for t in (prefill.tokenizer, decode.tokenizer) if t and not t.startswith(_OBSERVED)]
    return len(known) == 2 and known[0] != known[1]


def _check_without_hand_over(model: ModelSettings, pair: str, card: WorkerCard) -> Finding:
    why = card.notes or f"{card.engine} has no KV cache to hand over"
    what = f"{pair}: no hand-over, the decoder does every prompt: {why}"
    entry = BY_NAME.get(card.engine)
    if entry and entry.capabilities.exports_kv:
        return warn(model.name, what, "see that worker's log; `kvasir engines` says what it can do at its best")
    others = sorted(name for name in model.weights if (e := BY_NAME.get(name)) and e.capabilities.exports_kv)
    todo = f"--engine {others[0]} at both ends would hand over" if others else _engine_that_would(card)
    return warn(model.name, what, todo)


def _engine_that_would(card: WorkerCard) -> str:
    if card.engine == "ollama":
        return (
            f"--engine llamacpp --weights ollama:{card.model} at both ends would hand over, if that is its name there"
        )
    return "choose an engine that hands over: kvasir engines"


def _check_device(settings: Settings, card: WorkerCard) -> Iterator[Finding]:
    for machine in _machines_of(settings, card):
        expected = _GPU_PLATFORMS.get(machine.platform, "")
        if expected and card.device == "cpu":
            yield error(
                card.model,
                f"{_called(card)} computes on the CPU of {machine.name}, which has a GPU ({machine.platform})",
                _mend_device(card, expected),
            )
            return


def _mend_device(card: WorkerCard, expected: str) -> str:
    if card.engine == "llamacpp":
        return f"put a {expected.upper()} build of llama-server on its PATH, and --weights llama-server:FILE.gguf"
    return f"install the {expected.upper()} build of what {card.engine} runs on there"


def _machines_of(settings: Settings, card: WorkerCard) -> list[MachineSettings]:
    """The machine whose name or host the card names; else one that is configured for just this, if all such have a
    GPU: an address in the configuration says nothing of the host's own name."""
    machines = list(settings.machines.values())
    host = _short(card.host)
    named = [machine for machine in machines if host in (_short(machine.name), _short(machine.host))]
    if named:
        return named
    fitting = [machine for machine in machines if _runs(machine, card)]
    return fitting if all(machine.platform in _GPU_PLATFORMS for machine in fitting) else []


def _runs(machine: MachineSettings, card: WorkerCard) -> bool:
    return any((role.role, role.model) == (card.role, card.model) for role in machine.roles)


def _short(host: str) -> str:
    """`Spark1.local` as `spark1`; an address stays whole."""
    return host.lower() if host.replace(".", "").isdigit() else host.lower().partition(".")[0]


def _called(card: WorkerCard) -> str:
    return f"{card.role} worker {card.worker_id} ({card.engine})"
