"""What every key of kvasir.toml means. docs/reference/configuration.md is generated from this and the schema.

What an engine accepts as weights is described in the engine's own entry.

Keys are the paths of the keys in `infra.config.schema`: `services.broker`, `models.context`. A test compares the two.
"""

# The introduction of each table in docs/reference/configuration.md.
TABLES = {
    "services": "Where the broker and the store are. Without them everything runs in one process.\n"
    "[Several hosts](../how-to/clusters.md#several-addresses) of either are separated by commas, the best first.",
    "grading": "Which models grade, and how they sample unless a model's own table says otherwise.",
    "costs": "What electricity and machines cost, for `kvasir plan`.",
    "models": "A model that has queues. You choose its name, which is also part of its queues' names.",
    "models.weights": "What each engine loads. An engine without an entry can't serve the model.",
    "machines": "A machine: how to reach it, what it can do, and what runs there.",
    "machines.roles": "One entry for each worker or service on the machine.",
    "machines.rates": "How fast this machine runs a model, for `kvasir plan`. A curve takes precedence over a single "
    "rate.",
}

MEANINGS = {
    "services.broker": "RabbitMQ: `amqp://USER@HOST:5672/VHOST` or `amqps://…`; `local`: in this process",
    "services.store": "Redis: `redis://HOST:6379/0`, `rediss://…`, `unix://…`; nodes of a Redis Cluster: "
    "`redis+cluster://HOST,HOST`; `local`: in this process. Set both broker and store, or neither",
    "services.broker_password_file": "File that contains only the broker's password",
    "services.store_password_file": "File that contains only the store's password",
    "services.broker_ca_file": "PEM file of the CA of the broker's certificate (`amqps`); empty: the system's CAs",
    "services.store_ca_file": "PEM file of the CA that signed the store's certificate (`rediss`); empty: the system's",
    "services.broker_nodes": "Nodes in the broker's cluster. With several, reply queues are quorum queues too",
    "grading.code_model": "Model that grades code",
    "grading.feedback_model": "Model that grades text and writes feedback",
    "grading.notice": "A sentence across the top of every report, such as a warning that the grades are not real",
    "grading.max_tokens": "Most tokens of an answer that no schema limits",
    "grading.temperature": "Sampling temperature; 0: always the likeliest token",
    "grading.max_submission_tokens": "Most tokens of a submission in a prompt; the rest is cut off and reported",
    "grading.top_p": "Sample from the likeliest tokens that together have this probability",
    "costs.price_per_kwh": "Price of electricity, in any currency; 0: not known",
    "costs.years": "How many years a machine is used; its price is spread over them",
    "costs.hours_per_week": "How many hours a week a machine is used; its price is spread over them",
    "models.context": "Most tokens of prompt and answer together, at both stages; 0: as the model was trained",
    "models.max_tokens": "As in `[grading]`, for this model",
    "models.temperature": "As in `[grading]`, for this model",
    "models.top_p": "As in `[grading]`, for this model",
    "models.engine": "Engine to use if none is named; empty: the only one that has weights",
    "models.slots": "Sequences that a decode worker runs at once",
    "models.prefill_slots": "Prompts that a prefill worker computes at once, if its engine batches them (`vllm`)",
    "models.threads": "CPU threads; 0: the engine chooses",
    "models.copies": "Only without a broker: 2 loads the model twice, so that prefill and decode never share a batch",
    "models.tokenizer": "Reserved for counting tokens without a worker; not used yet",
    "models.same_weights": "Engines whose weights were converted from one another. Sketches decide what they share",
    "models.short_prompt_tokens": "Prompts of up to this many tokens go to decode without a KV cache; 0: none does",
    "models.kv_check_every": "The decoder also prefills one job in this many, to check its KV cache; 0: never",
    "models.kv_bytes_per_token": "Bytes of KV cache for one token, for `kvasir plan`; 0: not known",
    "models.kv_state_bytes": "Bytes of a hybrid model's recurrent state for one prompt, for `kvasir plan`; 0: none",
    "models.memory_gb": "Size of its weights, for `kvasir plan`; 0: not known",
    "models.free_memory_gb": "Memory that a prefill must leave free, or else another worker takes it. 0: not checked",
    "models.allow_external": "`true`: the `openai` engine may send prompts to a server outside private networks",
    "models.api_key_file": "File that holds only the API key of the `openai` or `vllm` engine's server",
    "machines.host": "Host name or address, for ssh and Prometheus; empty: the table's name",
    "machines.user": "User for ssh; empty: yours",
    "machines.platform": "`linux`, `linux-cuda`, `macos`",
    "machines.folder": "Where `kvasir deploy` puts everything: an absolute path, or one relative to the user's home",
    "machines.supervisor": "`systemd`, `launchd`, `plain`; empty: the platform's default",
    "machines.metrics_port": "Port of its first worker's metrics page; its other workers use the next ports",
    "machines.broker_hosts": "The broker's addresses for this machine's workers: `FAST:5672,SLOW:5672`",
    "machines.store_hosts": "The store's addresses for this machine's workers",
    "machines.hours": "When its workers take jobs, by its own clock: `18:00-08:00`, several with commas; empty: always",
    "machines.memory_gb": "Memory of the machine, for `kvasir plan`; 0: not known",
    "machines.link_gbps": "Speed of its link to the store's machine in Gbit/s, for `kvasir plan`; 0: not known",
    "machines.watts": "Power under load, if it can't be measured; 0: not known",
    "machines.price": "What the machine cost, in the currency of `[costs]`; 0: not known",
    "machines.roles": "What runs there, as a list of tables (see below)",
    "machines.roles.role": (
        "`worker` (both `prefill` and `decode`, over one copy of the weights), `prefill`, `decode`, `gateway`, "
        "`broker`, `store`; only as notes: `app`, `prometheus`, `grafana`"
    ),
    "machines.roles.model": "The model whose queues a worker serves",
    "machines.roles.engine": "The engine of a worker",
    "machines.roles.weights": "The weights on this machine; empty: those in the model's table for this engine",
    "machines.roles.slots": "Slots of a worker that decodes; 0: the model's setting",
    "machines.roles.memory_gb": "Memory that a store may use; 0: no limit",
    "machines.roles.port": "Port of a gateway",
    "machines.rates.prefill": "Prompt tokens a second; 0: not known",
    "machines.rates.decode": "Tokens a second of one sequence while all other slots are busy; 0: not known",
    "machines.rates.prefill_curve": "`[[prompt tokens, tokens a second], …]`, measured by `kvasir measure`",
    "machines.rates.decode_curve": "`[[sequences, tokens a second of all of them], …]`, beginning with 1 sequence",
}
