"""Runs inside vLLM's environment, with none of Kvasir's other packages.

`connector` is vLLM's KV connector, `pages` where it finds keys and values, `sampling` how tokens are drawn, `events`
what the connector says: these need nothing but what vLLM itself brings. `main` is the process that owns an engine for
Kvasir, and `wire` what that says; they need msgpack too.
"""
