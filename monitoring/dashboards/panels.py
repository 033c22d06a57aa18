"""The panels of "Kvasir: queue depth and flow", as data: rows in the order in which a job flows.

Everything that shows or checks the dashboard reads this module: the JSON for Grafana (`monitoring.dashboards.grafana`),
the tests that require data in every panel, `make observe`, and the diagnosis. Expressions may contain `$model` (the
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
    """A PromQL expression, and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. Its description says how to interpret the figure."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"


@dataclass(frozen=True, slots=True)
class PanelRow:
    """A row of panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def _panel(title: str, unit: str, description: str, *queries: tuple[str, str], kind: Kind = "timeseries") -> Panel:
    return Panel(title, description, unit, tuple(Query(expr, legend) for expr, legend in queries), kind)


def _rate(metric: str, by: str = "model") -> str:
    return f'sum by ({by}) (rate({metric}{{model=~"$model"}}[$__rate_interval]))'


def _mean(metric: str) -> str:
    """The mean of a histogram's observations; no value while there are none."""
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
            "Ready messages of each work queue. A line that only rises: too few workers for that stage, or none.",
            ('kvasir:queue_ready{model=~"$model"}', "{{model}} {{stage}} {{lane}}"),
        ),
        _panel(
            "Jobs in hand, by model and stage",
            JOBS,
            "Deliveries that a worker holds and has not settled. With jobs waiting it should equal the slots.",
            ('sum by (model, stage) (kvasir:queue_unacked{model=~"$model"})', "{{model}} {{stage}}"),
        ),
        _panel(
            "Age of the oldest job waiting, at most",
            SECONDS,
            "Bounded by when its queue began to fill, and by when the newest job taken so far was submitted.",
            ('kvasir:oldest_job_age_seconds{model=~"$model"}', "{{model}} {{stage}} {{lane}}"),
        ),
        _panel(
            "Wait before a stage, 95th percentile",
            SECONDS,
            "Prefill's counts from submission, decode's from the end of prefill. The longer one names the bottleneck.",
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
            "Results published: succeeded, failed, expired. Cancelled jobs are written by their batch's owner.",
            (_rate("kvasir_jobs_total", "model, state"), "{{model}} {{state}}"),
        ),
        _panel(
            "From submission to the answer",
            SECONDS,
            "Median and 95th percentile of all jobs answered, queues included.",
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
            "Tokens computed for each second in the engine: the machine's own speed, whatever waits.",
            (
                'sum by (model) (rate(kvasir_prefill_tokens_total{model=~"$model", source="computed"}'
                f"[$__rate_interval])) / ({_rate('kvasir_prefill_seconds_sum')} > 0)",
                "{{model}}",
            ),
        ),
        _panel(
            "Prompt tokens found stored, share",
            RATIO,
            "Of the tokens that prefill transferred: those of the class-wide part that a neighbour had computed.",
            (_share("kvasir_prefill_tokens_total", "source", "stored"), "{{model}}"),
        ),
        _panel(
            "Prefill per prompt, mean",
            SECONDS,
            "Seconds in the engine.",
            (_mean("kvasir_prefill_seconds"), "{{model}}"),
        ),
        _panel(
            "Prefill workers busy, share",
            RATIO,
            "Near 1 with jobs waiting: prefill is the bottleneck. Low with jobs waiting: it is shut, or has left.",
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
            "Written by prefill and read by decode; shared blocks are written once and read from memory.",
            (_rate("kvasir_kv_put_bytes_total"), "{{model}} written"),
            (_rate("kvasir_kv_get_bytes_total"), "{{model}} read"),
        ),
        _panel(
            "Storing and loading a KV cache, mean",
            SECONDS,
            "Storing counts only what computing did not hide. Checking: the few that decode compares with its own.",
            (_mean("kvasir_kv_put_seconds"), "{{model}} storing"),
            (_mean("kvasir_kv_get_seconds"), "{{model}} loading"),
            (_mean("kvasir_kv_check_seconds"), "{{model}} checking"),
        ),
        _panel(
            "Store in use, share",
            RATIO,
            "Of Redis' maxmemory. Prefill fills it up to 85 %, then waits for decode.",
            ("kvasir:store_used_ratio", "store"),
        ),
        _panel(
            "Answers from a transferred KV cache, share",
            RATIO,
            "1 where the KV transfer works. Proved by the engine's own count of evaluated tokens.",
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
            "Near 1 with jobs waiting for decode: decode is the bottleneck.",
            (
                'sum by (model) (kvasir_slots_busy{model=~"$model", stage="decode"})'
                ' / sum by (model) (kvasir_slots{model=~"$model", stage="decode"})',
                "{{model}}",
            ),
        ),
        _panel(
            "Tokens generated",
            TOKENS_PER_S,
            "All slots together.",
            (_rate("kvasir_decode_tokens_total"), "{{model}}"),
        ),
        _panel(
            "Time per token after the first, mean",
            SECONDS,
            "Of one answer. It rises with the slots in use; by itself it should not.",
            (_mean("kvasir_tpot_seconds"), "{{model}}"),
        ),
        _panel(
            "Prompt tokens evaluated by decode, per answer",
            TOKENS,
            "1 after a KV transfer. More: prompts are computed twice.",
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
            "Taken by workers of other models, under the model they were taken from.",
            (_rate("kvasir_steals_total", "model, reason"), "{{model}} {{reason}}"),
        ),
        _panel(
            "Waiting saved by stealing, as predicted",
            SECONDS,
            "Seconds saved in each second, as the thief predicts when it takes a job; none where nobody is at home.",
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
            "Transient errors; deliveries of workers that died or left; jobs set apart for that; jobs given up.",
            (_rate("kvasir_retries_total", "model, stage"), "{{model}} {{stage}} retried"),
            (_rate("kvasir_redeliveries_total", "model, stage"), "{{model}} {{stage}} returned"),
            (_rate("kvasir_suspects_total", "model, stage"), "{{model}} {{stage}} suspect"),
            (_rate("kvasir_dead_letters_total", "model, stage"), "{{model}} {{stage}} given up"),
        ),
        _panel(
            "Jobs prefilled again",
            JOBS_PER_S,
            "Their KV cache was gone or damaged when decode came for it. It costs time, never a job.",
            (_rate("kvasir_reprefills_total"), "{{model}}"),
        ),
        _panel(
            "Waiting for a retry, alone, or unclaimed",
            JOBS,
            "Retry levels, suspects, and results whose batch's owner is away.",
            (_depth("retry[.].+|suspects[.].+|results[.]parked"), "{{queue}}"),
        ),
        _panel(
            "Dead letters",
            JOBS,
            "Given up, answered with a failed result, kept for a person.",
            (_depth("deaths|dead-letters"), "{{queue}}"),
            kind="stat",
        ),
        _panel(
            "Jobs failed in the last day, share",
            RATIO,
            "Of the jobs that ended. The team's target is less than 0.1 %; a prompt too long for its model counts too.",
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
            "Those whose page Prometheus reads. A model needs one of each stage.",
            ('kvasir:workers{model=~"$model"}', "{{model}} {{stage}}"),
            ('kvasir:workers_missing{model=~"$model"}', "gone: {{host}} {{model}} {{stage}}"),
            ('kvasir_paused{model=~"$model"} > 0', "paused: {{instance}} {{model}} {{stage}}"),
        ),
        _panel(
            "Uptime of the last day",
            RATIO,
            "Share of Prometheus's looks that a worker answered, upgrades included. The target is more than 99.9 %.",
            ("kvasir:up_ratio:1d", "{{instance}}"),
        ),
        _panel(
            "Models resident, by host",
            WORKERS,
            "Engines with the model in memory: a worker that is still loading is not among them.",
            (
                'sum by (model, instance) (kvasir_model_resident{model=~"$model"})',
                "{{model}} {{instance}}",
            ),
        ),
        _panel(
            "Tokens per second, whole fleet",
            TOKENS_PER_S,
            "Computed by prefill, generated by decode.",
            ('sum(rate(kvasir_prefill_tokens_total{source="computed"}[$__rate_interval]))', "prefill"),
            ("sum(rate(kvasir_decode_tokens_total[$__rate_interval]))", "decode"),
        ),
        _panel(
            "GPUs busy, share",
            RATIO,
            "By NVML, where there is an NVIDIA GPU: the share of a moment in which it computed anything.",
            ("max by (host, gpu) (kvasir_gpu_busy_ratio)", "{{host}} {{gpu}}"),
        ),
        _panel(
            "GPU memory in use, share",
            RATIO,
            "By NVML; nothing where a GPU shares the machine's memory and does not tell.",
            (
                "max by (host, gpu) (kvasir_gpu_memory_used_bytes / kvasir_gpu_memory_total_bytes)",
                "{{host}} {{gpu}}",
            ),
        ),
        _panel(
            "Power, by host",
            WATTS,
            "Measured by NVML where there is an NVIDIA GPU; else the declared watts while a job is in hand.",
            ("max by (host, source) (kvasir_power_watts)", "{{host}} {{source}}"),
        ),
        _panel(
            "Energy per submission",
            WATT_HOURS,
            "Of the last hour. A submission has one answer to each of its questions.",
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
            "By every gateway; and their jobs, without those of batches, by how they ended. "
            "429 and 503: its clients are told to come back later; 401: somebody has no key.",
            ("sum by (status) (rate(kvasir_gateway_requests_total[$__rate_interval]))", "{{status}}"),
            ('sum by (state) (rate(kvasir_gateway_jobs_total{model=~"$model"}[$__rate_interval]))', "jobs {{state}}"),
        ),
        _panel(
            "Requests under way",
            "suffix: requests",
            "Streams among them. At 128 a gateway refuses more.",
            ("sum by (instance) (kvasir_gateway_open_requests)", "{{instance}}"),
        ),
        _panel(
            "To a stream's first text and to the result, 95th percentile",
            SECONDS,
            "From the request, queues included. The first should be little more than the time to first token.",
            (_quantile(0.95, "kvasir_gateway_first_text_seconds", "model"), "{{model}} first text"),
            (_quantile(0.95, "kvasir_gateway_answer_seconds", "model"), "{{model}} result"),
        ),
        _panel(
            "Prompt tokens that a conversation had stored, share",
            RATIO,
            "Of its clients' prompts: tokens of earlier turns, and of beginnings that many share.",
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
            "Waiting and in hand, in both stages. `kvasir top` tells batches apart.",
            ('kvasir:jobs_left{model=~"$model"}', "{{model}}"),
            kind="stat",
        ),
        _panel(
            "Done, share",
            RATIO,
            "Of the last 12 hours' jobs and those left.",
            ('kvasir:done_ratio:12h{model=~"$model"}', "{{model}}"),
        ),
        _panel(
            "Time to finish, as it goes",
            SECONDS,
            "Jobs left, at the rate of the last five minutes. Nothing while no job ends.",
            ('kvasir:time_to_finish_seconds{model=~"$model"}', "{{model}}"),
            kind="stat",
        ),
    ),
)

ROWS = (_QUEUES, _THROUGHPUT, _PREFILL, _TRANSFER, _DECODE, _STEALING, _FAILURES, _FLEET, _GATEWAY, _BATCH)
PANELS = tuple(panel for row in ROWS for panel in row.panels)
