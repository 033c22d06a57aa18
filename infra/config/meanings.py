"""What every key of kvasir.toml means, in one place; docs/reference/configuration.md is made from this and the schema.

What an engine's weights are says its own entry.

Keys are those of `infra.config.schema`, by their path: `services.broker`, `models.context`. A test compares the two.
"""

# What stands before each table.
TABLES = {
    "services": "Where broker and store are. Without them everything runs in one process.\n"
    "[Several hosts](../how-to/clusters.md#several-addresses) of either: with commas, the best first.",
    "grading": "Which models grade, and how they sample unless their own table says otherwise.",
    "costs": "For `kvasir plan`.",
    "models": "A model that has queues. Its name is free; it is the name of its queues.",
    "models.weights": "What each engine loads; one that has no entry can't serve the model.",
    "machines": "A machine: how to reach it, what it can do, what runs there.",
    "machines.roles": "An entry for each thing that runs on the machine.",
    "machines.rates": "What this machine does with a model, for `kvasir plan`. A curve counts before a single rate.",
}

MEANINGS = {
    "services.broker": "RabbitMQ: `amqp://USER@HOST:5672/VHOST` or `amqps://…`; `local` for none",
    "services.store": "Redis: `redis://HOST:6379/0`, `rediss://…`, `unix://…`; nodes of a Redis Cluster: "
    "`redis+cluster://HOST,HOST`; `local` for none. Set both or neither",
    "services.broker_password_file": "File that holds the broker's password and nothing else",
    "services.store_password_file": "File that holds the store's password and nothing else",
    "services.broker_ca_file": "PEM file that signed the broker's certificate (`amqps`); empty: what the system trusts",
    "services.store_ca_file": "The same for the store (`rediss`)",
    "services.broker_nodes": "Nodes of the broker's cluster. With several, reply queues are quorum queues too",
    "grading.code_model": "Model that grades code",
    "grading.feedback_model": "Model that grades text and writes feedback",
    "grading.notice": "A sentence across the top of every report, such as a warning that the grades are not real",
    "grading.max_tokens": "Longest answer where no schema bounds it",
    "grading.temperature": "0: always the likeliest token",
    "grading.max_submission_tokens": "Most tokens of a student's work in a prompt; the rest is cut and reported",
    "grading.top_p": "Choose among the likeliest tokens that have this probability together",
    "costs.price_per_kwh": "Price of electricity, in any currency; 0: not known",
    "costs.years": "Years that a machine is used, over which its price is spread",
    "costs.hours_per_week": "Hours a week that a machine is used, over which its price is spread",
    "models.context": "Most tokens of prompt and answer; 0: as the model was trained. The same at both ends",
    "models.max_tokens": "As in `[grading]`, for this model",
    "models.temperature": "As in `[grading]`, for this model",
    "models.top_p": "As in `[grading]`, for this model",
    "models.engine": "Engine, where none is named; empty: the only one that has weights",
    "models.slots": "Sequences that a decode worker runs at once",
    "models.prefill_slots": "Prompts that a prefill worker computes at once, where its engine batches them (`vllm`)",
    "models.threads": "Threads of the CPU; 0: the engine chooses",
    "models.copies": "Without a broker: 2 loads the model twice, so that prefill and decode never share a batch",
    "models.tokenizer": "Kept for counting tokens where no worker is; nothing reads it yet",
    "models.same_weights": "Engines whose weights were converted from one another; sketches decide what they share",
    "models.short_prompt_tokens": "Prompts up to this length go to decode without a KV cache; 0: none does",
    "models.kv_check_every": "One job in this many is also prefilled at decode, to check its KV cache; 0: none is",
    "models.kv_bytes_per_token": "Size of its KV cache for a token, for `kvasir plan`; 0: not known",
    "models.kv_state_bytes": "Size of a hybrid model's recurrent state for a prompt, for `kvasir plan`; 0: none",
    "models.memory_gb": "Size of its weights, for `kvasir plan`; 0: not known",
    "models.free_memory_gb": "Memory that a prefill must leave free; else another worker takes it. 0: not looked at",
    "models.allow_external": "`true`: the `openai` engine may send prompts to a server outside private networks",
    "models.api_key_file": "File that holds the key of the `openai` or `vllm` engine's server and nothing else",
    "machines.host": "Name or address, for ssh and Prometheus; empty: the table's name",
    "machines.user": "The user for ssh; empty: yours",
    "machines.platform": "`linux`, `linux-cuda`, `macos`",
    "machines.folder": "Where `kvasir deploy` puts everything: an absolute path, or one below the user's home",
    "machines.supervisor": "`systemd`, `launchd`, `plain`; empty: the platform's own",
    "machines.metrics_port": "Port of its first worker's page; the others' follow",
    "machines.broker_hosts": "The broker's addresses for this machine's workers: `FAST:5672,SLOW:5672`",
    "machines.store_hosts": "The same for the store",
    "machines.hours": "When its workers take jobs, by its own clock: `18:00-08:00`, more with commas; empty: always",
    "machines.memory_gb": "Memory of the machine, for `kvasir plan`; 0: not known",
    "machines.link_gbps": "Link to the store's machine, in gigabits a second, for `kvasir plan`; 0: not known",
    "machines.watts": "Power under load, where it can't be measured; 0: not known",
    "machines.price": "What it cost, in the currency of `[costs]`; 0: not known",
    "machines.roles": "What runs there: a list of tables, see below",
    "machines.roles.role": (
        "`worker` (both `prefill` and `decode`, over one copy of the weights), `prefill`, `decode`, `gateway`, "
        "`broker`, `store`; notes: `app`, `prometheus`, `grafana`"
    ),
    "machines.roles.model": "The model whose queue a worker serves",
    "machines.roles.engine": "The engine of a worker",
    "machines.roles.weights": "The weights on this machine; empty: the model's own for this engine",
    "machines.roles.slots": "Slots of a worker that decodes; 0: the model's",
    "machines.roles.memory_gb": "Memory that a store may use; 0: no limit",
    "machines.roles.port": "Port of a gateway",
    "machines.rates.prefill": "Tokens a second; 0: not known",
    "machines.rates.decode": "Tokens a second of one sequence, with all other slots busy; 0: not known",
    "machines.rates.prefill_curve": "`[[prompt tokens, tokens a second], …]`, measured by `kvasir measure`",
    "machines.rates.decode_curve": "`[[sequences, tokens a second of all of them], …]`, from 1 sequence on",
}
