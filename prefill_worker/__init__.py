"""The prefill stage: how a prefill job is handled, from delivery to ack."""
