"""The panels of "Kvasir: queue depth and flow", as data. The rows follow a job's path.

This is read by everything that shows or checks the dashboard: Grafana's JSON (`monitoring.dashboards.grafana`), the
tests that require data in every panel, `make observe`, and the diagnosis. Expressions may contain `$model` (the
dashboard's variable) and `$__rate_interval` (Grafana's).
"""

from dataclasses import dataclass
from typing import Literal

RATIO, SECONDS, BYTES_PER_S = "percentunit", "s", "Bps"
JOBS, JOBS_PER_S, TOKENS, TOKENS_PER_S = "suffix: jobs", "suffix: jobs/s", "suffix: tokens", "suffix: tokens/s"
WORKERS, WATTS, WATT_HOURS = "suffix: workers", "watt", "watth"

Kind = Literal["timeseries", "stat"]


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the name of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. Its description says how to read the figure."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def _panel(title: str, unit: str, description: str, *queries: tuple[str, str], kind: Kind = "timeseries") -> Panel:
    return Panel(title, description, unit, tuple(Query(expr, legend) for expr, legend in queries), kind)


def _rate(metric: str, by: str = "model") -> str:
    return f'sum by ({by}) (rate({metric}{{model=~"$model"}}[$__rate_interval]))'


def _mean(metric: str) -> str:
    """Return the mean of a histogram's observations; no data while there are none."""
    return f"{_rate(f'{metric}_sum')} / ({_rate(f'{metric}_count')} > 0)"


def _quantile(quantile: float, metric: str, by: str) -> str:
    rate = f'rate({metric}_bucket{{model=~"$model"}}[$__rate_interval])'
    return f"histogram_quantile({quantile}, sum by (le, {by}) ({rate}))"


def _share(metric: str, label: str, value: str) -> str:
    part = f'sum by (model) (rate({metric}{{model=~"$model", {label}="{value}"}}[$__rate_interval]))'
    return f"{part} / ({_rate(metric)} > 0)"


def _depth(queues: str) -> str:
    return f'sum by (queue) (rabbitmq_detailed_queue_messages_ready{{job="rabbitmq-queues", queue=~"{queues}"}})'


_QUEUES = PanelRow(
    "Waiting",
    (
        _panel(
            "Jobs waiting, by model, stage and lane",
            JOBS,
            "Ready messages of each work queue. If a line only rises, that stage has too few workers, or none.",
            ('kvasir:queue_ready{model=~"$model"}', "{{model}} {{stage}} {{lane}}"),
        ),
        _panel(
            "Jobs in hand, by model and stage",
            JOBS,
            "Deliveries that workers hold and have not settled. While jobs wait, it should equal the number of slots.",
            ('sum by (model, stage) (kvasir:queue_unacked{model=~"$model"})', "{{model}} {{stage}}"),
        ),
        _panel(
            "Age of the oldest job waiting, at most",
            SECONDS,
            "An upper bound, from when the queue began to fill and when the newest job taken so far was submitted.",
            ('kvasir:oldest_job_age_seconds{model=~"$model"}', "{{model}} {{stage}} {{lane}}"),
        ),
        _panel(
            "Wait before a stage, 95th percentile",
            SECONDS,
            "For prefill from submission, for decode from the end of prefill. The longer wait is at the bottleneck.",
            (_quantile(0.95, "kvasir_queue_wait_seconds", "model, stage"), "{{model}} {{stage}}"),
        ),
    ),
)
_THROUGHPUT = PanelRow(
    "Throughput",
    (
        _panel(
            "Jobs ended, by model and how",
            JOBS_PER_S,
            "Results published: succeeded, failed, expired. A cancelled job's result is written by its batch's owner.",
            (_rate("kvasir_jobs_total", "model, state"), "{{model}} {{state}}"),
        ),
        _panel(
            "From submission to the answer",
            SECONDS,
            "Median and 95th percentile of all answered jobs, queues included.",
            (_quantile(0.5, "kvasir_job_seconds", "model"), "{{model}} median"),
            (_quantile(0.95, "kvasir_job_seconds", "model"), "{{model}} 95th"),
        ),
        _panel(
            "Time to first token, 95th percentile",
            SECONDS,
            "From submission, queues included. The lane `now` is what people wait for.",
            (_quantile(0.95, "kvasir_ttft_seconds", "model, lane"), "{{model}} {{lane}}"),
        ),
    ),
)
_PREFILL = PanelRow(
    "Prefill",
    (
        _panel(
            "Prefill speed while it computes",
            TOKENS_PER_S,
            "Tokens computed per second in the engine. It is the machine's own speed, whether or not jobs wait.",
            (
                'sum by (model) (rate(kvasir_prefill_tokens_total{model=~"$model", source="computed"}'
                f"[$__rate_interval])) / ({_rate('kvasir_prefill_seconds_sum')} > 0)",
                "{{model}}",
            ),
        ),
        _panel(
            "Prompt tokens found stored, share",
            RATIO,
            "Share of the transferred tokens that another worker had computed: the class-wide part.",
            (_share("kvasir_prefill_tokens_total", "source", "stored"), "{{model}}"),
        ),
        _panel(
            "Prefill per prompt, mean",
            SECONDS,
            "Mean seconds in the engine for a prompt.",
            (_mean("kvasir_prefill_seconds"), "{{model}}"),
        ),
        _panel(
            "Prefill workers busy, share",
            RATIO,
            "While jobs wait: near 1, prefill is the bottleneck; low, admission is closed or workers have left.",
            (
                'sum by (model) (kvasir_slots_busy{model=~"$model", stage="prefill"})'
                ' / sum by (model) (kvasir_slots{model=~"$model", stage="prefill"})',
                "{{model}}",
            ),
        ),
    ),
)
_TRANSFER = PanelRow(
    "Transfer",
    (
        _panel(
            "KV cache moved",
            BYTES_PER_S,
            "Written by prefill and read by decode. Shared blocks are written once and then read from memory.",
            (_rate("kvasir_kv_put_bytes_total"), "{{model}} written"),
            (_rate("kvasir_kv_get_bytes_total"), "{{model}} read"),
        ),
        _panel(
            "Storing and loading a KV cache, mean",
            SECONDS,
            "Storing counts only the time after computing. Checking is for caches that decode compares with its own.",
            (_mean("kvasir_kv_put_seconds"), "{{model}} storing"),
            (_mean("kvasir_kv_get_seconds"), "{{model}} loading"),
            (_mean("kvasir_kv_check_seconds"), "{{model}} checking"),
        ),
        _panel(
            "Store in use, share",
            RATIO,
            "Share of Redis's maxmemory. Prefill fills it up to 85 %, then waits for decode.",
            ("kvasir:store_used_ratio", "store"),
        ),
        _panel(
            "Answers from a transferred KV cache, share",
            RATIO,
            "1 where the KV transfer works, as proved by the engine's own count of evaluated tokens.",
            (_share("kvasir_kv_transfers_total", "outcome", "verified"), "{{model}}"),
        ),
    ),
)
_DECODE = PanelRow(
    "Decode",
    (
        _panel(
            "Decode slots busy, share",
            RATIO,
            "Near 1 while jobs wait for decode: decode is the bottleneck.",
            (
                'sum by (model) (kvasir_slots_busy{model=~"$model", stage="decode"})'
                ' / sum by (model) (kvasir_slots{model=~"$model", stage="decode"})',
                "{{model}}",
            ),
        ),
        _panel(
            "Tokens generated",
            TOKENS_PER_S,
            "Tokens of all slots together.",
            (_rate("kvasir_decode_tokens_total"), "{{model}}"),
        ),
        _panel(
            "Time per token after the first, mean",
            SECONDS,
            "Time per token of one answer. It rises with the number of slots in use, and should not rise otherwise.",
            (_mean("kvasir_tpot_seconds"), "{{model}}"),
        ),
        _panel(
            "Prompt tokens evaluated by decode, per answer",
            TOKENS,
            "1 after a KV transfer. If it is higher, prompts are computed twice.",
            (
                'sum by (model) (rate(kvasir_decode_prompt_tokens_total{model=~"$model", source="evaluated"}'
                f"[$__rate_interval])) / ({_rate('kvasir_kv_transfers_total')} > 0)",
                "{{model}}",
            ),
        ),
    ),
)
_STEALING = PanelRow(
    "Stealing",
    (
        _panel(
            "Jobs stolen, by reason",
            JOBS_PER_S,
            "Jobs taken by workers of other models, shown under the model they were taken from.",
            (_rate("kvasir_steals_total", "model, reason"), "{{model}} {{reason}}"),
        ),
        _panel(
            "Waiting saved by stealing, as predicted",
            SECONDS,
            "Seconds saved per second, as predicted when a job is stolen. Not counted for a model without own workers.",
            (_rate("kvasir_steal_saved_seconds_total"), "{{model}}"),
        ),
    ),
)
_FAILURES = PanelRow(
    "Failures and dead letters",
    (
        _panel(
            "Retries, returns, suspects and deaths",
            JOBS_PER_S,
            "Transient errors; deliveries of workers that died or left; jobs isolated because of that; jobs given up.",
            (_rate("kvasir_retries_total", "model, stage"), "{{model}} {{stage}} retried"),
            (_rate("kvasir_redeliveries_total", "model, stage"), "{{model}} {{stage}} returned"),
            (_rate("kvasir_suspects_total", "model, stage"), "{{model}} {{stage}} suspect"),
            (_rate("kvasir_dead_letters_total", "model, stage"), "{{model}} {{stage}} given up"),
        ),
        _panel(
            "Jobs prefilled again",
            JOBS_PER_S,
            "Their KV cache was missing or damaged when decode needed it. This costs time, never a job.",
            (_rate("kvasir_reprefills_total"), "{{model}}"),
        ),
        _panel(
            "Waiting for a retry, alone, or unclaimed",
            JOBS,
            "Jobs in retry levels, suspects, and results whose batch's owner is away.",
            (_depth("retry[.].+|suspects[.].+|results[.]parked"), "{{queue}}"),
        ),
        _panel(
            "Dead letters",
            JOBS,
            "Jobs that were given up, answered with a failed result, and kept for a person.",
            (_depth("deaths|dead-letters"), "{{queue}}"),
            kind="stat",
        ),
        _panel(
            "Jobs failed in the last day, share",
            RATIO,
            "Share of the jobs that ended. The target is less than 0.1 %; a prompt too long for its model counts too.",
            ('kvasir:error_ratio:1d{model=~"$model"}', "{{model}}"),
        ),
    ),
)
_FLEET = PanelRow(
    "Fleet",
    (
        _panel(
            "Workers, by model and stage",
            WORKERS,
            "Workers whose page Prometheus reads. A model needs one for each stage.",
            ('kvasir:workers{model=~"$model"}', "{{model}} {{stage}}"),
            ('kvasir:workers_missing{model=~"$model"}', "gone: {{host}} {{model}} {{stage}}"),
            ('kvasir_paused{model=~"$model"} > 0', "paused: {{instance}} {{model}} {{stage}}"),
        ),
        _panel(
            "Uptime of the last day",
            RATIO,
            "Share of Prometheus's scrapes that a worker answered, upgrades included. The target is more than 99.9 %.",
            ("kvasir:up_ratio:1d", "{{instance}}"),
        ),
        _panel(
            "Models resident, by host",
            WORKERS,
            "Engines that have the model in memory. A worker that is still loading does not count.",
            (
                'sum by (model, instance) (kvasir_model_resident{model=~"$model"})',
                "{{model}} {{instance}}",
            ),
        ),
        _panel(
            "Tokens per second, whole fleet",
            TOKENS_PER_S,
            "Tokens computed by prefill, and tokens generated by decode.",
            ('sum(rate(kvasir_prefill_tokens_total{source="computed"}[$__rate_interval]))', "prefill"),
            ("sum(rate(kvasir_decode_tokens_total[$__rate_interval]))", "decode"),
        ),
        _panel(
            "GPUs busy, share",
            RATIO,
            "By NVML, for NVIDIA GPUs: the share of time in which the GPU computed anything.",
            ("max by (host, gpu) (kvasir_gpu_busy_ratio)", "{{host}} {{gpu}}"),
        ),
        _panel(
            "GPU memory in use, share",
            RATIO,
            "By NVML. No data if a GPU shares the machine's memory and does not report it.",
            (
                "max by (host, gpu) (kvasir_gpu_memory_used_bytes / kvasir_gpu_memory_total_bytes)",
                "{{host}} {{gpu}}",
            ),
        ),
        _panel(
            "Power, by host",
            WATTS,
            "Measured by NVML for NVIDIA GPUs; otherwise the declared watts while the machine has a job.",
            ("max by (host, source) (kvasir_power_watts)", "{{host}} {{source}}"),
        ),
        _panel(
            "Energy per submission",
            WATT_HOURS,
            "Average of the last hour. A submission has one answer to each of its questions.",
            ("kvasir:energy_wh_per_submission:1h", "submission"),
        ),
    ),
)
_GATEWAY = PanelRow(
    "Gateway",
    (
        _panel(
            "Requests answered, by HTTP status",
            "suffix: requests/s",
            "Requests to all gateways, and how their jobs ended, without those of batches. "
            "429 and 503: clients are told to come back later; 401: a client has no valid key.",
            ("sum by (status) (rate(kvasir_gateway_requests_total[$__rate_interval]))", "{{status}}"),
            ('sum by (state) (rate(kvasir_gateway_jobs_total{model=~"$model"}[$__rate_interval]))', "jobs {{state}}"),
        ),
        _panel(
            "Requests under way",
            "suffix: requests",
            "Includes streams. A gateway refuses more than 128.",
            ("sum by (instance) (kvasir_gateway_open_requests)", "{{instance}}"),
        ),
        _panel(
            "To a stream's first text and to the result, 95th percentile",
            SECONDS,
            "From the request, queues included. The first text should take little longer than the first token.",
            (_quantile(0.95, "kvasir_gateway_first_text_seconds", "model"), "{{model}} first text"),
            (_quantile(0.95, "kvasir_gateway_answer_seconds", "model"), "{{model}} result"),
        ),
        _panel(
            "Prompt tokens that a conversation had stored, share",
            RATIO,
            "Share of clients' prompt tokens: earlier turns, and beginnings that many prompts share.",
            (
                'sum by (model) (rate(kvasir_gateway_tokens_total{model=~"$model", kind="cached"}[$__rate_interval]))'
                ' / (sum by (model) (rate(kvasir_gateway_tokens_total{model=~"$model", kind="prompt"}'
                "[$__rate_interval])) > 0)",
                "{{model}}",
            ),
        ),
    ),
)
_BATCH = PanelRow(
    "Batches",
    (
        _panel(
            "Jobs left",
            JOBS,
            "Jobs waiting and in hand, in both stages. `kvasir top` shows each batch.",
            ('kvasir:jobs_left{model=~"$model"}', "{{model}}"),
            kind="stat",
        ),
        _panel(
            "Done, share",
            RATIO,
            "Share of the jobs of the last 12 hours and those left.",
            ('kvasir:done_ratio:12h{model=~"$model"}', "{{model}}"),
        ),
        _panel(
            "Time to finish, as it goes",
            SECONDS,
            "Time for the jobs left, at the rate of the last five minutes. No data while no job ends.",
            ('kvasir:time_to_finish_seconds{model=~"$model"}', "{{model}}"),
            kind="stat",
        ),
    ),
)

ROWS = (_QUEUES, _THROUGHPUT, _PREFILL, _TRANSFER, _DECODE, _STEALING, _FAILURES, _FLEET, _GATEWAY, _BATCH)
PANELS = tuple(panel for row in ROWS for panel in row.panels)
