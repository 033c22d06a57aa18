"""Checks the workers' registrations: who serves a model, whether each pair can transfer KV, and on which device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from engines.entry import MEND_DEVICE, MEND_TRANSFER
from engines.registry import entries
from engines.sketch import SketchAgreement, compare, read_sketch
from engines.worker_info import MEND_ROPE, different_rope, different_template, ignored_window
from infra.config.next_command import next_command
from infra.config.settings import MachineSettings, ModelSettings, Settings
from kvasir.doctor.findings import Finding, error, ok, warn
from kvasir.doctor.services import link_finding
from messages.errors import KVTransferFailed
from messages.workers import WorkerInfo, layout_token_bytes

_GPU_PLATFORMS = {"linux-cuda": "cuda", "macos": "metal"}
_MEND_SKETCH = "give both workers conversions of one model and one configuration, or run one engine at both ends"
# An example class, used to express the cost of a refused KV transfer.
_CLASS, _CLASS_PROMPT_TOKENS = 100, 4000
_OBSERVED_PREFIX = "observed-"  # a tokenizer's identity begins with this if it is a hash of the tokens of a sample text


Fetch = Callable[[str], bytes | None]


def check_workers(
    settings: Settings, registrations: Sequence[WorkerInfo], fetch: Fetch = lambda _: None
) -> Iterator[Finding]:
    """Check each model in turn, then each worker's device. `fetch` returns a sketch by its name."""
    for model in settings.models.values():
        yield from _check_model(
            settings, model, [registration for registration in registrations if registration.model == model.name], fetch
        )
    yield from check_links(registrations)
    for registration in registrations:
        yield from _check_device(settings, registration)
        if registration.model not in settings.models:
            yield warn(
                registration.model,
                f"{_describe(registration)} serves a model that this configuration does not have",
                f'add [models."{registration.model}"], or stop the worker',
            )


def check_links(registrations: Sequence[WorkerInfo]) -> Iterator[Finding]:
    """What each machine has measured of its links, and what each means for a class that it decodes, or only prefills.

    The size is an upper bound: sliding windows make it less.
    """
    decoders_last = sorted(registrations, key=lambda registration: registration.role == "decode")
    by_link = {(each.host, link): each for each in decoders_last for link in each.details.links}
    yield from (
        link_finding(
            host,
            link,
            link.parallel_mb_per_s if worker.role == "decode" else link.put_mb_per_s,
            _CLASS * _CLASS_PROMPT_TOKENS * layout_token_bytes(worker.layout) / 1e6,
            f"the KV of a class of {_CLASS} with prompts of {_CLASS_PROMPT_TOKENS:,} tokens",
        )
        for (host, link), worker in by_link.items()
    )


def _check_model(
    settings: Settings, model: ModelSettings, registrations: Sequence[WorkerInfo], fetch: Fetch
) -> Iterator[Finding]:
    prefills = [registration for registration in registrations if registration.role == "prefill"]
    decodes = [registration for registration in registrations if registration.role == "decode"]
    if not prefills or not decodes:
        yield _missing_stage_finding(settings, model, bool(prefills), bool(decodes))
    for prefill, decode in _distinct_pairs(product(prefills, decodes)):
        finding = _check_pair(model, prefill, decode, fetch)
        finding = replace(finding, what=finding.what + _different_builds(prefill, decode))
        yield finding if finding.level == "ok" else _with_cost(model, finding, prefill, decode)
        if decode.context < prefill.context:
            yield warn(
                model.name,
                f"prefill takes prompts of {prefill.context:,} tokens, and {_describe(decode)} {decode.context:,}",
                "start both with the same --context",
            )
        if templates := different_template(prefill, decode):
            yield warn(model.name, templates, "give both the same template: a folder's, or that in the GGUF file")


def _missing_stage_finding(settings: Settings, model: ModelSettings, prefill: bool, decode: bool) -> Finding:
    absent = [stage for stage, is_served in (("prefill", prefill), ("decode", decode)) if not is_served]
    todo = " and ".join(next_command(f"{stage}-worker", "--model", model.name) for stage in absent)
    grades = model.name in (settings.grading.code_model, settings.grading.feedback_model)
    level = error if grades or prefill or decode else warn
    return level(model.name, f"no {' and no '.join(absent)} worker serves it: its jobs wait for ever", f"start {todo}")


def _distinct_pairs(pairs: Iterator[tuple[WorkerInfo, WorkerInfo]]) -> Iterator[tuple[WorkerInfo, WorkerInfo]]:
    """Yield one pair of each kind, so that ten equal decode workers give one finding."""
    seen_kinds = set()
    for prefill, decode in pairs:
        kind = tuple(
            (
                *(c.engine, _build(c), c.details.template, c.fingerprint, c.tokenizer),
                *(c.context, c.transfers_kv, c.sketch, c.refuses),
            )
            for c in (prefill, decode)
        )
        if kind not in seen_kinds:
            seen_kinds.add(kind)
            yield prefill, decode


def _different_builds(prefill: WorkerInfo, decode: WorkerInfo) -> str:
    """Return the end of a sentence that names both builds, if the workers have different builds of one engine.

    It is "" if the builds are equal, or if one is unknown.
    """
    builds = _build(prefill), _build(decode)
    if prefill.engine != decode.engine or builds[0] == builds[1] or not all(builds):
        return ""
    return f"; of different builds ({builds[0]}; and {builds[1]})"


def _build(registration: WorkerInfo) -> str:
    """Return the engine's build, and the version of its slot files if it has any; "" if an older worker doesn't say."""
    details = registration.details
    return details.engine_build + (f", slot files {details.slot_file_version}" if details.slot_file_version else "")


def _check_pair(model: ModelSettings, prefill: WorkerInfo, decode: WorkerInfo, fetch: Fetch) -> Finding:
    pair = f"{prefill.engine} to {decode.engine}"
    for registration in (prefill, decode):
        if not registration.transfers_kv or not registration.fingerprint:
            return _check_without_kv_transfer(model, pair, registration)
    if _tokenizers_differ(prefill, decode):
        return error(
            model.name,
            f"{pair}: different tokenizers ({prefill.tokenizer:.12} and {decode.tokenizer:.12}): the decoder "
            "would read other words than were sent",
            "give both workers conversions of one model",
        )
    if _shape(prefill) and _shape(decode) and _shape(prefill) != _shape(decode):
        window_problem = ignored_window((prefill.engine, prefill.layout), (decode.engine, decode.layout))
        return error(
            model.name,
            f"{pair}: KV caches of different shapes ({_shape(prefill)}; and {_shape(decode)}): "
            f"{window_problem or 'they are not conversions of the same weights'}; every prompt is computed twice",
            _mend_shapes(model, prefill, decode),
        )
    if prefill.fingerprint == decode.fingerprint and (prefill.sketch or decode.sketch):
        return _check_agreement(model, pair, prefill, _agreement(prefill, decode, fetch))
    if prefill.fingerprint == decode.fingerprint:
        because = ", because same_weights says that it may" if prefill.engine != decode.engine else ""
        return ok(model.name, f"{pair}: hands its KV cache over{because} (family {prefill.fingerprint:.12})")
    if {prefill.engine, decode.engine} <= set(model.same_weights) and prefill.engine != decode.engine:
        # The two workers have different RoPE settings, or one worker was started without such settings.
        if rope := different_rope((prefill.engine, prefill.layout), (decode.engine, decode.layout)):
            return error(model.name, f"{pair}: {rope}; every prompt is computed twice", MEND_ROPE)
        return error(
            model.name,
            f"{pair}: same_weights says that they may share KV caches, but they go by different families "
            f"({prefill.fingerprint:.12} and {decode.fingerprint:.12}); every prompt is computed twice",
            "start both workers again with this configuration",
        )
    return error(
        model.name,
        f"{pair}: other weights or shapes (KV families {prefill.fingerprint:.12} and {decode.fingerprint:.12}); every "
        "prompt is computed twice",
        _mend_families(model, prefill, decode),
    )


def _with_cost(model: ModelSettings, finding: Finding, prefill: WorkerInfo, decode: WorkerInfo) -> Finding:
    """Add what the refused pair costs a class.

    If possible, also suggest that the prefill worker loads the decode worker's weights instead.
    """
    tokens = _CLASS * _CLASS_PROMPT_TOKENS
    cost = (
        f"; of a class of {_CLASS} with prompts of {_CLASS_PROMPT_TOKENS:,} tokens the decode worker then computes "
        f"all {tokens:,} between its answers"
    )
    curves = {curve.model: curve for curve in prefill.details.prefill_curves}
    if model.name in curves and (rate := curves[model.name].rate(_CLASS_PROMPT_TOKENS)):
        cost += f", which the prefill worker does in {tokens / rate / 60:,.0f} minutes"
    todo, entry = finding.todo, entries().get(decode.engine)
    if prefill.engine != decode.engine and entry and entry.capabilities.exports_kv:
        todo += (
            f"; or give the prefill worker the decode worker's weights (--engine {decode.engine}, the same file or "
            "folder): its KV cache is then the consumer's own"
        )
    return replace(finding, what=finding.what + cost, todo=todo)


def _agreement(prefill: WorkerInfo, decode: WorkerInfo, fetch: Fetch) -> SketchAgreement:
    """Compare the sketches of both workers, as the decode worker does."""
    bodies = [
        (registration.sketch and fetch(registration.sketch), registration.sketch) for registration in (decode, prefill)
    ]
    if not all(body for body, _ in bodies):
        return SketchAgreement("what they compute was not compared, since the store does not hold a sketch of each")
    try:
        decode_sketch, prefill_sketch = (read_sketch(body, name) for body, name in bodies if body)
    except KVTransferFailed as unreadable:
        return SketchAgreement(str(unreadable))
    agreement = compare(decode_sketch, prefill_sketch)
    return replace(agreement, problem=agreement.problem or decode.why_refused(prefill.sketch))


def _check_agreement(model: ModelSettings, pair: str, prefill: WorkerInfo, agreement: SketchAgreement) -> Finding:
    layers = tuple({"k": keys, "v": values, "rounding": rounding} for keys, values, rounding in agreement.layers)
    if agreement.problem:
        refusal = error(model.name, f"{pair}: {agreement.problem}; the decoder does every prompt", _MEND_SKETCH)
        return replace(refusal, layers=layers)
    worst = max(range(len(layers)), key=lambda layer: max(layers[layer]["k"], layers[layer]["v"]))
    largest_difference, rounding = max(layers[worst]["k"], layers[worst]["v"]), layers[worst]["rounding"]
    rounding_note = ", which results call rounded" if agreement.formats_differ else ""
    message = f"{pair}: hands its KV cache over (family {prefill.fingerprint:.12}); keys and values differ by "
    return replace(
        ok(
            model.name,
            f"{message}{largest_difference:.2%} in layer {worst}, rounding makes {rounding:.2%}{rounding_note}",
        ),
        layers=layers,
    )


def _shape(registration: WorkerInfo) -> str:
    """Return layers, heads and windows of the KV cache, without the dtype; "" if an older worker doesn't say."""
    return registration.layout.partition(";")[0]


def _mend_shapes(model: ModelSettings, prefill: WorkerInfo, decode: WorkerInfo) -> str:
    if {prefill.engine, decode.engine} <= set(model.same_weights):
        return f'take them out of same_weights in [models."{model.name}"], or give both conversions of one model'
    return "give both workers the same model, or serve one of them under another model name"


def _mend_families(model: ModelSettings, prefill: WorkerInfo, decode: WorkerInfo) -> str:
    if prefill.engine == decode.engine:
        return "give both workers the same file, or serve one of them under another model name"
    engines = ", ".join(f'"{name}"' for name in sorted({prefill.engine, decode.engine}))
    return f'if they are conversions of the same weights, say so: same_weights = [{engines}] in [models."{model.name}"]'


def _tokenizers_differ(prefill: WorkerInfo, decode: WorkerInfo) -> bool:
    tokenizers = [t for t in (prefill.tokenizer, decode.tokenizer) if t and not t.startswith(_OBSERVED_PREFIX)]
    return len(tokenizers) == 2 and tokenizers[0] != tokenizers[1]


def _check_without_kv_transfer(model: ModelSettings, pair: str, registration: WorkerInfo) -> Finding:
    reason = registration.notes or f"{registration.engine} has no KV cache to transfer"
    message = f"{pair}: no KV transfer, the decoder does every prompt: {reason}"
    known = entries()
    entry = known.get(registration.engine)
    if entry and entry.capabilities.exports_kv:
        return warn(model.name, message, "see that worker's log; `kvasir engines` says what it can do at its best")
    capable_engines = sorted(name for name in model.weights if known[name].capabilities.exports_kv)
    if capable_engines:
        return warn(model.name, message, f"--engine {capable_engines[0]} at both ends would transfer KV")
    todo = entry.mend_transfer if entry else MEND_TRANSFER
    return warn(model.name, message, todo.format(model=registration.model))


def _check_device(settings: Settings, registration: WorkerInfo) -> Iterator[Finding]:
    for machine in _machines_of(settings, registration):
        expected = _GPU_PLATFORMS.get(machine.platform, "")
        if expected and registration.device == "cpu":
            yield error(
                registration.model,
                f"{_describe(registration)} computes on the CPU of {machine.name}, "
                f"which has a GPU ({machine.platform})",
                _mend_device(registration, expected),
            )
            return


def _mend_device(registration: WorkerInfo, expected: str) -> str:
    entry = entries().get(registration.engine)
    todo = entry.mend_device if entry else MEND_DEVICE
    return todo.format(device=expected.upper(), engine=registration.engine)


def _machines_of(settings: Settings, registration: WorkerInfo) -> list[MachineSettings]:
    """Return the machines that a registration may belong to.

    This is the machine with the registered name or host. If there is none, it is every machine that is configured for
    this role and model, but only if all of them have a GPU: an address in the configuration does not tell the host's
    own name.
    """
    machines = list(settings.machines.values())
    named_machines = [machine for machine in machines if machine.is_called(registration.host)]
    if named_machines:
        return named_machines
    serves = (registration.role, registration.model)
    matching_machines = [
        machine
        for machine in machines
        if any((stage, role.model) == serves for role in machine.roles for stage in role.stages)
    ]
    return matching_machines if all(machine.platform in _GPU_PLATFORMS for machine in matching_machines) else []


def _describe(registration: WorkerInfo) -> str:
    return f"{registration.role} worker {registration.worker_id} ({registration.engine})"
